"""Whose turn it is while the link between the tiers is behind: first those that find all they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from jlora.engine.admission import HELD, OVERTAKES, Step, Verdict, judge
from jlora.engine.plan import ROW
from tests.cache._books import evict_all
from tests.engine._bench import Bench, counted, work

DEAR = 100  # blocks of an adapter whose copy keeps the link behind for 50 steps: 10 ms each
HISTORY = list(range(100, 113))


@dataclass
class Answers:
    """A sequence by what `judge` may ask about it; what it must not ask is None, which counts as no answer."""

    refused: bool = False
    adapter_ready: bool = True
    overtakable: bool | None = None
    link: bool | None = None
    room: bool | None = None

    def may_be_overtaken(self) -> bool:
        assert self.overtakable is not None, "asked for no reason"
        return self.overtakable

    def needs_link(self) -> bool:
        assert self.link is not None, "asked for no reason"
        return self.link

    def fits(self) -> bool:
        assert self.room is not None, "asked for no reason"
        return self.room


ONE: Any = [None]  # some other sequence


@pytest.mark.parametrize(
    ("facts", "step", "verdict"),
    [
        (Answers(), {}, Verdict.RUN),
        (Answers(overtakable=True), {"behind": True}, Verdict.DEFER),
        (Answers(overtakable=False, link=True), {"behind": True}, Verdict.HOLD),
        (Answers(overtakable=False, link=False), {"behind": True}, Verdict.RUN),
        (Answers(), {"behind": True, "closed": True}, Verdict.DEFER),
        (Answers(link=False), {"behind": True, "closed": True, "second": True}, Verdict.RUN),
        (Answers(link=True), {"behind": True, "second": True}, Verdict.HOLD),
        (Answers(refused=True), {"deferred": ONE}, Verdict.DEFER),
        (Answers(refused=True), {"deferred": ONE, "second": True}, Verdict.STOP),
        (Answers(refused=True), {"held": ONE}, Verdict.STOP),
        (Answers(refused=True, adapter_ready=False, room=False), {}, Verdict.STOP),
        (Answers(refused=True, adapter_ready=False, room=True), {}, Verdict.HOLD),
    ],
)
def test_the_verdict_on_a_waiting_sequence(facts: Answers, step: dict[str, Any], verdict: Verdict):
    assert judge(facts, Step([], [], **step)) is verdict


def behind(link: bool = True, tenant: str = "", **config: int) -> Bench:
    """A step takes a row of tokens; the host holds a tenant's KV of `HISTORY`; the link copies an adapter, or idles."""
    bench = Bench(blocks=512, delay=60, step_s=0.02, max_step_tokens=ROW, **config)
    bench.submit("before", HISTORY, max_tokens=1, tenant=tenant)
    bench.finish()
    evict_all(bench.manager)
    if link:
        bench.submit("cold", 5, max_tokens=1, adapter=bench.adapter(1, DEAR))
        bench.step()
    return bench


def fill(bench: Bench, name: str, **fields: Any) -> None:
    """A request that finds all it needs, and takes a whole step."""
    bench.submit(name, [int(name[4:]) + 500] * ROW, max_tokens=1, **fields)


def admitted(bench: Bench, name: str) -> bool:
    return any(s.request.id == name for s in (*bench.scheduler.loading, *bench.scheduler.running))


@pytest.mark.parametrize(("link", "first"), [(True, "warm0"), (False, "again")])
def test_who_needs_a_copy_has_its_turn_later_but_only_while_the_link_is_behind(link: bool, first: str):
    bench = behind(link)
    bench.submit("again", HISTORY, max_tokens=1)
    fill(bench, "warm0")
    bench.step()
    assert "warm0" in work(bench.plans[-1]) and admitted(bench, "again") == (first == "again")
    bench.finish()
    assert len(bench.tokens("again")) == len(bench.tokens("warm0")) == 1


def test_nobody_is_passed_by_more_than_so_many():
    bench = behind(max_seqs=128)
    bench.submit("again", HISTORY, max_tokens=1)
    for index in range(OVERTAKES + 8):
        fill(bench, f"warm{index}")
    seen = len(bench.plans)
    while not admitted(bench, "again"):
        bench.step()
        assert bench.manager.forecast.wait_s > 0.1, "the link is not behind any more: nothing is shown"
    started = [name for plan in bench.plans[seen:] for name in work(plan)]
    assert started == [f"warm{index}" for index in range(OVERTAKES + 1)]  # the last one after it, in the same step
    bench.finish()


def test_nobody_is_passed_by_more_than_so_many_of_its_own_tenant_while_another_has_its_turns():
    bench = behind(tenant="a", max_seqs=128)
    bench.submit("again", HISTORY, max_tokens=1, tenant="a")
    for index in range(OVERTAKES + 16):
        fill(bench, f"warm{index}", tenant="b" if index < 8 else "a")
    seen = len(bench.plans)
    while not admitted(bench, "again"):
        bench.step()
        assert bench.manager.forecast.wait_s > 0.1, "the link is not behind any more: nothing is shown"
    passed = [w.sequence.request.tenant for plan in bench.plans[seen:-1] for w in plan.work]
    assert passed.count("b") == 8 and OVERTAKES - 8 <= passed.count("a") <= OVERTAKES, passed
    bench.finish()


