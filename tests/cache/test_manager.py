"""Leases over two tiers: what is found, what moves, what leaves, and what never does."""

from __future__ import annotations

import pytest

from jlora.cache.blocks import BlockAllocator, Tier
from jlora.cache.inspect import check_idle, check_integrity, invalid_kv, state
from jlora.cache.manager import CacheManager, Lease, Sizes
from jlora.cache.tending import Tending
from jlora.cache.transfer import Copy, Meter
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node
from tests.cache._world import POLICIES

BLOCK = 4
BLOCK_S, TOKEN_S = 1e-3, 1e-3  # computing a block takes four times as long as copying it


class Cache:
    """A manager with a link whose copies land when told, and a clock that moves when told."""

    def __init__(self, device: int = 16, host: int = 64, policy: str = "lru"):
        self.now = 1.0
        meter = Meter(BLOCK_S, TOKEN_S)
        made = POLICIES[policy](meter)
        self.manager = CacheManager(Sizes(device, host, BLOCK), made, lambda: self.now)
        self.cells = self.manager.cells
        self.tending = Tending(self.manager, 0.1)
        self.flying: list[Copy] = []

    def adapter(self, uid: int, size: int) -> AdapterNode:
        node = self.manager.add_adapter(uid, size)
        assert node is not None
        return node

    def lease(self, tokens: list[int], adapter: AdapterNode | None = None, reuse: bool = True) -> Lease | None:
        self.now += 1.0
        lease = self.manager.acquire(adapter or self.manager.base, "", tokens, reuse, headroom=0)
        check_integrity(self.manager)
        return lease

    def leased(self, tokens: list[int], adapter: AdapterNode | None = None, reuse: bool = True) -> Lease:
        lease = self.lease(tokens, adapter, reuse)
        assert lease is not None
        return lease

    def copies(self) -> list[Copy]:
        """The copies under way."""
        self.flying += self.manager.take_copies()
        return self.flying

    def land(self, *copies: Copy) -> None:
        """These copies are complete; without any, all that are under way."""
        done = list(copies) or list(self.copies())
        self.flying = [copy for copy in self.copies() if copy not in done]
        self.manager.landed(done)
        check_integrity(self.manager)

    def run(self, tokens: list[int], adapter: AdapterNode | None = None, reuse: bool = True) -> int:
        """A whole request, all its copies included; how many of its tokens were cached."""
        lease = self.leased(tokens, adapter, reuse)
        self.land()
        assert self.manager.ready(lease)
        self.manager.publish(lease, tokens, len(tokens))
        self.now += 1.0
        self.manager.release(lease)
        self.land()
        return lease.cached

    def tend(self, running: int = 0) -> None:
        self.now += 0.2
        self.tending.round(self.now, running)
        check_integrity(self.manager)

    def path(self, tokens: list[int], adapter: AdapterNode | None = None) -> list[Node]:
        return self.manager.tree.match(adapter or self.manager.base, "", tokens, len(tokens))

    def tiers(self, tokens: list[int], adapter: AdapterNode | None = None) -> str:
        """Where each block of a prompt is: d(evice), h(ost), b(oth)."""
        names = {(True, False): "d", (False, True): "h", (True, True): "b"}
        return "".join(names[bool(n.device), bool(n.host)] for n in self.path(tokens, adapter))

    def drop_from_device(self, tokens: list[int]) -> None:
        for node in reversed(self.path(tokens)):
            self.cells.evict(node)


A, B, C, D = [1] * 9, [2] * 9, [3] * 9, [4] * 9  # two full blocks each, and one token more


# -- reuse ------------------------------------------------------------------------------------------


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
    cache.manager.publish(first, A, 9)
    free = cache.manager.free
    cache.manager.publish(second, A, 9)
    assert cache.manager.free == free + 2 and first.blocks[:2] == second.blocks[:2]


def test_a_lease_grows_and_gives_everything_back():
    cache = Cache(device=4)
    lease = cache.leased([1] * 3)
    assert cache.manager.grow(lease, 16) and len(lease.blocks) == 4
    assert not cache.manager.grow(lease, 17) and len(lease.blocks) == 4
    cache.manager.release(lease)
    assert cache.manager.free == 4


def test_headroom_stays_available():
    cache = Cache(device=4)
    assert cache.manager.acquire(cache.manager.base, "", [1] * 8, True, headroom=3) is None
    assert cache.manager.acquire(cache.manager.base, "", [1] * 8, True, headroom=2) is not None


# -- two tiers --------------------------------------------------------------------------------------


