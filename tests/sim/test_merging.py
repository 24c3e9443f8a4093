"""Merging on a modelled device: how long others wait for the merged adapter, and its own requests for a switch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, simulate
from jlora.sim.trace import FIRST_ID, Trace, Turn
from jlora.types import Timing
from tests.sim._sim import ENGINE, LINK, MODEL, replica_of, request, sized

CARD = Hardware(CHIPS["a100"], 1, MODELS["llama-2-7b"])
STARVE_S = 0.3
STEP_S = 0.004


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


@pytest.mark.parametrize("tokens", [100, 1600])
@pytest.mark.parametrize("block_s", [0.002, 0.1])
def test_what_came_first_runs_once_the_merged_adapter_is_out(tokens: int, block_s: float):
    """Three of four slots are taken when another's request comes, just before three more of the merged adapter.

    Its adapter has come by then, or comes when the merged one is out.
    """
    replica = small(merge_starve_s=0.2, block_s=block_s)
    for i in range(3):
        replica.submit(request(f"first{i}", 4, tokens, seed=i + 1, adapter=0), 0.0)
    while replica.engine.stats().merge.share < 1:
        replica.step(replica.clock.now + 1)
    replica.submit(request("other", 4, 4, seed=50, adapter=1), replica.clock.now)
    for i in range(3):
        replica.submit(request(f"later{i}", 4, tokens, seed=i + 60, adapter=0), replica.clock.now)
    timing = ended(replica, "other")
    assert 0.1 < timing.ttft <= 0.2 + 4 * block_s + 8 * STEP_S and (timing.adapter_cold_start > 0) == (block_s > 0.01)


def test_nothing_is_merged_again_before_what_waited_has_run():
    """All slots are taken by requests that came first, and stay so for ten times as long as others may wait."""
    replica, shares = small(merge_starve_s=0.2), list[float]()
    for i in range(4):
        replica.submit(request(f"first{i}", 4, 600, seed=i + 1, adapter=0), 0.0)
    while replica.engine.stats().merge.share < 1:
        replica.step(replica.clock.now + 1)
    replica.submit(request("other", 4, 4, seed=50, adapter=1), replica.clock.now)
    while not any(event.request_id == "other" for event in replica.step(replica.clock.now + 1)):
        shares.append(replica.engine.stats().merge.share)
    out = shares.index(0.0)
    assert len(shares) > 5 * out and not any(shares[out:])


def test_prompts_of_the_merged_adapter_do_not_keep_others_waiting_for_longer():
    """Steps with prompts take many times as long as those that only decode."""
    replica, timings = small(merge_starve_s=0.5, max_seqs=16), list[Timing]()
    for step in range(600):
        if step % 4 == 0:
            replica.submit(request(f"hot{step}", 120, 20, seed=step, adapter=0), replica.clock.now)
        if step % 100 == 99:
            replica.submit(request(f"other{step}", 4, 4, seed=step, adapter=1), replica.clock.now)
        for event in replica.step(replica.clock.now + 1):
            if event.timing is not None and event.request_id.startswith("other"):
                timings.append(event.timing)
    assert len(timings) >= 5 and 0.2 < max(timing.queue for timing in timings) <= 0.5 + 4 * STEP_S


def test_nothing_is_merged_beside_others_where_a_switch_takes_longer_than_they_may_wait():
    replica = small(merge_starve_s=0.01)
    replica.submit(request("hot", 4, 200, adapter=0), 0.0)
    replica.submit(request("other", 4, 200, seed=9, adapter=1), 0.0)
    for _ in range(150):
        replica.step(replica.clock.now + 1)
    assert replica.engine.stats().merge.switches == 0


def small(merge_starve_s: float, max_seqs: int = 4, block_s: float = 0.002) -> Any:
    """A replica that merges adapter 0; a step that decodes takes `STEP_S`."""
    engine = replace(ENGINE, max_seqs=max_seqs, merge="0", merge_starve_s=merge_starve_s)
    model, link = replace(MODEL, fixed_s=0.0, weights_s=STEP_S), replace(LINK, block_s=block_s)
    return replica_of(replace(sized(2048), model=model, link=link, engine=engine))


def ended(replica: Any, name: str) -> Timing:
    """Plays until the request has ended."""
    while True:
        for event in replica.step(replica.clock.now + 1):
            if event.request_id == name and event.finish_reason:
                return event.timing


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
