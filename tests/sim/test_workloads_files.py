"""The public files' formats, on small files written like them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from jlora.errors import ConfigError
from jlora.sim.workloads import SOURCES, Load, files, play
from jlora.sim.workloads.files import Step
from tests.sim import _public


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _public.write_all(tmp_path_factory.mktemp("data"))


def test_azure_has_a_clock_and_lengths(data: Path):
    found = files.azure(data)
    assert found.times[:3].tolist() == [0.0, 2.0, 4.0] and len(found.times) == 60
    assert (found.prompts[1], found.outputs[1]) == (101, 11)


def test_a_mooncake_session_is_the_longest_shared_prefix(data: Path):
    starts, sessions = files.mooncake(data)
    by_first = {session[0].asked: session for session in sessions}
    assert set(by_first) == {1200, 600, 700} and len(starts) == 3
    first, second, third = by_first[1200]
    assert (second.asked, second.told) == (1400 - 1200 - 100, 80)
    assert (third.asked, third.told) == (2000 - 1400 - 80, 70)
    assert second.gap_s == pytest.approx(60, abs=3) and first.gap_s == 0
    assert starts.tolist() == sorted(starts) and np.diff(starts).min() > 0  # ticks are spread


def test_coding_sessions_know_sub_agents_and_end_where_a_context_is_made_anew(data: Path):
    head, (with_agent, short) = files.coding_sessions(data)
    assert head == 4000
    assert with_agent == [
        Step(1000, 100, 0.0, 0),
        Step(300, 50, 4.0, 0),
        Step(900, 20, 0.0, 1),
        Step(80, 30, 2.0, 1),
        Step(150, 60, 8.0, 0),
    ]
    assert [step.asked for step in short] == [2000, 100]


def test_gentd_gives_the_first_adapter_of_each_request_that_has_one(data: Path):
    assert files.lora_order(data) == ["x", "x", "y", "x", "z"]
    clock = files.lora_clock(data)
    assert clock.times.tolist() == [0, 60, 120, 240, 300]
    assert clock.clients is not None and clock.clients.tolist() == [0, 0, 1, 0, 2]


def test_servegen_clients_have_rates_by_window_and_a_law(data: Path):
    found = files.clients(data, "m-mid")
    assert found.rates.tolist() == [[4, 4], [1, 1], [1, 0]]
    assert found.shapes.tolist() == [0.7, 0.8, 1.0] and found.weibull.tolist() == [False, True, False]


def test_dialogs_are_questions_and_answers_in_tokens(data: Path):
    services = files.sgd(data)
    assert list(services) == ["Banks_1", "Media_1"]
    assert services["Banks_1"] == [[Step(4, 8), Step(12, 16)]]
    assert files.taskmaster(data) == [[Step(4 + 80 / 4, 8)]]
    assert files.topical(data) == [[Step(4, 8), Step(12, 16)]] * 3  # the fifth message has no answer
    assert files.tatoeba(data) == {"deu": [(10, 12)], "ben": [(10, 30)]}


@pytest.mark.parametrize("name", SOURCES)
def test_every_workload_plays_from_the_files(data: Path, name: str):
    load = Load(rate=3, seconds=60, adapters=12, gap_s=6, shrink=4, vocab=300, max_len=8000)
    trace = play(SOURCES[name](data), load)
    assert trace.turns and "synthetic" not in trace.name
    assert trace.digest() == play(SOURCES[name](data), load).digest()
    real = [turn for turn in trace.turns if turn.at >= 0]
    assert len(real) == pytest.approx(180, rel=0.5)


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"W7"}))
def test_a_directory_without_the_files_is_one_clear_line(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match=rf"data directory {tmp_path}: \w+\.(csv|jsonl)"):
        SOURCES[name](tmp_path)


def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path):
    path = tmp_path / "tatoeba_pairs.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"lang": "deu"}\n')
    with pytest.raises(ConfigError, match="tatoeba_pairs.jsonl.gz: KeyError: 'eng'"):
        files.tatoeba(tmp_path)
    path.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="tatoeba_pairs.jsonl.gz"):
        files.tatoeba(tmp_path)
    packed = gzip.compress(b'{"lang": "deu", "eng": "a", "tgt": "b"}\n' * 50)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match="tatoeba_pairs.jsonl.gz: EOFError"):
        files.tatoeba(tmp_path)