def test_history_is_written_through_and_its_eviction_writes_nothing():
    cache = Cache(device=4)
    cache.run(A)
    assert cache.tiers(A) == "bb" and cache.manager.counters.blocks_out == 2
    lease = cache.leased([9] * 16)
    assert cache.tiers(A) == "hh" and not cache.copies()
    counters = cache.manager.counters
    assert (counters.clean_evictions, counters.blocks_out, counters.blocks_lost) == (2, 2, 0)
    cache.manager.release(lease)


def test_kv_comes_back_from_the_host_in_one_copy_and_the_lease_waits_for_it():
    cache = Cache()
    cache.run(A)
    source = tuple(node.host[0] for node in cache.path(A))
    cache.drop_from_device(A)
    lease = cache.leased(A)
    (copy,) = cache.copies()
    assert (copy.direction, copy.source, copy.target) == ("in", source, tuple(lease.blocks[:2]))
    assert copy.demand and lease.cached == 8 and not cache.manager.ready(lease)
    cache.now += 3.0
    cache.land()
    assert cache.manager.ready(lease) and (lease.kv_s, lease.adapter_s) == (3.0, 0.0)
    assert cache.manager.counters.kv_host_hit_tokens == 8 and cache.tiers(A) == "bb"


def test_a_waiting_lease_stops_nobody_else():
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    waiting, other = cache.leased(A), cache.leased(B)
    assert not cache.manager.ready(waiting) and cache.manager.ready(other)


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
    assert not cache.manager.ready(lease)
    cache.now += 1.0
    cache.land(first)
    assert cache.manager.ready(lease) and (lease.kv_s, lease.adapter_s) == (1.0, 2.0)


def test_a_second_request_waits_for_the_copy_that_the_first_one_started():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    first, second = cache.leased(A, adapter), cache.leased(B, adapter)
    assert len(cache.copies()) == 1 and not cache.manager.ready(second)
    cache.land()
    assert cache.manager.ready(first) and cache.manager.ready(second)
    assert cache.manager.counters.adapter_hits == 0 and cache.manager.counters.adapter_lookups == 2


def test_a_copy_outlives_the_request_that_asked_for_it():
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    cache.manager.release(cache.leased(A))
    check_integrity(cache.manager)
    cache.land()
    assert cache.tiers(A) == "bb"
    check_idle(cache.manager)


def test_publishing_gives_a_block_to_a_node_that_only_the_host_has():
    cache = Cache()
    cache.run(A)
    lease = cache.leased(A, reuse=True)
    cache.manager.release(lease)
    other = cache.leased([1] * 4 + [7])  # holds nothing of the second block
    cache.manager.release(other)
    cache.drop_from_device(A)
    cache.cells.policy.meter.token_s = 1e-9  # computing is cheap now: the host's copy is not used
    lease = cache.leased(A)
    assert lease.cached == 0 and not cache.copies()
    cache.manager.publish(lease, A, 9)
    check_integrity(cache.manager)
    assert cache.tiers(A) == "bb" and [node.device[0] for node in lease.path] == lease.blocks[:2]


def test_publishing_revives_a_node_whose_data_was_lost_with_what_hangs_below():
    cache = Cache(policy="fastlibra-wom")
    cache.run(A)
    top, leaf = cache.path(A)
    cache.cells.make_host_room(64, worth=float("inf"))
    cache.cells.evict(top)
    assert not top.has_data and leaf.device and cache.path(A) == [] and invalid_kv(cache.manager) == 1
    assert cache.run(A) == 0
    assert cache.path(A) == [top, leaf] and invalid_kv(cache.manager) == 0
    check_idle(cache.manager)


def test_publishing_waits_for_a_copy_of_the_same_tokens():
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    reuse = cache.cells.policy.meter.token_s
    cache.cells.policy.meter.token_s = 1e-9
    computing = cache.leased(A)
    cache.cells.policy.meter.token_s = reuse
    copying = cache.leased(A)
    cache.manager.publish(computing, A, 9)
    assert computing.path == [] and not cache.manager.ready(copying)
    cache.land()
    cache.manager.publish(computing, A, 9)
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
    assert cache.manager.counters.blocks_lost > 0
    assert len(cache.tiers(A)) < 2 and len(cache.tiers(C)) == 2
    assert cache.run(A) == 4 * len(cache.tiers(A)) or cache.run(A) == 8
    check_idle(cache.manager)


