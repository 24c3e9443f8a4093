"""One decoding sequence runs alone where that is faster."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jlora.config import EngineConfig
from jlora.engine import one_row
from jlora.engine.batch import Buckets
from tests.engine.test_engine import GREEDY, Request, running, serve, tokens


def test_the_launch_of_one_row_is_compiled_where_it_is_on():
    assert Buckets.of(EngineConfig(max_seqs=4, one_row="on")).decode == (1, 2, 4)
    assert Buckets.of(EngineConfig(max_seqs=4, one_row="off")).decode == (2, 4)
    assert Buckets.of(EngineConfig(max_seqs=1, one_row="on")).decode == (1,)


@pytest.mark.parametrize(("one", "two", "faster"), [(1.0, 2.0, True), (8.0, 1.0, False)])
def test_a_measurement_is_made_once_and_kept(one: float, two: float, faster: bool, tmp_path: Path):
    made: list[str] = []

    def measure(dtype: str) -> tuple[float, float]:
        made.append(dtype)
        return one, two

    assert [one_row.is_faster("float32", tmp_path, measure) for _ in range(3)] == [faster] * 3 and made == ["float32"]
    one_row.is_faster("bfloat16", tmp_path, measure)
    assert made == ["float32", "bfloat16"] and len(json.loads((tmp_path / one_row.FILE).read_text())) == 2
    for damaged in ("{", "null", '{"float32": 1}', "\xff"):
        (tmp_path / one_row.FILE).write_text(damaged, encoding="latin-1")
        made.clear()
        assert one_row.is_faster("float32", tmp_path, measure) is faster and made == ["float32"]


def test_replicas_that_start_together_measure_once(tmp_path: Path):
    made: list[str] = []

    def measure(dtype: str) -> tuple[float, float]:
        made.append(dtype)
        time.sleep(0.2)
        return (1.0, 2.0) if len(made) == 1 else (2.0, 1.0)

    with ThreadPoolExecutor(4) as replicas:
        found = [replicas.submit(one_row.is_faster, "float32", tmp_path / "cache", measure) for _ in range(4)]
    assert [each.result() for each in found] == [True] * 4 and len(made) == 1


@pytest.mark.slow
def test_what_auto_means_is_told_and_both_answer_alike(tiny_model: Path):
    found = {}
    for value in ("auto", "on", "off"):
        with running(tiny_model, {}, engine__one_row=value, engine__max_seqs=4) as service:
            said = service.info.config.engine.one_row
            assert said in ("on", "off") and value in ("auto", said)
            found[value] = tokens(serve(service, [Request("r", (3, 4, 5), GREEDY)])["r"])
    assert found["on"] == found["off"] == found["auto"]
