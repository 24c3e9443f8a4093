"""The demo of many replicas, as `make demo-cluster` runs it, without Ray."""

from __future__ import annotations

import re
import sys

import pytest

from jlora.demo import assets, cluster


def test_every_adapter_of_the_assets_is_asked():
    assert {"", *(path.name for path in assets.ADAPTERS.iterdir())} == {answer.model for answer, _ in cluster.asked()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it finds the replica's process in /proc")
def test_every_answer_is_whole_when_a_replica_is_killed(capfd: pytest.CaptureFixture[str]):
    assert cluster.main(["--fleet", "local"]) == 0
    goes_well(capfd.readouterr().out)


def goes_well(said: str) -> None:
    """Fails unless the demo, which has said this, went as it promises."""
    assert "10 of 10 answers are whole and right" in said and "serves again" in said
    assert all(re.search(rf"^  numbers +{told} ", said, re.MULTILINE) for told in ("no numbers", "has numbers"))