def test_an_adapter_takes_the_place_of_history_on_the_host_copies_of_what_is_on_the_device_first():
    cache = Cache(device=16, host=6)
    cache.run(A)
    cache.drop_from_device(A)
    cache.run(B)
    cache.adapter(1, 4)
    assert [cache.tiers(x) for x in (A, B)] == ["hh", "dd"]
    cache.adapter(2, 1)
    assert cache.tiers(A) == "h"
    assert cache.manager.add_adapter(3, 2) is None and cache.tiers(A) == "h"  # refused, and nothing lost for it


@pytest.mark.parametrize(("ratio", "copied"), [(2.9, True), (3.1, False)])
def test_a_prefix_is_computed_again_only_if_copying_takes_over_three_times_as_long(ratio: float, copied: bool):
    cache = Cache()
    cache.run(A)
    cache.drop_from_device(A)
    meter = cache.cells.policy.meter
    meter.token_s = meter.load_s(KV, 2) / (8 * ratio)
    lease = cache.leased(A)
    assert bool(cache.copies()) == copied and lease.cached == (8 if copied else 0)
    assert cache.manager.counters.recomputed_tokens == (0 if copied else 8)


# -- room -------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first_and_never_one_in_use():
    cache = Cache(device=8)
    cache.run(A)
    cache.run(B)
    held = cache.leased(A)
    lease = cache.leased([9] * 17)
    assert cache.tiers(A) == "bb" and cache.tiers(B) == "hh"
    for each in (lease, held):
        cache.manager.release(each)


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
    assert not cache.manager.grow(held, 4 * 11) and not cache.manager.pin(cache.adapter(2, 7), True)
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
    want = cache.manager.expect(cache.manager.base, "", A, True)
    lease = cache.leased([9] * 24)
    assert cache.tiers(A) == "bb" and cache.tiers(B) == "hh"
    cache.manager.release(lease)
    cache.leased([8] * 32)  # but it does leave before a request waits for ever
    assert cache.tiers(A) == "hh"
    cache.manager.unexpect(want)
    check_integrity(cache.manager)


def test_the_part_on_the_device_of_a_prefix_that_the_queue_needs_is_kept_too():
    cache = Cache(device=8)
    cache.run(A)
    cache.cells.evict(cache.path(A)[1])
    cache.run(B)
    want = cache.manager.expect(cache.manager.base, "", A, True)
    cache.leased([9] * 25)
    assert cache.tiers(A) == "bh" and cache.tiers(B) == "hh"
    cache.manager.unexpect(want)


def test_the_epoch_moves_whenever_a_refused_request_may_be_granted():
    cache = Cache(device=4)
    held = cache.leased([1] * 13)
    assert cache.lease(B) is None
    epoch = cache.manager.epoch
    assert cache.lease(B) is None and cache.manager.epoch == epoch
    cache.manager.release(held)
    assert cache.manager.epoch > epoch and cache.lease(B) is not None


# -- hints, pins, versions ----------------------------------------------------------------------------


def test_a_hint_starts_the_copies_and_a_request_that_comes_makes_them_urgent():
    cache = Cache(device=20)
    adapter = cache.adapter(1, 2)
    cache.run(A, adapter)
    for node in (*reversed(cache.path(A, adapter)), adapter):
        cache.cells.evict(node)
    assert cache.manager.hint(adapter, "", A) == 4
    assert [copy.demand for copy in cache.copies()] == [False, False]
    assert cache.manager.hint(adapter, "", A) == 0  # they are under way
    lease = cache.leased(A, adapter)
    assert [copy.demand for copy in cache.copies()] == [True, True] and not cache.manager.ready(lease)
    cache.land()
    assert cache.manager.ready(lease) and lease.cached == 8
    assert cache.manager.counters.adapter_hits == 0


def test_what_a_hint_brought_in_is_not_the_next_victim():
    cache = Cache(device=12)
    cache.run(A)
    cache.drop_from_device(A)
    cache.run(B)
    cache.manager.hint(cache.manager.base, "", A)
    cache.land()
    cache.leased([9] * 36)
    assert cache.tiers(A) == "bb" and cache.tiers(B) == "bh"


def test_hints_take_a_bounded_share_and_never_what_is_in_use():
    cache = Cache(device=8)
    large = cache.adapter(1, 3)
    assert cache.manager.hint(large, "", A) == 0 and not cache.copies()
    small = cache.adapter(2, 2)
    held = cache.leased([1] * 28)
    assert cache.manager.hint(small, "", A) == 0 and not cache.copies()
    cache.manager.release(held)
    assert cache.manager.hint(small, "", A) == 2


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


