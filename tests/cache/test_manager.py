"""Leases: what is found, what makes room, what ends; hints, pins and versions; the books."""

from __future__ import annotations

import pytest

from jlora.cache.blocks import Tier
from jlora.cache.inspect import check_integrity, state
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.policies import Jlora
from jlora.cache.transfer import Meter
from jlora.cache.tree import ADAPTER, KV, Origin
from tests.cache._books import check_idle
from tests.cache._cache import A, B, Cache, D

# -- reuse -------------------------------------------------------------------------------------


def test_a_finished_prompt_is_found_again_up_to_its_last_full_block():
    cache = Cache()
    assert cache.run(list(range(10))) == 0
    assert cache.run(list(range(10))) == 8
    assert cache.run(list(range(8))) == 4  # at least one token is always computed
    assert cache.run([9, *range(9)]) == 0
    check_idle(cache.manager)


def test_bypassing_neither_reads_nor_leaves_kv():
    cache = Cache()
    assert [cache.run(A, reuse=False), cache.run(A), cache.run(A, reuse=False), cache.run(A)] == [0, 0, 0, 8]


def test_two_sequences_that_computed_the_same_tokens_keep_one_copy():
    cache = Cache()
    first, second = cache.leased(A), cache.leased(A)
    cache.manager.leases.publish(first, A, 9)
    free = cache.manager.device.free
    cache.manager.leases.publish(second, A, 9)
    assert cache.manager.device.free == free + 2 and first.blocks[:2] == second.blocks[:2]


def test_a_lease_grows_and_gives_everything_back():
    cache = Cache(device=4)
    lease = cache.leased([1] * 3)
    assert cache.manager.leases.grow(lease, 16) and len(lease.blocks) == 4
    assert not cache.manager.leases.grow(lease, 17) and len(lease.blocks) == 4
    cache.manager.leases.release(lease)
    assert cache.manager.device.free == 4


def test_headroom_stays_available():
    cache = Cache(device=4)
    assert cache.manager.leases.acquire(Origin(cache.manager.base), [1] * 8, True, headroom=3) is None
    assert cache.manager.leases.acquire(Origin(cache.manager.base), [1] * 8, True, headroom=2) is not None


# -- room --------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first_and_never_one_in_use():
    cache = Cache(device=8)
    cache.run(A)
    cache.run(B)
    held = cache.leased(A)
    lease = cache.leased([9] * 17)
    assert cache.tiers(A) == "bb" and cache.tiers(B) == "hh"
    for each in (lease, held):
        cache.manager.leases.release(each)


def test_an_adapter_stays_while_its_kv_does_and_leaves_after_it():
    cache = Cache(device=8)
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    cache.leased(B)
    cache.leased([3] * 5)  # needs two: the adapter's KV goes
    assert adapter.device and cache.tiers(A, adapter) == "hh"
    cache.leased(D)
    assert not adapter.device


def test_a_request_that_cannot_start_costs_no_history_counts_no_use_and_wakes_nobody():
    cache = Cache(device=10, policy="jlora")
    adapter = cache.adapter(1, 2)
    cache.run(A, adapter)
    held = cache.leased([2] * 16)
    before, epoch = state(cache.manager, 1), cache.manager.epoch
    uses = [(node.count, node.last_use) for node in (adapter, *cache.path(A, adapter))]
    assert cache.lease(A + [3] * 24, adapter) is None
    assert not cache.manager.leases.grow(held, 4 * 11) and not cache.manager.pin(cache.adapter(2, 7), True)
    after = state(cache.manager, 1)
    assert (after.hbm, after.clean_evictions, after.kv_lookup_tokens) == (
        before.hbm,
        before.clean_evictions,
        before.kv_lookup_tokens,
    )
    assert cache.manager.epoch == epoch
    assert uses == [(node.count, node.last_use) for node in (adapter, *cache.path(A, adapter))]


def test_what_the_queue_needs_leaves_last():
    cache = Cache(device=8)
    cache.run(A)
    cache.run(B)
    want = cache.manager.expect(Origin(cache.manager.base), A, True, place=0)
    lease = cache.leased([9] * 24)
    assert cache.tiers(A) == "bb" and cache.tiers(B) == "hh"
    cache.manager.leases.release(lease)
    cache.leased([8] * 32)  # but it does leave before a request waits for ever
    assert cache.tiers(A) == "hh"
    cache.manager.unexpect(want)
    check_integrity(cache.manager)


def test_the_part_on_the_device_of_a_prefix_that_the_queue_needs_is_kept_too():
    cache = Cache(device=8)
    cache.run(A)
    cache.cells.evict(cache.path(A)[1])
    cache.run(B)
    want = cache.manager.expect(Origin(cache.manager.base), A, True, place=0)
    cache.leased([9] * 25)
    assert cache.tiers(A) == "bh" and cache.tiers(B) == "hh"
    cache.manager.unexpect(want)


