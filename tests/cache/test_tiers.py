"""Two tiers: what moves between them, what is written when, and what the monitor does."""

from __future__ import annotations

import pytest

from jlora.cache.inspect import check_integrity, invalid_kv
from jlora.cache.transfer import Copy
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Origin
from tests.cache._books import check_idle
from tests.cache._cache import A, B, C, Cache, D

# -- two tiers ---------------------------------------------------------------------------------


def test_history_is_written_through_and_its_eviction_writes_nothing():
    cache = Cache(device=4)
    cache.run(A)
    assert cache.tiers(A) == "bb" and cache.manager.counters.blocks_out == 2
    lease = cache.leased([9] * 16)
    assert cache.tiers(A) == "hh" and not cache.copies()
    counters = cache.manager.counters
    assert (counters.clean_evictions, counters.blocks_out, counters.blocks_lost) == (2, 2, 0)
    cache.manager.leases.release(lease)


def test_kv_comes_back_from_the_host_in_one_copy_and_the_lease_waits_for_it():
    cache = Cache()
    cache.run(A)
    source = tuple(node.host[0] for node in cache.path(A))
    cache.drop_from_device(A)
    lease = cache.leased(A)
    (copy,) = cache.copies()
    assert (copy.direction, copy.source, copy.target) == ("in", source, lease.blocks[:2])
    assert copy.demand and lease.cached == 8 and not cache.ready(lease)
    cache.now += 3.0
    cache.land()
    assert cache.ready(lease) and (lease.kv_s, lease.adapter_s) == (3.0, 0.0)
    assert cache.manager.counters.kv_host_hit_tokens == 8 and cache.tiers(A) == "bb"


def test_a_waiting_lease_stops_nobody_else():
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    waiting, other = cache.leased(A), cache.leased(B)
    assert not cache.ready(waiting) and cache.ready(other)


def test_adapter_and_prefix_come_in_copies_of_their_own_and_their_waits_are_told_apart():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    for node in (*reversed(cache.path(A, adapter)), adapter):
        cache.cells.evict(node)
    lease = cache.leased(A, adapter)
    first, second = cache.copies()
    assert (first.kind, first.target, second.kind) == (ADAPTER, adapter.device, KV)
    cache.now += 1.0
    cache.land(second)
    assert not cache.ready(lease)
    cache.now += 1.0
    cache.land(first)
    assert cache.ready(lease) and (lease.kv_s, lease.adapter_s) == (1.0, 2.0)


def test_a_second_request_waits_for_the_copy_that_the_first_one_started():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    first, second = cache.leased(A, adapter), cache.leased(B, adapter)
    assert len(cache.copies()) == 1 and not cache.ready(second)
    cache.land()
    assert cache.ready(first) and cache.ready(second)
    assert cache.manager.counters.adapter_hits == 0 and cache.manager.counters.adapter_lookups == 2


def test_a_copy_outlives_the_request_that_asked_for_it():
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    cache.manager.leases.release(cache.leased(A))
    check_integrity(cache.manager)
    cache.land()
    assert cache.tiers(A) == "bb"
    check_idle(cache.manager)


def test_publishing_gives_a_block_to_a_node_that_only_the_host_has():
    cache = Cache()
    cache.run(A)
    lease = cache.leased(A, reuse=True)
    cache.manager.leases.release(lease)
    other = cache.leased([1] * 4 + [7])  # holds nothing of the second block
    cache.manager.leases.release(other)
    cache.drop_from_device(A)
    cache.manager.policy.meter.token_s = 1e-9  # computing is cheap now: the host's copy is not used
    lease = cache.leased(A)
    assert lease.cached == 0 and not cache.copies()
    cache.manager.leases.publish(lease, A, 9)
    check_integrity(cache.manager)
    assert cache.tiers(A) == "bb" and tuple(node.device[0] for node in lease.path) == lease.blocks[:2]


def test_publishing_revives_a_node_whose_data_was_lost_with_what_hangs_below():
    cache = Cache(policy="fastlibra-wom")
    cache.run(A)
    top, leaf = cache.path(A)
    cache.cells.make_host_room(64)
    cache.cells.evict(top)
    assert not (top.device or top.host) and leaf.device and cache.path(A) == [] and invalid_kv(cache.manager) == 1
    assert cache.run(A) == 0
    assert cache.path(A) == [top, leaf] and invalid_kv(cache.manager) == 0
    check_idle(cache.manager)


