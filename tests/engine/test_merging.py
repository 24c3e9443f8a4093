"""When to merge: the policy alone."""

from __future__ import annotations

import random

import pytest

from jlora.cache.tree import AdapterNode
from jlora.engine.merging import AGE, LEAST, MOST, PERIOD, SMOOTH, AdapterCost, Fixed, Merging, Times
from tests.engine._merging import SWITCH_S, Bench


def test_an_adapter_that_everybody_asks_for_is_merged():
    bench = Bench()
    bench.live(16)
    bench.step()
    assert bench.merged is bench.nodes[0]
    bench.live(0)
    bench.step()
    assert bench.merged is None


def test_what_alone_was_asked_for_stays_merged_while_nobody_asks():
    bench = Bench()
    bench.live(16)
    bench.step(PERIOD + 1)
    bench.live(0)
    bench.step(1000)
    assert bench.merged is bench.nodes[0]
    bench.live(1)
    bench.step()
    assert bench.merged is bench.nodes[0]
    bench.live(1, 1)
    bench.step()
    assert bench.merged is None


@pytest.mark.parametrize("away", ["dying", "gone"])
def test_what_leaves_is_taken_out_although_nobody_asks(away: str):
    bench = Bench()
    bench.live(16)
    bench.step(PERIOD + 1)
    bench.live(0)
    setattr(bench.nodes[0], away, True)
    bench.step()
    assert bench.merged is None


def test_a_long_way_out_is_no_reason_to_go_while_nobody_else_waits():
    bench = Bench()
    bench.live(16)
    bench.step(400)
    bench.policy.out_s = 5.0  # longer than anybody may wait
    bench.step(400)
    assert bench.merged is bench.nodes[0] and bench.policy.live.keys() == {bench.nodes[0]}
    bench.live(16, 1)
    bench.step()
    assert bench.merged is None


def test_nothing_is_merged_that_would_make_the_next_request_wait_for_too_long():
    bench = Bench()
    bench.policy.out_s = 5.0
    bench.live(16)
    bench.step(400)
    assert bench.merged is None


def test_waiting_for_an_adapter_to_come_from_the_disk_is_no_time_that_it_is_used():
    bench = Bench()
    bench.live(1)
    for _ in range(1000):  # no step runs
        bench.now += 0.002
        assert bench.policy.choose(bench.now, None, SWITCH_S) is None
    assert bench.policy.alpha == 1


def test_nothing_is_merged_where_adapters_cost_a_step_nothing():
    bench = Bench(share=0.0)
    bench.live(64)
    bench.step(500)
    assert bench.merged is None and bench.policy.alpha > 1


def test_an_adapter_that_costs_more_than_the_one_that_was_measured_is_merged_where_that_one_is_not():
    cost = AdapterCost.measured(0.010, (4, 0.0104), (16, 0.012))  # a gain of 4 % and of 20 %
    assert cost.share_of(4) == pytest.approx(0.04 / 1.04) and cost.share_of(16) == pytest.approx(0.2 / 1.2)
    for blocks, merges in ((1, False), (4, False), (16, True)):
        bench = Bench(policy=Merging(8, 2.0, Times(cost)))
        bench.nodes[0] = AdapterNode(1, blocks)
        bench.live(16)
        bench.step()
        assert (bench.merged is bench.nodes[0]) == merges


def test_a_step_that_was_not_seen_follows_from_one_of_its_size_of_the_other_kind():
    times = Times(AdapterCost(0.2))
    assert times.step_s(True, 8, 4) is times.step_s(False, 8, 4) is None
    for count, seconds in ((4, 0.010), (16, 0.020)):
        times.observe(False, count, 4, seconds)
    assert times.step_s(True, 4, 4) == pytest.approx(0.008) and times.step_s(True, 100, 4) == pytest.approx(0.016)
    seen(times, True, 16, 0.014)  # 0.7 times
    seen(times, False, 16, 0.020)
    assert times.step_s(True, 4, 4) == pytest.approx(0.007, rel=0.02)  # not 0.014, which has more sequences
    assert times.step_s(True, 16, 4) == pytest.approx(0.014, rel=0.02) and times.step_s(False, 4, 4) == 0.010
    assert times.step_s(True, 100, 4) == pytest.approx(0.014, rel=0.02) and times.step_s(False, 1, 4) == 0.010
    seen(times, True, 1, 0.006)
    assert times.step_s(False, 1, 4) == pytest.approx(0.006 / 0.7, rel=0.02)


