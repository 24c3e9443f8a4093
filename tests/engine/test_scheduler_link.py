"""Admission while the link between the tiers is behind: who needs it waits in the queue, others go ahead."""

from __future__ import annotations

import pytest

from jlora.engine.scheduler import AHEAD_S, LOOKAHEAD
from tests.engine._bench import Bench, work

LONG = 11  # blocks of an adapter whose copy alone puts the link behind: 10 ms each


def queued(bench: Bench) -> int:
    return bench.scheduler.waiting


def loading(bench: Bench) -> list[str]:
    return [s.request.id for s in bench.scheduler.loading]


def with_history(tokens: list[int]) -> Bench:
    """A bench whose host holds the KV of these tokens, and whose device holds none."""
    bench = Bench(delay=4)
    bench.submit("before", tokens, max_tokens=1)
    bench.finish()
    while (victim := bench.manager.cells.worst()) is not None:
        bench.manager.cells.evict(victim)
    return bench


def test_while_the_link_is_behind_a_missing_adapter_holds_no_blocks_and_ready_ones_pass():
    bench = Bench(delay=4)
    for uid, size in ((1, LONG), (2, 3), (3, 3)):
        bench.submit(f"cold{uid}", 9, max_tokens=1, adapter=bench.adapter(uid, size))
    bench.submit("warm", 5, max_tokens=1)
    bench.step()
    assert bench.manager.forecast.wait_s > AHEAD_S
    assert loading(bench) == ["cold1"] and queued(bench) == 2
    assert list(work(bench.plans[0])) == ["warm"]
    assert bench.manager.total - bench.manager.free == LONG + 3 + 2  # the adapter, its request's KV, warm's
    bench.finish()
    started = {name: i for i, plan in enumerate(bench.plans) for name in work(plan)}
    assert started["warm"] < started["cold1"] < started["cold2"] == started["cold3"]


def test_copies_that_the_link_carries_soon_are_asked_for_together():
    bench = Bench(delay=4)
    for uid in (1, 2, 3):
        bench.submit(f"cold{uid}", 9, max_tokens=1, adapter=bench.adapter(uid, 3))
    bench.step()
    assert 0 < bench.manager.forecast.wait_s <= AHEAD_S
    assert loading(bench) == ["cold1", "cold2", "cold3"]


@pytest.mark.parametrize(("passed", "token_s", "runs"), [(False, 1.0, True), (True, 1.0, False), (True, 1e-4, True)])
def test_a_prefix_is_not_copied_past_who_waits_for_the_link_but_may_be_computed(passed, token_s, runs):
    tokens = list(range(100, 113))
    bench = with_history(tokens)
    bench.manager.policy.meter.token_s = token_s
    bench.submit("cold1", 5, max_tokens=1, adapter=bench.adapter(1, LONG))
    if passed:
        bench.submit("cold2", 5, max_tokens=1, adapter=bench.adapter(2, 3))
    bench.submit("again", tokens, max_tokens=1)
    bench.step()
    assert ("again" in loading(bench) or "again" in work(bench.plans[-1])) == runs
    assert bool(bench.manager.counters.recomputed_tokens) == (token_s < 1)
    bench.finish()
    assert len(bench.tokens("again")) == 1


def test_admission_looks_past_so_many_and_keeps_their_order():
    bench = Bench(blocks=512, delay=4, max_seqs=256)
    bench.submit("first", 5, max_tokens=1, adapter=bench.adapter(1, LONG))
    for uid in range(2, LOOKAHEAD + 2):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, 3))
    bench.submit("warm", 5, max_tokens=1)
    bench.step()
    assert not work(bench.plans[0]) and queued(bench) == LOOKAHEAD + 1
    bench.finish()
    order = [e.request_id for e in bench.events if e.usage]
    assert [n for n in order if n.startswith("cold")] == [f"cold{uid}" for uid in range(2, LOOKAHEAD + 2)]