def test_publishing_waits_for_a_copy_of_the_same_tokens():
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    reuse = cache.manager.policy.meter.token_s
    cache.manager.policy.meter.token_s = 1e-9
    computing = cache.leased(A)
    cache.manager.policy.meter.token_s = reuse
    copying = cache.leased(A)
    cache.manager.leases.publish(computing, A, 9)
    assert computing.path == [] and not cache.ready(copying)
    cache.land()
    cache.manager.leases.publish(computing, A, 9)
    assert computing.blocks[:2] == copying.blocks[:2]
    check_integrity(cache.manager)


def test_when_the_host_is_full_the_coldest_are_backed_up_over_copies_of_what_is_worth_more():
    cache = Cache(device=16, host=4)
    cache.run(A)
    cache.run(B)  # host full: A and B are there
    cache.run(C)
    cache.run(A)
    assert [cache.tiers(x) for x in (A, B, C)] == ["bb", "bb", "dd"]
    for _ in range(4):
        cache.tend()
        cache.land()
    assert [cache.tiers(x) for x in (A, B, C)] == ["dd", "bb", "bb"]


def test_backing_up_comes_to_rest():
    cache = Cache(device=16, host=3)
    for prompt in (A, B, C, D):
        cache.run(prompt)
    for _ in range(20):
        cache.tend()
        cache.land()
    out = cache.manager.counters.blocks_out
    cache.tend()
    assert not cache.copies() and cache.manager.counters.blocks_out == out
    assert cache.tiers(A) == "bb"  # what leaves first has its copy


def test_the_least_valuable_leaves_are_dropped_when_the_host_is_full_too():
    cache = Cache(device=4, host=4)
    for prompt in (A, B, C):
        cache.run(prompt)
        for _ in range(3):
            cache.tend()
            cache.land()
    assert [cache.tiers(x) for x in (A, B, C)] == ["", "bb", "bb"]
    assert cache.manager.counters.blocks_lost == 2
    assert [cache.run(A), cache.run(A)] == [0, 8]  # computed again, and found again
    check_idle(cache.manager)


def test_what_the_queue_needs_is_not_dropped_from_the_host():
    cache = Cache(device=16, host=4)
    for prompt in (A, B):
        cache.run(prompt)
        cache.drop_from_device(prompt)
    want = cache.manager.expect(Origin(cache.manager.base), A, True, place=0)
    cache.adapter(1, 2)
    assert [cache.tiers(x) for x in (A, B)] == ["hh", ""]  # B is worth more, but nobody waits for it
    cache.manager.unexpect(want)
    cache.adapter(2, 1)
    assert cache.tiers(A) == "h"


def test_an_adapter_takes_the_place_of_history_on_the_host_copies_of_what_is_on_the_device_first():
    cache = Cache(device=16, host=6)
    cache.run(A)
    cache.drop_from_device(A)
    cache.run(B)
    cache.adapter(1, 4)
    assert [cache.tiers(x) for x in (A, B)] == ["hh", "dd"]
    cache.adapter(2, 1)
    assert cache.tiers(A) == "h"
    assert cache.manager.reserve(2) is None and cache.tiers(A) == "h"  # refused, and nothing lost for it


def test_reserved_host_blocks_are_an_adapters_until_they_are_given_back():
    cache = Cache(device=16, host=6)
    blocks = cache.manager.reserve(4)
    assert blocks is not None and cache.manager.reserve(3) is None
    check_integrity(cache.manager)
    epoch = cache.manager.epoch
    cache.manager.cancel(blocks)
    check_integrity(cache.manager)
    assert cache.manager.epoch > epoch  # an adapter that was refused its blocks is tried again
    again = cache.manager.reserve(6)
    assert again is not None and cache.manager.add_adapter(1, again).host == again
    check_integrity(cache.manager)


@pytest.mark.parametrize(("ratio", "copied"), [(2.9, True), (3.1, False)])
def test_a_prefix_is_computed_again_only_if_copying_takes_over_three_times_as_long(ratio: float, copied: bool):
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    meter = cache.manager.policy.meter
    meter.token_s = meter.load_s(KV, 2) / (8 * ratio)
    lease = cache.leased(A)
    assert bool(cache.copies()) == copied and lease.cached == (8 if copied else 0)
    assert cache.manager.counters.recomputed_tokens == (0 if copied else 8)