def test_what_was_seen_of_a_small_adapter_says_what_a_large_one_gains():
    """The small one costs half of what was measured at the start: so does the large one."""
    cost = AdapterCost.measured(0.010, (4, 0.010 / 0.98), (64, 0.010 / 0.8))  # a gain of 2 % and of 20 %
    times = Times(cost)
    seen(times, False, 8, 0.0100)
    seen(times, True, 8, 0.0099)
    times.observe(False, 1, 64, 0.0080)
    assert times.step_s(True, 1, 64) == pytest.approx(0.0080 * 0.8 * 0.99 / 0.98, rel=0.01)


def test_the_first_step_may_be_a_slow_one():
    times = Times(AdapterCost(0.2))
    times.observe(False, 8, 4, 0.010)
    times.observe(True, 8, 4, 0.100)
    assert times.step_s(True, 8, 4) == pytest.approx(0.008 + SMOOTH * 0.092)


def test_slow_steps_do_not_end_merging_for_good():
    bench = Bench()
    bench.saw(True, 0.05)
    bench.live(16)
    bench.step(10 * PERIOD)
    assert bench.merged is None
    for _ in range(4 * round(1 / AGE)):
        bench.policy.times.observe(False, 8, 4, 0.02)
    bench.step()
    assert bench.merged is bench.nodes[0]


def seen(times: Times, merged: bool, count: int, seconds: float) -> None:
    """Many steps with an adapter of four blocks."""
    for _ in range(100):
        times.observe(merged, count, 4, seconds)


def test_noise_makes_no_cost_negative_and_no_larger_adapter_cheaper():
    for large_s in (0.008, 0.010):
        cost = AdapterCost.measured(0.010, (4, 0.009), (16, large_s))
        assert cost.share_of(1) == cost.share_of(4) == cost.share_of(64) == 0
    cost = AdapterCost.measured(0.010, (4, 0.009), (16, 0.012))
    assert cost.share_of(4) == 0 and cost.share_of(16) == pytest.approx(0.2 / 1.2)


def test_while_others_wait_a_merge_must_gain_more():
    """With both switches inside, 1.06 and 1.36 times as many are served in a second."""
    for share, counts, merges in ((0.1, (16,), True), (0.1, (16, 1), False), (0.3, (16, 1), True)):
        bench = Bench(share=share, starve_s=1000.0)
        bench.live(*counts)
        bench.step(2)
        assert bool(bench.merged) == merges


def test_an_adapter_that_alone_is_asked_for_is_merged_if_that_pays_within_as_many_steps_again():
    bench = Bench(share=0.3)
    bench.saves()
    bench.live(5)  # as many as fit into the batch: the ratio is 1
    bench.step(20)
    assert bench.merged is None and bench.policy.alpha == 1
    bench.live(0, 5)  # another one: it counts anew
    bench.step(20)
    bench.live(5, 0)
    bench.step(20)
    assert bench.merged is None and bench.policy.alpha == 1
    bench.step(PERIOD - 20)
    assert bench.merged is None
    bench.step()
    assert bench.merged is bench.nodes[0]
    bench.live(5, 1)
    bench.step()
    assert bench.merged is None  # it was merged because nobody waited
    bench.step(20)
    bench.saves()
    bench.live(5, 0)
    bench.step(PERIOD - 2)
    assert bench.merged is None  # it has not been alone for long again
    bench.step(2)
    assert bench.merged is bench.nodes[0]


def test_an_adapter_that_alone_is_asked_for_stays_merged_when_the_machine_becomes_slower():
    bench = Bench()
    bench.live(16)
    bench.step()
    bench.saw(True, 0.03)
    bench.step(PERIOD)
    assert bench.merged is bench.nodes[0]


def test_short_requests_for_one_adapter_that_come_one_at_a_time_are_merged_once():
    bench, merged = Bench(share=0.3), list[bool]()
    bench.saves()
    for _ in range(20):
        bench.live(1)
        bench.step(20)
        bench.live(0)
        bench.step()
        merged.append(bench.merged is not None)
    assert merged.index(True) in range(2, 5) and all(merged[merged.index(True) :])


def test_a_queue_keeps_nothing_from_being_merged_that_pays_alone():
    bench = Bench(share=0.08)
    bench.live(16)
    bench.step(300)
    assert bench.merged is None
    bench.step(20)  # within as many steps it pays, within 256 it does not
    assert bench.merged is bench.nodes[0]


def test_short_requests_in_turn_for_two_adapters_are_not_merged():
    bench = Bench(share=0.3)
    for turn in range(100):
        bench.live(*(int(i == turn % 2) for i in range(2)))
        bench.step(20)
        bench.live(0, 0)
        bench.step()
        assert bench.merged is None


def test_even_requests_are_not_merged():
    bench = Bench()
    bench.live(2, 2, 2, 2)
    bench.step(500)
    assert not any(bench.waits)


