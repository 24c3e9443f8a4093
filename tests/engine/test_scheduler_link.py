"""Admission while the link between the tiers is behind: who needs it waits in the queue, others go ahead."""

from __future__ import annotations

import pytest

from jlora.cache.inspect import cells
from jlora.cache.tree import Origin
from jlora.engine.admission import AHEAD_S, LOOKAHEAD
from tests.cache._books import evict_all
from tests.engine._bench import Bench, work

LONG = 11  # blocks of an adapter whose copy alone puts the link behind: 10 ms each


def queued(bench: Bench) -> int:
    return bench.scheduler.waiting


def loading(bench: Bench) -> list[str]:
    return [s.request.id for s in bench.scheduler.loading]


def with_history(tokens: list[int]) -> Bench:
    """A bench whose host holds the KV of these tokens, and whose device holds none."""
    bench = Bench(delay=4, step_s=0.02)
    bench.submit("before", tokens, max_tokens=1)
    bench.finish()
    evict_all(bench.manager)
    return bench


def warm(blocks: int, *sizes: int) -> Bench:
    """A bench that has adapters of these sizes on its device, idle, and runs two long requests of the base."""
    bench = Bench(blocks=blocks, delay=6, step_s=0.02, max_seqs=32)
    for uid, size in enumerate(sizes, 1):
        bench.submit(f"warm-up{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, size))
    bench.finish()
    for index in range(2):
        bench.submit(f"runs{index}", 3, max_tokens=60)
    bench.step()
    return bench


def test_while_the_link_is_behind_a_missing_adapter_holds_no_blocks_and_ready_ones_pass():
    bench = Bench(delay=4, step_s=0.02)
    for uid, size in ((1, LONG), (2, 3), (3, 3)):
        bench.submit(f"cold{uid}", 9, max_tokens=1, adapter=bench.adapter(uid, size))
    bench.submit("warm", 5, max_tokens=1)
    bench.step()
    assert bench.manager.forecast.wait_s > AHEAD_S
    assert loading(bench) == ["cold1"] and queued(bench) == 2
    assert list(work(bench.plans[0])) == ["warm"]
    assert bench.manager.total - bench.manager.device.free == LONG + 3 + 2  # the adapter, its request's KV, warm's
    bench.finish()
    started = {name: i for i, plan in enumerate(bench.plans) for name in work(plan)}
    assert started["warm"] < started["cold1"] < started["cold2"] == started["cold3"]


def test_copies_that_the_link_carries_soon_are_asked_for_together():
    bench = Bench(delay=4, step_s=0.02)
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
    bench = Bench(blocks=512, delay=4, step_s=0.02, max_seqs=LOOKAHEAD)
    bench.submit("first", 5, max_tokens=1, adapter=bench.adapter(1, LONG))
    for uid in range(2, LOOKAHEAD + 2):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, 3))
    bench.submit("warm", 5, max_tokens=1)
    bench.step()
    assert not work(bench.plans[0]) and queued(bench) == LOOKAHEAD + 1
    bench.finish()
    order = [e.request_id for e in bench.events if e.usage]
    assert [n for n in order if n.startswith("cold")] == [f"cold{uid}" for uid in range(2, LOOKAHEAD + 2)]


def test_a_link_that_would_be_idle_before_the_next_plan_is_not_behind():
    bench = Bench(delay=1, step_s=0.5)
    bench.submit("runs", 5, max_tokens=20)
    bench.step()
    bench.step()
    for uid, size in ((1, LONG), (2, LONG), (3, 3)):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, size))
    bench.step()
    assert AHEAD_S < bench.manager.forecast.wait_s < bench.step_s
    assert loading(bench) == ["cold1", "cold2", "cold3"]
    bench.finish()


def test_a_forecast_knows_how_long_the_last_step_took():
    bench = Bench(step_s=0.5)
    bench.submit("runs", 5, max_tokens=3)
    bench.step()
    assert bench.manager.forecast.step_s == 0, "it was the first"
    bench.step()
    assert bench.manager.forecast.step_s == 0.5
    bench.finish()
    bench.step()
    bench.submit("later", 5, max_tokens=3)
    bench.step()
    assert bench.manager.forecast.step_s == 0, "none ran before"
    bench.finish()