def test_a_lower_priority_passes_nobody():
    bench = behind()
    fill(bench, "warm0")
    fill(bench, "warm1", priority=1)
    bench.submit("again", HISTORY, max_tokens=1, priority=1)
    bench.step()
    assert "warm1" in work(bench.plans[-1]) and not admitted(bench, "again")  # its equal
    bench.step()
    assert admitted(bench, "again") and "warm0" in work(bench.plans[-1])
    bench.finish()


def test_the_queue_keeps_its_order_whatever_leaves_it():
    bench = Bench(max_seqs=1)
    bench.submit("runs", 3, max_tokens=2)
    bench.step()
    for index in range(30):
        bench.submit(f"q{index}", 3, max_tokens=1, priority=index % 3)
    for index in range(0, 30, 4):
        bench.abort(f"q{index}")
    left = [index for index in range(30) if index % 4]
    assert bench.scheduler.waiting == len(left)
    bench.finish()
    order = [e.request_id for e in bench.events if e.token_id is not None][2:]
    assert order == [f"q{index}" for index in sorted(left, key=lambda i: (-(i % 3), i))]


def test_the_bound_holds_within_one_step_too():
    bench = Bench(blocks=4096, delay=60, step_s=0.02, max_step_tokens=4096, max_seqs=128)
    for uid in (1, 2):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, DEAR))
    for index in range(2 * OVERTAKES):
        fill(bench, f"warm{index}")
    bench.step()
    assert max(sequence.overtaken for sequence in bench.scheduler.queue) == OVERTAKES
    assert len(work(bench.plans[-1])) == 2 * OVERTAKES  # the others beside it, as far as they leave it room
    bench.finish()


def test_who_waits_for_its_leader_hides_nobody():
    bench = Bench(blocks=1024, delay=60, step_s=0.02, max_seqs=32)
    bench.submit("many", 40, max_tokens=1, adapter=bench.adapter(1, 3), n=100)
    fill(bench, "warm0")
    bench.step()
    assert "warm0" in work(bench.plans[-1])
    bench.finish()


def test_who_is_refused_room_does_not_keep_the_turn_of_those_before_it():
    bench = behind(max_seqs=8)
    bench.submit("runs", 3, max_tokens=300)
    bench.step()
    taken = 512 - bench.manager.device.free
    bench.submit("again", HISTORY, max_tokens=1)
    bench.submit("large", [9] * (4 * (512 - taken + 8)), max_tokens=1)
    bench.step()
    assert admitted(bench, "again") and not admitted(bench, "large")
    bench.finish(limit=2000)
    assert len(bench.tokens("large")) == 1


def test_however_many_wait_for_the_link_those_that_need_none_are_reached():
    bench = Bench(blocks=4096, delay=60, step_s=0.02, max_step_tokens=4096, max_seqs=128)
    bench.submit("dear", 5, max_tokens=1, adapter=bench.adapter(1, DEAR))
    for uid in range(2, 2 + HELD + 4):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, 3))
    for index in range(OVERTAKES + 4):  # more than may pass
        fill(bench, f"warm{index}")
    bench.step()
    assert len(work(bench.plans[-1])) == OVERTAKES + 4
    bench.finish(limit=5000)


def test_of_those_far_behind_nobody_is_asked_whether_computing_were_sooner():
    bench = behind(max_seqs=128)
    for uid in range(2, 2 + HELD):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, 3))
    for index in range(20):
        bench.submit(f"again{index}", HISTORY, max_tokens=1)
    asked = counted(bench.manager.leases, "needs_copy")
    bench.step()
    assert not asked and not admitted(bench, "again0")
    bench.finish(limit=5000)
    assert asked and all(len(bench.tokens(f"again{index}")) == 1 for index in range(20))


@pytest.mark.parametrize("slots", [2, 8])
def test_who_waits_for_the_link_keeps_a_slot_from_those_of_lower_priority(slots: int):
    """More requests of lower priority than slots need no copy, and their answers are long."""
    bench = Bench(blocks=4096, delay=60, step_s=0.02, max_step_tokens=4096, max_seqs=slots)
    bench.submit("dear", 5, max_tokens=1, adapter=bench.adapter(1, DEAR))
    bench.step()
    bench.submit("high", 5, max_tokens=1, adapter=bench.adapter(2, 3), priority=5)
    for index in range(3 * slots):
        bench.submit(f"low{index}", [index + 500] * ROW, max_tokens=400)
    bench.step()
    assert len(work(bench.plans[-1])) == slots - 1 and not admitted(bench, "high")  # it is held
    while not bench.tokens("high"):
        bench.step()
        assert len(bench.plans) < 3 * 60, "all slots are taken"
    bench.finish(limit=5000)