def test_others_wait_at_most_the_limit_and_then_run_as_long():
    bench = Bench(starve_s=1.0)
    bench.live(60, 4)
    bench.step(2000)
    assert 0.5 < max(bench.waits) <= 1.0
    merged = sum(wait > 0 for wait in bench.waits) / len(bench.waits)
    assert 0.2 < merged < 0.6


def test_a_dying_or_refused_adapter_is_taken_out():
    for refuse in (True, False):
        bench = Bench()
        bench.live(16)
        bench.step()
        bench.policy.refused.add(bench.nodes[0].uid) if refuse else setattr(bench.nodes[0], "dying", True)
        bench.step()
        assert bench.merged is None
        bench.step(100)
        assert bench.merged is None


def test_a_merge_that_does_not_pay_raises_the_threshold():
    bench = Bench()
    bench.live(16)
    bench.saw(True, 0.03)  # slower than it was told
    bench.step(1000)
    assert bench.merged is None and bench.policy.alpha > 1.4


def test_a_merge_that_would_pay_lowers_the_threshold_until_it_is_made():
    bench = Bench()
    bench.live(7, 1)  # seven of a batch of eight: not more than the whole batch
    bench.step(PERIOD - 1)
    assert bench.merged is None and bench.policy.alpha == 1
    bench.step(2 * PERIOD)
    assert any(bench.waits) and bench.policy.alpha == pytest.approx(0.8)


@pytest.mark.parametrize(("seconds", "beta"), [(0.005, LEAST), (0.03, 1.0)])
def test_merged_steps_say_how_long_the_merge_is_kept(seconds: float, beta: float):
    """`beta` falls while merged steps are fast and rises to `alpha` while they are slow; below it the adapter goes."""
    bench = Bench(starve_s=1000.0)
    bench.live(16, 1)
    bench.step()
    bench.saw(True, seconds)
    bench.step(10 * PERIOD)
    assert bench.merged is bench.nodes[0] and bench.policy.alpha == 1 and bench.policy.beta == pytest.approx(beta)
    bench.live(5, 3)
    bench.step()
    assert (bench.merged is bench.nodes[0]) == (seconds < 0.02)


def test_a_quiet_hour_does_not_keep_a_busy_one_from_merging():
    bench = Bench()
    bench.live(1, 1, 1)
    bench.step(100 * PERIOD)
    assert bench.merged is None and bench.policy.alpha == MOST
    bench.live(16)  # twice the batch
    bench.step()
    assert bench.merged is bench.nodes[0]


def test_what_a_merge_owes_is_forgotten_while_it_is_alone():
    bench = Bench(share=0.5)
    bench.live(16, 1)
    bench.step(20)  # others wait for 0.4 s
    bench.live(16, 0)
    bench.step(100)
    assert bench.merged is bench.nodes[0]
    bench.live(16, 1)
    bench.step(200)
    assert max(bench.waits) > 1.6  # with a limit of 2 s and a switch of 0.1 s


@pytest.mark.parametrize("seed", range(10))
def test_nobody_ever_waits_longer_than_the_limit(seed: int):
    draw, starve_s = random.Random(seed), 1.0
    bench = Bench(starve_s=starve_s)
    since, longest, merges = dict[AdapterNode, float](), 0.0, 0
    for _ in range(5000):
        if draw.random() < 0.05:
            bench.live(draw.choice((0, 8, 30, 60)), *(draw.choice((0, 0, 1, 4)) for _ in range(3)))
        before = bench.merged
        bench.policy.out_s = draw.uniform(0, 0.2)
        bench.step(seconds=draw.uniform(0.005, 0.05))
        merges += bench.merged is not before and bench.merged is not None
        waiting = [node for node in bench.policy.live if bench.merged and node is not bench.merged]
        since = {node: since.get(node, bench.now) for node in waiting}
        longest = max(longest, *(bench.now - at for at in since.values()), 0.0)
    assert merges > 10 and starve_s / 2 < longest <= starve_s


def test_a_named_adapter_is_merged_except_while_others_must_run():
    policy = Fixed(8, 1.0)
    bench = Bench(policy=policy)
    bench.step()
    assert bench.merged is None
    policy.adapter = bench.nodes[0]
    bench.step()
    assert bench.merged is bench.nodes[0]
    bench.live(0, 3)  # only others ask
    bench.step()
    assert bench.merged is None
    bench.live(3, 3)
    bench.step(1000)
    assert 0.5 < max(bench.waits) <= 1.0


@pytest.mark.parametrize("away", ["gone", "reading"])
def test_a_named_adapter_that_is_not_in_memory_is_not_merged(away: str):
    bench = Bench(policy=Fixed(8, 1.0))
    bench.policy.adapter = bench.nodes[0]
    setattr(bench.nodes[0], away, True)
    bench.step()
    assert bench.merged is None
    setattr(bench.nodes[0], away, False)
    bench.step()
    assert bench.merged is bench.nodes[0]