def test_what_the_link_has_carried_of_a_copy_no_longer_keeps_others_waiting():
    bench = Bench(delay=6, step_s=0.02)
    for uid, size in ((1, LONG), (2, 3)):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, size))
    bench.step()
    assert loading(bench) == ["cold1"]
    next(iter(cells(bench.manager).traffic.arriving)).started = bench.now
    bench.step()
    assert bench.manager.forecast.wait_s < AHEAD_S + 0.04 and loading(bench) == ["cold1", "cold2"]
    bench.finish()


def test_those_that_pass_leave_room_for_the_first_that_waits():
    """However small they are and however many: it starts when the link is free, and not when they have ended."""
    bench = Bench(blocks=64, delay=2, step_s=0.02)
    bench.submit("long", 5, max_tokens=1, adapter=bench.adapter(1, LONG))
    bench.submit("large", 5, max_tokens=1, adapter=bench.adapter(2, 20))
    for i in range(8):
        bench.submit(f"small{i}", list(range(100 * i, 100 * i + 20)), max_tokens=30, priority=-1)
    for _ in range(14):
        bench.step()
    started = {name: i for i, plan in reversed(list(enumerate(bench.plans))) for name in work(plan)}
    assert started["long"] == 3 and started["large"] < 14
    assert not any(event.usage for event in bench.events if event.request_id.startswith("small"))
    assert 0 < sum(name.startswith("small") for name in work(bench.plans[1])) < 8
    bench.finish()


def test_a_prefix_that_is_on_its_way_for_a_hint_does_not_pass_either():
    tokens = list(range(100, 113))
    bench = with_history(tokens)
    bench.manager.policy.meter.token_s = 1.0
    for uid, size in ((1, LONG), (2, 3)):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, size))
    bench.manager.hint(Origin(bench.manager.base), tokens)
    bench.submit("hinted", tokens, max_tokens=1)
    bench.step()
    assert loading(bench) == ["cold1"] and queued(bench) == 2
    bench.finish()


@pytest.mark.parametrize("others", [False, True])
def test_an_activated_lora_computes_the_base_s_part_while_the_link_is_behind_if_nobody_stays_before_it(others: bool):
    bench = Bench(blocks=64, delay=6, step_s=0.02)
    bench.manager.policy.meter.token_s = 1e-4
    bench.submit("long", 5, max_tokens=1, adapter=bench.adapter(1, LONG))
    if others:
        bench.submit("stays", 5, max_tokens=1, adapter=bench.adapter(3, 3))
    bench.submit("checks", 60, max_tokens=1, adapter=bench.adapter(2, 3), activation=50)
    bench.step()
    bench.step()
    runs = [work(plan) for plan in bench.plans]
    assert runs == [{}, {}] if others else {"checks": (0, 50)} in runs
    bench.finish()


