"""The demo of many replicas, as `make demo-cluster` runs it, without Ray."""

from __future__ import annotations

import sys

import pytest

from jlora.demo import cluster


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="it finds the replica's process in /proc")
def test_every_answer_is_whole_when_a_replica_is_killed(capfd: pytest.CaptureFixture[str]):
    assert cluster.main(["--fleet", "local"]) == 0
    said = capfd.readouterr().out
    assert "8 of 8 answers are whole and right" in said and "serves again" in said
