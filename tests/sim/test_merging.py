"""Merging on a modelled device: others wait no longer than `engine.merge_starve_s`, the way out of a merge included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, simulate
from jlora.sim.trace import FIRST_ID, Trace, Turn

CARD = Hardware(CHIPS["a100"], 1, MODELS["llama-2-7b"])
STARVE_S = 0.3


def turn(at: float, session: int, adapter: int) -> Turn:
    return Turn(at, session, 0, tuple(range(FIRST_ID + session, FIRST_ID + session + 40)), 100, adapter)


@pytest.mark.parametrize("apart_s", [0.9, 2.3])
def test_others_wait_no_longer_than_they_may(apart_s: float):
    """The merged adapter's requests come without a pause, the others' now and then."""
    asked = [turn(i * 0.1, i, 0) for i in range(100)]
    asked += [turn(1.05 + i * apart_s, 100 + i, 1) for i in range(int(9 / apart_s))]
    work = Work.of(Trace("starve", tuple(sorted(asked, key=lambda t: t.at)), ("0", "1")), [8, 8], CARD)
    scenario = Scenario(CARD)
    scenario = replace(scenario, engine=replace(scenario.engine, merge="0", merge_starve_s=STARVE_S))
    result = simulate(scenario, work, "jlora")
    step_s = result["device"]["seconds"] / result["device"]["steps"]
    rows = [dict(zip(result["requests"]["columns"], row, strict=True)) for row in result["requests"]["rows"]]
    waited = [row["queue_s"] for row in rows if row["adapter"] == 1]
    assert len(waited) == int(9 / apart_s)
    assert STARVE_S / 2 < max(waited) <= STARVE_S + 2 * step_s  # it was merged when they came
