"""The simulator's prediction beside real replicas: on a Ray of this machine, and on processes of the router's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import render
from tests.benchmarks.test_studies import study
from tests.cluster.test_ray import ray_starts

__all__ = ["ray_starts"]  # skips this module where Ray does not start

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_prediction_stands_beside_what_real_replicas_measured(tmp_path: Path):
    lines = study(tmp_path, "cluster-real")
    sides = {line["side"]: line for line in lines}
    assert set(sides) == {"ray", "local", "predicted"}
    assert not sides["ray"]["failed"] and not sides["local"]["failed"]
    assert sides["ray"]["requests"] == sides["local"]["requests"] == sides["predicted"]["requests"] > 0
    assert all(line["ttft_s"] > 0.02 and line["tpot_s"] > 0.015 for line in lines)
    assert render("cluster-real", tmp_path / "out", draw=False)
