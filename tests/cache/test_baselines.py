"""Every policy runs over the same mechanism; what makes it what it is, seen from outside."""

from __future__ import annotations

import pytest

from jlora.cache.inspect import check_integrity, invalid_kv, state
from jlora.cache.tree import ADAPTER, KV, Origin
from tests.cache._books import check_idle
from tests.cache._cache import BLOCK, A, B, Cache


def test_vllm_splits_the_device_and_each_half_evicts_its_own():
    cache = Cache(device=20, policy="vllm")
    first, second = cache.adapter(1, 3), cache.adapter(2, 2)
    cache.run(A, first)
    assert (cache.cells.limit(ADAPTER), cache.cells.limit(KV)) == (4, 16)
    cache.run(B, second)  # only one fits the adapters' share, though the other half is empty
    assert not first.device and second.device and cache.manager.device.free > 10
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


def test_vllm_writes_nothing_before_room_is_needed_and_fetches_nothing_ahead():
    cache = Cache(device=20, policy="vllm")
    cache.run([1] * 16, cache.adapter(1, 2))
    cache.adapter(2, 1)
    cache.tend()
    assert not cache.copies()


def test_a_request_that_comes_while_its_kv_is_written_out_keeps_it():
    cache = Cache(device=20, policy="vllm")
    cache.run([1] * 52)
    assert cache.lease([9] * 40) is None and cache.manager.leaving
    cache.copies()
    lease = cache.leased([1] * 53)
    assert lease.cached == 52 and not cache.manager.leaving
    cache.land()
    assert cache.tiers([1] * 52) == "d" * 6 + "b" * 7 and cache.ready(lease)


def test_kv_whose_way_out_fails_is_dropped_since_its_prefix_may_have_left():
    """The copy of the prefix lands, the one of what is behind it does not."""
    cache = Cache(device=20, policy="vllm")
    cache.run([1] * 64)
    assert cache.lease([9] * 4) is None  # its one block is to come from the end of the prompt
    (last,) = cache.copies()
    assert cache.lease([9] * 40) is None
    before = [copy for copy in cache.copies() if copy is not last]
    cache.land(*before)
    assert cache.manager.lost(last)
    check_idle(cache.manager)
    assert cache.tiers([1] * 64) == "d" * 6 + "h" * 9 and cache.manager.counters.blocks_lost == 1


def test_vllm_fair_evicts_cleanly_within_its_shares():
    cache = Cache(device=20, policy="vllm-fair")
    cache.run([1] * 64)
    assert cache.tiers([1] * 64) == "b" * 16
    assert cache.lease([9] * 40) is not None and cache.manager.counters.clean_evictions == 10


def test_slora_keeps_neither_history_nor_idle_adapters():
    cache = Cache(policy="slora")
    adapter = cache.adapter(1, 3)
    assert [cache.run(A, adapter), cache.run(A, adapter)] == [0, 0]
    assert not adapter.device and cache.manager.device.free == 16 and cache.manager.host.history_kv == 0
    want = cache.manager.expect(Origin(adapter), A, True, place=0)
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
