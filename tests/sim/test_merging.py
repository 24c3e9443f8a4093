"""Merging on a modelled device: how long others wait for the merged adapter, and its own requests for a switch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, simulate
from jlora.sim.trace import FIRST_ID, Trace, Turn
from tests.sim._sim import ENGINE, MODEL, replica_of, request, sized

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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("step_s", [0.004, 0.02])
def test_no_step_waits_longer_than_twice_its_usual_time(step_s: float, overlap: bool):
    """An adapter is merged and taken out, a dozen steps each way, while one of its requests and another one last."""
    engine = replace(ENGINE, merge="0", merge_starve_s=75 * step_s, overlap=overlap)
    model = replace(MODEL, fixed_s=0.0, weights_s=step_s)
    replica = replica_of(replace(sized(512), model=model, engine=engine))
    replica.submit(request("other", 4, 200), 0.0)
    came, shares = list[float](), list[float]()
    for step in range(300):
        if step == 60:
            replica.submit(request("merged", 4, 200, adapter=0), replica.clock.now)
        events = replica.step(replica.clock.now + 1)
        came += [replica.clock.now for event in events if event.request_id == "merged"]
        shares.append(replica.engine.stats().merge.share)
    assert 1.0 in shares and sum(0 < share < 1 for share in shares) > 40
    steps = [after - before for before, after in pairwise(came)]
    assert min(steps) == pytest.approx(step_s) and 1.5 * step_s < max(steps) < 2.1 * step_s