def test_a_dead_adapter_frees_everything_with_its_last_user_queued_or_in_flight():
    cache = Cache(device=12)
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    lease = cache.leased(A, adapter)
    want = cache.manager.expect(adapter, "", A, True)
    cache.manager.kill(adapter)
    cache.manager.release(lease)
    assert 1 in cache.manager.adapters  # one request still waits for it
    last = cache.leased(B, adapter)
    cache.manager.unexpect(want)
    cache.manager.publish(last, B, 9)
    assert last.path == []  # nobody will come for it
    cache.manager.release(last)
    assert 1 not in cache.manager.adapters
    assert (cache.manager.free, cache.cells.host.free) == (12, 64)
    check_idle(cache.manager)


def test_a_dead_adapter_outlives_a_copy_under_way():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    cache.manager.bring_in(adapter)
    cache.manager.kill(adapter)
    check_integrity(cache.manager)
    assert 1 in cache.manager.adapters
    cache.land()
    assert 1 not in cache.manager.adapters and cache.manager.free == 16


def test_a_reload_shares_nothing_with_the_version_before():
    cache = Cache(device=20)
    old = cache.adapter(1, 2)
    cache.run(A, old)
    lease = cache.leased(B, old)
    new = cache.adapter(2, 2)
    cache.manager.kill(old)
    assert cache.run(A, new) == 0
    cache.manager.release(lease)
    assert list(cache.manager.adapters) == [0, 2] and cache.run(A, new) == 8


def test_an_adapter_version_that_is_gone_can_be_neither_queued_for_nor_leased():
    cache = Cache()
    adapter = cache.adapter(1, 2)
    cache.manager.kill(adapter)
    with pytest.raises(AssertionError, match="gone"):
        cache.manager.expect(adapter, "", A, True)
    with pytest.raises(AssertionError, match="gone"):
        cache.lease(A, adapter)


def test_flush_drops_unused_kv_in_both_tiers_and_keeps_adapters():
    cache = Cache()
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    held = cache.leased(B)
    cache.manager.publish(held, B, 9)
    assert cache.manager.flush() == 2
    assert adapter.device and cache.manager.free == 16 - 3 - 3 and cache.cells.host.used[KV] == 0
    check_integrity(cache.manager)


# -- the monitor --------------------------------------------------------------------------------------


def test_the_monitor_keeps_use_below_the_upper_threshold():
    cache = Cache(device=40, policy="fastlibra")
    for letter in range(10):
        cache.run([letter] * 16)
    assert cache.manager.free == 0
    cache.tend()
    assert cache.manager.free == 2 and cache.manager.counters.blocks_lost == 0


def test_the_monitor_evicts_nothing_that_the_queue_needs():
    cache = Cache(device=8, policy="fastlibra")
    cache.run([1] * 32)
    want = cache.manager.expect(cache.manager.base, "", [1] * 33, True)
    cache.tend()
    assert cache.manager.free == 0
    cache.manager.unexpect(want)
    cache.tend()
    assert cache.manager.free == 1


def test_the_monitor_fetches_the_most_valuable_below_the_lower_threshold_while_the_link_is_idle():
    cache = Cache(device=10, policy="fastlibra")
    for prompt in (A, B, C, D):
        cache.run(prompt)
        cache.drop_from_device(prompt)
    cache.tend()
    assert len(cache.copies()) > 0 and not any(copy.demand for copy in cache.copies())
    cache.tend()
    started = cache.copies()
    assert [cache.tiers(x) for x in (A, B, C, D)] == ["hh", "bh", "bb", "bb"] or len(started) == 7
    assert cache.manager.free == 3  # 70 % and not a block more
    cache.land()
    cache.tend()
    assert not cache.copies()


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
    want = cache.manager.expect(other, "", A, True)
    cache.manager.kill(other)
    cache.tend()
    assert not other.device
    cache.manager.unexpect(want)


# -- the policies over the same mechanism -----------------------------------------------------------------


def test_vllm_splits_the_device_and_each_half_evicts_its_own():
    cache = Cache(device=20, policy="vllm")
    first, second = cache.adapter(1, 3), cache.adapter(2, 2)
    cache.run(A, first)
    assert (cache.cells.device.limit[ADAPTER], cache.cells.device.limit[KV]) == (4, 16)
    cache.run(B, second)  # only one fits the adapters' share, though the other half is empty
    assert not first.device and second.device and cache.manager.free > 10
    assert invalid_kv(cache.manager) == 2 and state(cache.manager, 1).invalid_kv == 2
    assert cache.run(A, first) == 8  # it serves again once its adapter is back
    assert cache.manager.capacity(cache.manager.base) == 16 * BLOCK


