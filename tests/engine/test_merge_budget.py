"""What merging in vain may cost: the policy alone."""

from __future__ import annotations

from jlora.cache.tree import AdapterNode
from jlora.engine.merging import BUDGET, MOST, PERIOD
from tests.engine._merging import GAIN_S, PRICE_S, SWITCH_S, Bench


def test_merges_of_what_is_alone_that_end_too_early_cost_at_most_the_budget():
    """Another request comes just when the adapter is merged."""
    bench, over = Bench(share=0.3), [0.0]
    for _ in range(8000):
        bench.live(5, int(bench.merged is not None))
        bench.step()
        over.append(bench.spent - 5 * GAIN_S * bench.merges - BUDGET * bench.latency)  # one step each
        assert over[-1] <= SWITCH_S, "the sixth request waits for the way out"
    assert bench.merges > 10
    assert all(after - before <= 6 * PRICE_S + SWITCH_S for before, after in zip(over, over[2000:], strict=False))


def test_merges_of_what_others_wait_for_in_vain_cost_the_budget_and_one_price():
    """The queue that promises a gain is gone just when the adapter is merged."""
    bench = Bench(share=0.3, starve_s=1000.0)
    for _ in range(8000):
        bench.live(0 if bench.merged else 16, 1)
        bench.step()
        assert bench.spent <= BUDGET * bench.latency + 17 * PRICE_S + 17 * GAIN_S * bench.merges
    assert bench.merges > 10


def test_a_burst_that_waits_for_what_one_request_had_merged_is_paid_by_the_budget():
    bench, gained = Bench(share=0.3), 0.0
    bench.nodes[1] = AdapterNode(9, 0)  # the base
    for _ in range(300):
        bench.live(1)
        for _ in range(100):
            bench.step()
            gained += GAIN_S * (bench.merged is not None)
        bench.live(0)
        bench.step()
        bench.live(0, 64)
        bench.step(50)
        bench.live(0, 0)
        assert bench.merged is None
        assert bench.spent <= BUDGET * bench.latency + gained + 65 * SWITCH_S
    assert bench.merges > 10


def test_hours_without_a_merge_pay_for_one():
    """Else all that they saved would be lost at once where others come just when the adapter is merged."""
    bench = Bench(share=0.3)
    bench.live(5)
    bench.policy.ran(0.0, 1e6)
    for _ in range(400):
        bench.live(5, int(bench.merged is not None))
        bench.step()
    assert bench.merges == 2, "what was left of the price for eight requests, and these steps, pay for the second"


def test_a_queue_longer_than_the_batch_has_a_price_that_can_be_saved():
    bench = Bench(share=0.3)
    bench.policy.alpha = MOST
    bench.live(10)  # more than the batch of eight, not more than `alpha` times as many
    bench.step(495)
    assert bench.merged is None
    bench.step(10)
    assert bench.merged is bench.nodes[0] and bench.policy.alpha == MOST


def test_a_merge_that_lasts_pays_for_the_next():
    bench = Bench(share=0.3)
    bench.live(5, 0)
    bench.step(490)
    assert bench.merged is None
    bench.step(110)
    assert bench.merged is bench.nodes[0]
    bench.live(5, 1)
    bench.step(2)
    assert bench.merged is None
    bench.live(5, 0)
    bench.step(PERIOD + 1)
    assert bench.merged is bench.nodes[0]


def test_a_machine_that_becomes_slower_while_nobody_waits_leaves_no_debt():
    bench = Bench(share=0.3)
    bench.saves()
    bench.live(5)
    bench.step(PERIOD + 1)
    assert bench.merged is bench.nodes[0]
    bench.saw(True, 0.1)
    bench.step(1000)
    bench.live(5, 1)
    bench.step(1)
    bench.saw(True, 0.014)
    bench.live(16, 1)
    bench.step(20)
    assert bench.merges == 2


def steps_until_merged_again(share: float, seconds: float = 0.02) -> int:
    """After ten steps with this share merged, while an eighth request waits."""
    bench = Bench(share=0.3)
    bench.policy.alpha = 0.5
    bench.live(7, 1)
    bench.step()
    for _ in range(10):
        bench.policy.ran(share, seconds)
    bench.live(0, 1)
    bench.step()
    bench.live(16)
    for _ in range(2000):
        bench.step()
        if bench.merges == 2:
            return len(bench.waits)
    raise AssertionError("it merges no more")


def test_those_who_wait_for_a_switch_are_counted():
    """A step loses at the beginning of a switch, and gains at its end."""
    after = steps_until_merged_again
    assert after(0.1) > after(0.0) > after(0.5) > after(1.0)


def test_those_who_wait_for_a_prompt_are_counted():
    """The prompt takes as long if nothing is merged, but the eighth request runs beside it."""
    assert steps_until_merged_again(1.0, 0.1) > steps_until_merged_again(1.0, 0.05) > steps_until_merged_again(1.0)


def test_merged_steps_that_serve_fewer_than_the_batch_would_are_a_debt():
    bench = Bench(share=0.3, starve_s=1000.0)
    bench.policy.alpha = 0.5
    bench.live(7, 1)
    bench.step()
    assert bench.merged is bench.nodes[0]
    bench.saw(True, 0.019)  # an eighth waits: each loses 1.5 ms, although an unmerged step takes longer
    bench.step(PERIOD - 2, 0.019)
    assert bench.merged is bench.nodes[0]
    bench.saw(True, 0.014)
    bench.live(0, 1)
    bench.step()
    bench.live(16, 1)
    bench.step(160)
    assert bench.merges == 1
    bench.step(80)
    assert bench.merges == 2