@pytest.mark.parametrize(("blocks", "computing", "copied"), [(8, 0.99, False), (8, 1.01, True), (11, 1.01, False)])
def test_a_copy_that_is_shorter_than_computing_may_take_six_times_as_long(blocks: int, computing: float, copied: bool):
    """Two blocks behind an adapter of so many, where computing takes `computing` times as long as their own copy."""
    cache = Cache(device=32)
    cache.run(A)
    cache.drop_from_device(A)
    cache.leased(B, cache.adapter(1, blocks))
    meter = cache.manager.policy.meter
    meter.token_s = computing * meter.load_s(KV, 2) / 8
    lease = cache.leased(A)
    assert lease.cached == (8 if copied else 0) and len(cache.copies()) == (2 if copied else 1)


# -- the monitor -------------------------------------------------------------------------------


def test_the_monitor_keeps_use_below_the_upper_threshold():
    cache = Cache(device=40, policy="fastlibra")
    for letter in range(10):
        cache.run([letter] * 16)
    assert cache.manager.device.free == 0
    cache.tend()
    assert cache.manager.device.free == 2 and cache.manager.counters.blocks_lost == 0


def test_the_monitor_evicts_nothing_that_the_queue_needs():
    cache = Cache(device=8, policy="fastlibra")
    cache.run([1] * 32)
    want = cache.manager.expect(Origin(cache.manager.base), [1] * 33, True, place=0)
    cache.tend()
    assert cache.manager.device.free == 0
    cache.manager.unexpect(want)
    cache.tend()
    assert cache.manager.device.free == 1


def test_the_monitor_fetches_the_most_valuable_below_the_lower_threshold_while_the_link_is_idle():
    cache = Cache(device=10, policy="fastlibra")
    for prompt in (A, B, C, D):
        cache.run(prompt)
        cache.drop_from_device(prompt)
    cache.tend()
    assert [cache.tiers(x) for x in (A, B, C, D)] == ["bh", "bb", "bb", "bb"]
    assert len(cache.copies()) == 7 and not any(copy.demand for copy in cache.copies())
    assert cache.manager.device.free == 3  # 70 % and not a block more
    cache.land()
    cache.tend()
    assert not cache.copies()


def test_nothing_is_fetched_ahead_beside_a_copy_under_way():
    cache = Cache(device=20, policy="fastlibra")
    cache.run(A)
    cache.drop_from_device(A)
    cache.leased(B, cache.adapter(1, 2))
    cache.tend()
    assert [copy.demand for copy in cache.copies()] == [True]
    cache.land()
    cache.tend()
    assert cache.tiers(A) == "bb"


def test_fetching_goes_down_a_path_and_starts_with_the_adapter():
    cache = Cache(device=20, policy="fastlibra")
    adapter = cache.adapter(1, 2)
    cache.run([1] * 17, adapter)
    for node in (*reversed(cache.path([1] * 17, adapter)), adapter):
        cache.cells.evict(node)
    for _ in range(8):
        cache.tend()
        cache.land()
    assert adapter.ready and cache.tiers([1] * 17, adapter) == "bbbb"


def test_fetching_evicts_nothing_and_leaves_the_dead_alone():
    cache = Cache(device=10, policy="jlora")
    adapter = cache.adapter(1, 6)
    cache.run([1] * 24)
    cache.tend()
    assert not adapter.device and cache.manager.counters.clean_evictions == 0
    other = cache.adapter(2, 1)
    want = cache.manager.expect(Origin(other), A, True, place=0)
    cache.manager.kill(other)
    cache.tend()
    assert not other.device
    cache.manager.unexpect(want)


def test_an_old_version_that_lives_on_does_not_stop_the_backups():
    cache = Cache(device=40, host=5)
    old = cache.adapter(1, 1)
    hot = [[10] * 9, [11] * 9]
    for tokens in hot:
        cache.run(tokens)  # fills the host
    held = cache.leased([5] * 9, old, reuse=False)
    cache.run(A, old)
    cache.run(B)
    assert cache.tiers(A, old) == cache.tiers(B) == "dd"
    for tokens in hot:
        cache.run(tokens)
    cache.manager.kill(old)
    cache.tend()
    cache.land()
    assert cache.tiers(A, old) == "dd" and cache.tiers(B) == "bb"
    cache.manager.leases.release(held)


def test_a_hint_takes_nothing_that_the_queue_needs_or_that_would_be_lost():
    cache = Cache(device=16, host=64)
    wanted, other = cache.adapter(1, 12), cache.adapter(2, 4)
    cache.run([5] * 5, wanted)
    want = cache.manager.expect(Origin(wanted), [5] * 5, True, place=0)
    assert cache.manager.hint(Origin(other), [6] * 5) == 0 and wanted.ready
    cache.manager.unexpect(want)
    assert cache.manager.hint(Origin(other), [6] * 5) == 4
    cache.land()