def test_vllm_writes_out_first_and_room_comes_only_when_that_has_landed():
    cache = Cache(device=20, policy="vllm")
    cache.run([1] * 64)
    assert cache.cells.device.used[KV] == 16 and cache.manager.counters.blocks_out == 0
    want = [9] * 40
    assert cache.lease(want) is None
    assert cache.manager.counters.clean_evictions == 0 and cache.manager.leaving
    epoch = cache.manager.epoch
    out = cache.copies()
    assert {copy.direction for copy in out} == {"out"} and sum(len(copy.source) for copy in out) == 10
    assert cache.lease(want) is None and len(cache.copies()) == len(out)  # nothing more for asking again
    cache.land()
    assert cache.manager.epoch > epoch and cache.lease(want) is not None
    assert cache.tiers([1] * 64) == "d" * 6 + "h" * 10
    assert cache.manager.counters.blocks_out == 10 and cache.manager.counters.blocks_lost == 0


def test_a_request_that_comes_while_its_kv_is_written_out_keeps_it():
    cache = Cache(device=20, policy="vllm")
    cache.run([1] * 52)
    assert cache.lease([9] * 40) is None and cache.manager.leaving
    cache.copies()
    lease = cache.leased([1] * 53)
    assert lease.cached == 52 and not cache.manager.leaving
    cache.land()
    assert cache.tiers([1] * 52) == "d" * 6 + "b" * 7 and cache.manager.ready(lease)


def test_vllm_fair_evicts_cleanly_within_its_shares():
    cache = Cache(device=20, policy="vllm-fair")
    cache.run([1] * 64)
    assert cache.tiers([1] * 64) == "b" * 16
    assert cache.lease([9] * 40) is not None and cache.manager.counters.clean_evictions == 10


def test_slora_keeps_neither_history_nor_idle_adapters():
    cache = Cache(policy="slora")
    adapter = cache.adapter(1, 3)
    assert [cache.run(A, adapter), cache.run(A, adapter)] == [0, 0]
    assert not adapter.device and cache.manager.free == 16 and cache.cells.host.used[KV] == 0
    want = cache.manager.expect(adapter, "", A, True)
    cache.run(A, adapter)
    assert adapter.device  # the next one waits for it already
    cache.manager.unexpect(want)
    assert not adapter.device
    cache.manager.pin(adapter, True)
    cache.land()
    assert adapter.device
    cache.manager.pin(adapter, False)
    assert not adapter.device
    check_idle(cache.manager)


@pytest.mark.parametrize("policy", ["jlora", "fastlibra", "fastlibra-wos", "fastlibra-wol", "lru"])
def test_policies_with_dependencies_never_leave_kv_without_its_adapter(policy: str):
    cache = Cache(device=10, policy=policy)
    adapters = [cache.adapter(uid, 3) for uid in (1, 2, 3)]
    for turn in range(12):
        cache.run([turn % 5] * 9, adapters[turn % 3])
        cache.tend(running=1)
        cache.land()
        assert invalid_kv(cache.manager) == 0


def test_without_dependencies_orphans_are_left_and_seen():
    cache = Cache(policy="fastlibra-wom")
    adapter = cache.adapter(1, 3)
    cache.run(A, adapter)
    cache.cells.evict(adapter)
    assert invalid_kv(cache.manager) == state(cache.manager, 1).invalid_kv == 2
    check_integrity(cache.manager)
    assert cache.run(A, adapter) == 8 and invalid_kv(cache.manager) == 0


# -- the books ------------------------------------------------------------------------------------------


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
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    allocator.give(taken)
    with pytest.raises(AssertionError, match="twice"):
        allocator.give(taken[:1])
    with pytest.raises(AssertionError, match="free"):
        allocator.take(5)


def test_a_leaked_block_is_caught():
    cache = Cache()
    cache.leased(A).blocks.pop()
    with pytest.raises(AssertionError, match="leaked"):
        check_integrity(cache.manager)


def test_a_split_tier_counts_each_share_by_itself():
    tier = Tier(10, adapter_share=0.3)
    tier.take(KV, 7)
    assert (tier.room(KV), tier.room(ADAPTER)) == (0, 3)
    assert dict(tier.missing(adapter=2, kv=1)) == {ADAPTER: -1, KV: 1}
    assert Tier(10).missing(adapter=7, kv=5) == [(None, 2)]