def test_the_epoch_moves_whenever_a_refused_request_may_be_granted():
    cache = Cache(device=4)
    held = cache.leased([1] * 13)
    assert cache.lease(B) is None
    epoch = cache.manager.epoch
    assert cache.lease(B) is None and cache.manager.epoch == epoch
    cache.manager.leases.release(held)
    assert cache.manager.epoch > epoch and cache.lease(B) is not None


# -- hints, pins, versions ---------------------------------------------------------------------


def test_a_hint_starts_the_copies_and_a_request_that_comes_makes_them_urgent():
    cache = Cache(device=20)
    adapter = cache.adapter(1, 2)
    cache.run(A, adapter)
    for node in (*reversed(cache.path(A, adapter)), adapter):
        cache.cells.evict(node)
    assert cache.manager.hint(Origin(adapter), A) == 4
    assert [copy.demand for copy in cache.copies()] == [False, False]
    assert cache.manager.hint(Origin(adapter), A) == 4 and len(cache.copies()) == 2  # they are under way
    lease = cache.leased(A, adapter)
    assert [copy.demand for copy in cache.copies()] == [True, True] and not cache.ready(lease)
    cache.land()
    assert cache.ready(lease) and lease.cached == 8
    assert cache.manager.counters.adapter_hits == 0


def test_what_a_hint_brought_in_is_not_the_next_victim():
    cache = Cache(device=12)
    cache.run(A)
    cache.drop_from_device(A)
    cache.run(B)
    cache.manager.hint(Origin(cache.manager.base), A)
    cache.land()
    cache.leased([9] * 36)
    assert cache.tiers(A) == "bb" and cache.tiers(B) == "bh"


def test_hints_take_a_bounded_share_and_never_what_is_in_use():
    cache = Cache(device=8)
    large = cache.adapter(1, 3)
    assert cache.manager.hint(Origin(large), A) == 0 and not cache.copies()
    small = cache.adapter(2, 2)
    held = cache.leased([1] * 28)
    assert cache.manager.hint(Origin(small), A) == 0 and not cache.copies()
    cache.manager.leases.release(held)
    assert cache.manager.hint(Origin(small), A) == 2


def test_a_hint_starts_nothing_while_the_link_is_behind():
    """What it brings late holds up what requests wait for."""
    cache = Cache(device=2000, host=2000)
    large, small = cache.adapter(1, 300), cache.adapter(2, 2)  # 300 ms, 2 ms
    assert cache.manager.hint(Origin(large), A) == 300
    assert cache.manager.hint(Origin(small), A) == 0 and len(cache.copies()) == 1
    cache.land()
    assert cache.manager.hint(Origin(small), A) == 2


def test_a_pinned_adapter_is_no_victim():
    cache = Cache(device=6)
    adapter = cache.adapter(1, 3)
    assert cache.manager.pin(adapter, True)
    cache.land()
    assert cache.lease([1] * 16) is None
    assert cache.manager.capacity(cache.manager.base) == cache.manager.capacity(adapter) == 12
    cache.manager.pin(adapter, False)
    assert cache.lease([1] * 16) is not None


def test_an_adapter_is_brought_in_early_only_into_free_blocks():
    cache = Cache(device=8)
    cache.run([1] * 21)
    cache.now += 1.0
    small, large = cache.adapter(1, 3), cache.adapter(2, 4)
    cache.manager.bring_in(large)
    assert not large.device
    cache.manager.bring_in(small)
    cache.land()
    assert small.ready and cache.manager.counters.clean_evictions == 0
    cache.leased([9] * 9)
    assert small.device  # who loads an adapter is about to use it: older history goes first


def test_an_adapters_hits_are_the_requests_that_found_it_on_the_device():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    assert adapter.hits == 0  # it had to come
    cache.run(B, adapter)
    cache.run(A, adapter)
    assert adapter.hits == 2


def test_a_dead_adapter_frees_everything_with_its_last_user_queued_or_in_flight():
    cache = Cache(device=12)
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    lease = cache.leased(A, adapter)
    want = cache.manager.expect(Origin(adapter), A, True, place=0)
    cache.manager.kill(adapter)
    cache.manager.leases.release(lease)
    assert 1 in cache.manager.adapters  # one request still waits for it
    last = cache.leased(B, adapter)
    cache.manager.unexpect(want)
    cache.manager.leases.publish(last, B, 9)
    assert last.path == []  # nobody will come for it
    cache.manager.leases.release(last)
    assert 1 not in cache.manager.adapters
    assert (cache.manager.device.free, cache.manager.host.free) == (12, 64)
    check_idle(cache.manager)


def test_a_dead_adapter_outlives_a_copy_under_way():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    cache.manager.bring_in(adapter)
    cache.manager.kill(adapter)
    check_integrity(cache.manager)
    assert 1 in cache.manager.adapters
    cache.land()
    assert 1 not in cache.manager.adapters and cache.manager.device.free == 16


def test_a_reload_shares_nothing_with_the_version_before():
    cache = Cache(device=20)
    old = cache.adapter(1, 2)
    cache.run(A, old)
    lease = cache.leased(B, old)
    new = cache.adapter(2, 2)
    cache.manager.kill(old)
    assert cache.run(A, new) == 0
    cache.manager.leases.release(lease)
    assert list(cache.manager.adapters) == [0, 2] and cache.run(A, new) == 8