def test_no_more_than_can_run_wait_for_adapters_however_fast_the_link():
    bench = Bench(blocks=256, delay=4, max_seqs=2)
    for uid in range(1, 5):
        bench.submit(f"cold{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, 1))
    bench.submit("warm", 5, max_tokens=1)
    bench.step()
    assert loading(bench) == ["cold1", "cold2"] and list(work(bench.plans[0])) == ["warm"]
    bench.finish()


def crowd(bench: Bench, running: int) -> None:
    """So many that run for long, and the copy of an adapter that puts the link behind."""
    for index in range(running):
        bench.submit(f"runs{index}", 3, max_tokens=60)
    bench.submit("cold", 5, max_tokens=1, adapter=bench.adapter(1, LONG))
    bench.step()
    assert bench.manager.forecast.wait_s > AHEAD_S and loading(bench) == ["cold"]


@pytest.mark.parametrize(("running", "stays"), [(1, False), (2, True)])
def test_what_the_queue_needs_leaves_for_one_more_only_if_the_link_can_bring_it_back_or_few_run(running, stays):
    bench = Bench(blocks=64, delay=6, step_s=0.02, max_seqs=32)
    needed = list(range(500, 500 + 4 * 20 + 1))
    bench.submit("before", needed, max_tokens=1)
    bench.finish()
    crowd(bench, running)
    bench.submit("more", 4 * 35, max_tokens=1)  # its room is history's, which the one behind it needs
    bench.submit("again", needed, max_tokens=1)
    bench.step()
    assert (bench.scheduler.waiting == 2) == stays
    assert (bench.manager.cached_tokens(Origin(bench.manager.base), needed) == 80) == stays
    bench.finish()
    assert len(bench.tokens("more")) == len(bench.tokens("again")) == 1


@pytest.mark.parametrize("max_seqs", [1, 8, 64])
@pytest.mark.parametrize("policy", ["jlora", "vllm-fair", "vllm"])
def test_with_none_running_whatever_the_queue_needs_leaves_for_the_first(max_seqs: int, policy: str):
    bench = Bench(blocks=150, delay=40, step_s=0.02, max_seqs=max_seqs, policy=policy)
    share = bench.manager.adapter_limit if policy != "jlora" else 100
    for uid in (1, 2, 3):
        bench.submit(f"a{uid}", 5, max_tokens=1, adapter=bench.adapter(uid, share * 2 // 3))
    for uid in (1, 2, 3):
        bench.submit(f"b{uid}", 5, max_tokens=1, adapter=bench.manager.adapters[uid])
    bench.finish()
    assert all(len(bench.tokens(f"{name}{uid}")) == 1 for name in "ab" for uid in (1, 2, 3))


def test_a_head_that_needs_what_those_behind_it_need_is_not_held_up_while_the_link_is_idle():
    bench = warm(50, 25)
    bench.submit("head", 9, max_tokens=1, adapter=bench.adapter(2, 25))
    bench.submit("behind", 9, max_tokens=1, adapter=bench.manager.adapters[1])
    seen = len(bench.plans)
    bench.finish()
    first = next(i for i, plan in enumerate(bench.plans[seen:]) if "head" in work(plan))
    assert first < 12, "it waited for the batch to end"


def test_priority_is_before_any_number_of_arrivals():
    bench = Bench(max_seqs=1)
    bench.submit("runs", 3, max_tokens=2)
    bench.step()
    for index in range(100):
        bench.submit(f"usual{index}", 3, max_tokens=1)
    bench.submit("urgent", 3, max_tokens=1, priority=1)
    bench.finish()
    order = [e.request_id for e in bench.events if e.usage]
    assert order[:2] == ["runs", "urgent"]


def test_while_room_for_the_head_is_made_of_what_others_need_those_that_need_no_copy_go_ahead():
    bench = warm(64, 24, 24)
    bench.submit("head", 5, max_tokens=1, adapter=bench.adapter(3, 40))
    for uid in (1, 2):
        bench.submit(f"behind{uid}", 5, max_tokens=1, adapter=bench.manager.adapters[uid])
    bench.step()
    assert "behind1" in work(bench.plans[-1]) and not loading(bench)
    assert not bench.manager.adapters[2].device  # that is needed later than the other one
    seen = len(bench.plans)
    bench.finish()
    started = {name: i for i, plan in reversed(list(enumerate(bench.plans[seen:]))) for name in work(plan)}
    assert started["head"] < 30  # and not when those that run have ended


def test_who_needs_the_link_does_not_pass_a_head_whose_room_is_being_made():
    bench = warm(120, 24, 24, 24)
    bench.submit("head", 5, max_tokens=1, adapter=bench.adapter(4, 80))
    bench.submit("behind1", 5, max_tokens=1, adapter=bench.manager.adapters[1])
    bench.submit("cold", 5, max_tokens=1, adapter=bench.adapter(5, 3))
    for uid in (2, 3):
        bench.submit(f"behind{uid}", 5, max_tokens=1, adapter=bench.manager.adapters[uid])
    bench.step()
    assert "behind1" in work(bench.plans[-1]) and not loading(bench)
    bench.finish()
    order = [e.request_id for e in bench.events if e.usage]
    assert order.index("head") < order.index("cold")
