"""The study of merging: the product's policy on a modelled device."""

from __future__ import annotations

import pytest

from benchmarks.studies.merging import ADAPTERS, CARD, RANK, measured, trace
from jlora.sim.scenario import Work


@pytest.mark.parametrize(
    ("costs", "hot", "gains"), [("paper", 1.0, True), ("paper", 0.125, False), ("ours", 1.0, False)]
)
def test_auto_merges_only_where_it_gains(costs: str, hot: float, gains: bool):
    work = Work.of(trace(20, hot, 20), [RANK] * ADAPTERS, CARD)
    unmerged, auto = (measured(costs, side, work) for side in ("unmerged", "auto"))
    assert auto["unfinished"] == unmerged["unfinished"] == 0
    if gains:
        assert auto["mean_s"] < 0.95 * unmerged["mean_s"]
    else:
        assert auto["mean_s"] <= 1.02 * unmerged["mean_s"]