def test_an_adapter_version_that_is_gone_can_be_neither_queued_for_nor_leased():
    cache = Cache()
    adapter = cache.adapter(1, 2)
    cache.manager.kill(adapter)
    with pytest.raises(AssertionError, match="gone"):
        cache.manager.expect(Origin(adapter), A, True, place=0)
    with pytest.raises(AssertionError, match="gone"):
        cache.lease(A, adapter)


def test_flush_drops_unused_kv_in_both_tiers_and_keeps_adapters():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    held = cache.leased(B)
    cache.manager.leases.publish(held, B, 9)
    assert cache.manager.flush() == 2
    assert adapter.device and cache.manager.device.free == 16 - 3 - 3 and cache.manager.host.history_kv == 0
    check_integrity(cache.manager)


# -- the books ---------------------------------------------------------------------------------


def test_blocks_by_class_always_sum_to_the_tier():
    cache = Cache(device=20, host=30)
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    cache.leased([2] * 6)
    seen = state(cache.manager, 100)
    assert (seen.hbm.adapters, seen.hbm.history_kv, seen.hbm.running_kv, seen.hbm.free) == (3, 2, 2, 13)
    assert (seen.host.adapters, seen.host.history_kv, seen.host.free) == (3, 2, 25)
    assert (seen.bytes_swapped_in, seen.bytes_swapped_out, seen.in_flight) == (300, 200, 0)
    assert (seen.policy, seen.adapter_hits, seen.adapter_lookups) == ("lru", 0, 1)


def test_a_block_given_back_twice_or_taken_from_nothing_is_caught():
    tier = Tier(4)
    taken = tier.take(KV, 2)
    tier.give(KV, taken)
    with pytest.raises(AssertionError, match="twice"):
        tier.give(KV, taken[:1])
    with pytest.raises(AssertionError, match="free"):
        tier.take(KV, 5)


def test_a_tier_grows_no_further_than_its_memory_goes():
    tier = Tier(8)
    taken = tier.take(KV, 3)
    tier.bound(2)
    assert (tier.total, tier.free, tier.fresh) == (5, 2, 2)
    tier.give(KV, taken)
    tier.bound(0)
    assert (tier.total, tier.free) == (3, 3), "blocks whose memory was touched stay"
    tier.check_integrity([])
    tier.bound(4)
    assert (tier.total, tier.free, tier.fresh) == (7, 7, 4)
    blocks = tier.take(ADAPTER, 7)
    assert sorted(blocks) == list(range(1, 8)) and blocks[:3] == (3, 2, 1)
    tier.bound(9)
    assert (tier.total, tier.free) == (8, 1), "never more than there are"
    tier.check_integrity(blocks)


def test_memory_that_comes_back_lets_the_host_tier_grow_again():
    memory = [3]
    sizes = Sizes(16, 10, 4, spare=lambda: memory[0])
    manager = CacheManager(sizes, Jlora(Meter(1e-3)), clock=lambda: 0.0)
    assert manager.reserve(4) is not None
    manager.tend(0.0, 0)
    assert manager.host.total == 7 and manager.reserve(4) is None
    memory[0], epoch = 5, manager.epoch
    manager.tend(0.5, 0)
    assert manager.reserve(4) is None, "it looks once a second"
    manager.tend(1.5, 0)
    assert manager.host.total == 9 and manager.epoch > epoch and manager.reserve(4) is not None


def test_the_host_tier_always_has_room_for_the_largest_adapter():
    manager = CacheManager(Sizes(16, 10, 4, spare=lambda: 0), Jlora(Meter(1e-3)), clock=lambda: 0.0)
    manager.expect_adapter(1, 6)
    manager.tend(0.0, 0)
    assert manager.host.total == 6 and manager.reserve(6) is not None


def test_an_adapter_on_the_disk_counts_with_the_tier_that_there_will_be():
    """Until a request brings it, no look makes room for it: a refusal would last for ever."""
    manager = CacheManager(Sizes(100, 100, 4, spare=lambda: 0), Jlora(Meter(1e-3)), clock=lambda: 0.0)
    manager.tend(0.0, 0)
    assert manager.host.total == 0 and manager.host_beside_pins == 100
    manager.expect_adapter(1, 12)
    manager.tend(2.0, 0)
    assert manager.host.total == 12 and manager.reserve(12) is not None


def test_a_leaked_block_is_caught():
    cache = Cache()
    lease = cache.leased(A)
    lease.blocks = lease.blocks[:-1]
    with pytest.raises(AssertionError, match="leaked"):
        check_integrity(cache.manager)


def test_a_hint_that_finds_no_memory_holds_nothing(monkeypatch: pytest.MonkeyPatch):
    cache = Cache()
    adapter = cache.adapter(1, 2)

    def short(*_: object) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(cache.cells.device, "take", short)
        with pytest.raises(MemoryError):
            cache.manager.hint(cache.origin(adapter), A)
    check_idle(cache.manager)