def test_an_overdue_copy_is_waited_for_and_not_streamed():
    cache = Cache(device=20, streams=True)
    adapter = cache.adapter(1, 4)
    lease = cache.leased([5] * 9, adapter)
    (copy,) = cache.copies()
    copy.started = cache.now
    predicted = cache.manager.policy.meter.load_s(copy.kind, 4)
    assert copy.streams and cache.ready(lease, 1000)
    cache.now += 10 * predicted
    assert not cache.ready(lease, 1000)
    cache.land()
    assert cache.ready(lease, 1000)
    cache.manager.leases.release(lease)


def test_what_is_on_its_way_counts_as_a_hit_on_the_host():
    cache = Cache(device=20)
    cache.run(A)
    for node in reversed(cache.path(A)):
        cache.cells.evict(node)
    cache.manager.hint(Origin(cache.manager.base), A)
    lease = cache.leased(A)
    counters = cache.manager.counters
    assert counters.kv_host_hit_tokens == counters.kv_hit_tokens == lease.cached == 8
    cache.land()
    cache.manager.leases.release(lease)


def test_of_adapters_loaded_at_once_only_the_first_has_its_copy_before_the_link_is_idle():
    cache = Cache()
    first, second = cache.adapter(1, 2), cache.adapter(2, 2)
    for adapter in (first, second):
        cache.manager.bring_in(adapter)
    assert [(copy.adapter, copy.demand) for copy in cache.copies()] == [(first, False)]
    cache.manager.hasten(first)
    assert cache.copies()[0].demand  # who loads it waits for it by now
    cache.tend()
    assert len(cache.copies()) == 1
    cache.land()
    cache.tend()
    assert [copy.adapter for copy in cache.copies()] == [second]


@pytest.mark.parametrize(("fixed_s", "fetched"), [(0.04, 3), (0.0, 40), (4.4, 1)])
def test_the_monitor_fetches_what_the_link_carries_in_a_round_of_a_tenth_second(fixed_s: float, fetched: int):
    cache = Cache(device=200, host=200)
    for _ in range(100):  # all of one size, as adapters often are
        copy = Copy("in", cache.manager.base, (AdapterNode(0, 2),), (0, 1), (0, 1), seconds=fixed_s + 0.0025)
        cache.manager.policy.meter.observe(copy)
    for uid in range(1, 61):
        cache.adapter(uid, 2)
    cache.tend()
    assert len(cache.copies()) == fetched


def test_a_full_share_of_adapters_does_not_keep_the_monitor_from_fetching_conversations():
    cache = Cache(policy="vllm-fair")
    cache.run(A)
    cache.drop_from_device(A)
    room = cache.cells.room(ADAPTER)
    first, second = cache.adapter(1, room), cache.adapter(2, room)
    cache.tend()
    cache.land()
    cache.tend()
    cache.land()
    assert first.device or second.device
    assert cache.tiers(A) == "bb"


def test_the_wait_for_the_link_is_of_copies_that_requests_wait_for():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    cache.manager.hint(cache.origin(adapter), A)
    assert cache.manager.flying and cache.manager.forecast.wait_s == 0
    cache.leased(A, adapter)  # now somebody waits for what was a prefetch
    assert cache.manager.forecast.wait_s == cache.manager.policy.meter.load_s(ADAPTER, 3)
    cache.leased(B, cache.adapter(2, 2))
    meter = cache.manager.policy.meter
    assert cache.manager.forecast.wait_s == pytest.approx(meter.load_s(ADAPTER, 3) + meter.load_s(ADAPTER, 2))
    cache.land()
    assert cache.manager.forecast.wait_s == 0


def test_a_prefix_is_computed_rather_than_copied_behind_a_long_queue_of_the_link_but_not_behind_prefetches():
    for demand, cached in ((False, 8), (True, 0)):
        cache = Cache(device=64)
        cache.run(A)
        for node in reversed(cache.path(A)):
            cache.cells.evict(node)
        adapter = cache.adapter(1, 50)  # 50 ms of the link; 8 tokens take 8 ms to compute, and 6 times that is allowed
        cache.manager.bring_in(adapter)
        if demand:
            cache.manager.hasten(adapter)
        assert cache.leased(A).cached == cached
