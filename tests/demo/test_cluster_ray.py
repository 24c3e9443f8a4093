"""The demo of many replicas as `make demo-cluster` runs it: on a Ray of this machine."""

from __future__ import annotations

import pytest

from jlora.demo import cluster
from tests.cluster.test_ray import ray_starts
from tests.demo.test_cluster import goes_well

__all__ = ["ray_starts"]  # skips this module where Ray does not start

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_every_answer_is_whole_when_a_replica_is_killed(capfd: pytest.CaptureFixture[str]):
    assert cluster.main([]) == 0
    goes_well(capfd.readouterr().out)
