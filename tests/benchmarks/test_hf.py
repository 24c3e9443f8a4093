"""R1 and R1b against transformers and PEFT, in miniature, where they are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_studies import study

pytest.importorskip("torch")
pytest.importorskip("peft")


@pytest.mark.slow
def test_the_peer_gives_the_same_answers(tmp_path: Path):
    lines = study(tmp_path, "throughput", "--no-grpc", "--peer-python", sys.executable)
    found = {line["side"]: line for line in lines}
    assert found["outputs"]["equal"] == found["outputs"]["requests"] == 8
    assert found["peft"]["seconds"] > 0 and found["versions"]["peft"]


@pytest.mark.slow
def test_one_request_is_measured_both_ways(tmp_path: Path):
    lines = study(tmp_path, "latency", "--rounds", "1", "--peer-python", sys.executable)
    sides = {line["side"] for line in lines if line["cell"] == "rounds"}
    assert {f"{how} {case}" for how in ("jlora", "generate", "loop") for case in ("base 8", "adapter 24")} <= sides
