"""Leases, prefix reuse and eviction, against a simple model of what must hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jlora.cache.blocks import BlockAllocator
from jlora.cache.manager import CacheManager, Copy, Lease

BLOCK = 4


def leased(manager: CacheManager, tokens: list[int], adapter=None, tenant: str = "", reuse: bool = True) -> Lease:
    granted = manager.acquire(adapter or manager.base, tenant, tokens, reuse, headroom=0)
    assert granted is not None
    return granted[0]


def run(manager: CacheManager, tokens: list[int], **kwargs) -> int:
    """Computes and releases a sequence; how many of its tokens were cached."""
    lease = leased(manager, tokens, **kwargs)
    manager.publish(lease, tokens, len(tokens))
    manager.release(lease)
    manager.check_integrity()
    return lease.cached


def test_a_finished_prompt_is_found_again_up_to_its_last_full_block():
    manager = CacheManager(16, BLOCK)
    assert run(manager, list(range(10))) == 0
    assert run(manager, list(range(10))) == 8
    assert run(manager, list(range(8))) == 4  # at least one token is always computed
    assert run(manager, [9, *range(9)]) == 0


def test_tenants_and_adapters_share_no_kv():
    manager = CacheManager(64, BLOCK)
    adapter = manager.add_adapter(1, 2)
    tokens = list(range(12))
    assert run(manager, tokens, tenant="a") == 0
    assert run(manager, tokens, tenant="b") == 0
    assert run(manager, tokens, adapter=adapter) == 0
    assert run(manager, tokens, tenant="a") == 8


def test_bypassing_neither_reads_nor_leaves_kv():
    manager = CacheManager(64, BLOCK)
    assert run(manager, list(range(12)), reuse=False) == 0
    assert run(manager, list(range(12))) == 0
    assert run(manager, list(range(12)), reuse=False) == 0


def test_two_sequences_that_computed_the_same_tokens_keep_one_copy():
    manager = CacheManager(16, BLOCK)
    tokens = list(range(9))
    first, second = leased(manager, tokens), leased(manager, tokens)
    manager.publish(first, tokens, 9)
    free = manager.free
    manager.publish(second, tokens, 9)
    assert manager.free == free + 2
    assert first.blocks[:2] == second.blocks[:2]
    manager.check_integrity()


def test_the_least_recently_used_leaf_goes_first_and_never_one_in_use():
    manager = CacheManager(8, BLOCK)
    run(manager, [1] * 9)
    run(manager, [2] * 9)
    held = leased(manager, [1] * 9)  # uses the older of the two
    assert held.cached == 8
    lease = leased(manager, [3] * 17)
    manager.check_integrity()
    manager.release(lease)
    manager.release(held)
    assert manager.cached_tokens(manager.base, "", [1] * 9) == 8
    assert manager.cached_tokens(manager.base, "", [2] * 9) == 0


def test_an_adapter_stays_while_its_kv_does_and_leaves_after_it():
    manager = CacheManager(8, BLOCK)
    adapter = manager.add_adapter(1, 3)
    run(manager, [1] * 9, adapter=adapter)
    lease = leased(manager, [2] * 9)  # 3 free blocks: nothing has to go
    assert adapter.blocks
    second = leased(manager, [3] * 5)  # needs 2: the adapter's KV leaves go, deepest first
    assert adapter.blocks and not adapter.children
    third = leased(manager, [4] * 9)
    assert not adapter.blocks
    for held in (lease, second, third):
        manager.release(held)
    manager.check_integrity()


def test_a_missing_adapter_comes_back_as_a_copy_and_a_resident_one_does_not():
    manager = CacheManager(8, BLOCK)
    adapter = manager.add_adapter(7, 3)
    granted = manager.acquire(adapter, "", [1, 2], True, 0)
    assert granted is not None
    assert granted[1] == [Copy(7, tuple(adapter.blocks))] and len(adapter.blocks) == 3
    again = manager.acquire(adapter, "", [1, 2], True, 0)
    assert again is not None and again[1] == []


def test_a_pinned_adapter_is_no_victim():
    manager = CacheManager(6, BLOCK)
    adapter = manager.add_adapter(1, 3)
    assert manager.pin(adapter, True)
    assert manager.acquire(manager.base, "", [1] * 16, True, 0) is None
    assert manager.capacity(manager.base) == manager.capacity(adapter) == 12
    manager.pin(adapter, False)
    assert manager.acquire(manager.base, "", [1] * 16, True, 0) is not None


def test_a_request_that_cannot_start_costs_no_history():
    manager = CacheManager(10, BLOCK)
    adapter = manager.add_adapter(1, 2)
    run(manager, [1] * 9, adapter=adapter)
    held = leased(manager, [2] * 16)
    before = manager.state(1)
    assert manager.acquire(manager.base, "", [3] * 28, True, 0) is None
    assert not manager.grow(held, 4 * 11) and manager.pin(manager.add_adapter(2, 7), True) is None
    assert manager.state(1) == before


def test_an_adapter_just_brought_in_is_not_the_next_victim():
    manager = CacheManager(8, BLOCK)
    run(manager, [1] * 9)
    adapter = manager.add_adapter(1, 3)
    assert manager.bring_in(adapter)
    leased(manager, [2] * 17)
    assert adapter.blocks and manager.cached_tokens(manager.base, "", [1] * 9) < 8


def test_a_dead_adapter_frees_everything_with_its_last_user():
    manager = CacheManager(12, BLOCK)
    adapter = manager.add_adapter(1, 3)
    run(manager, [1] * 9, adapter=adapter)
    lease = leased(manager, [1] * 9, adapter=adapter)
    manager.expect(adapter)
    manager.kill(adapter)
    manager.check_integrity()
    manager.release(lease)
    assert adapter.uid in manager.adapters  # one request still waits for it
    manager.unexpect(adapter)
    assert adapter.uid not in manager.adapters and manager.free == 12
    manager.check_integrity()


def test_flush_drops_unused_kv_and_keeps_adapters():
    manager = CacheManager(16, BLOCK)
    adapter = manager.add_adapter(1, 3)
    run(manager, [1] * 9, adapter=adapter)
    held = leased(manager, [2] * 9)
    manager.publish(held, [2] * 9, 9)
    assert manager.flush() == 2
    assert adapter.blocks and manager.free == 16 - 3 - 3
    manager.check_integrity()


def test_blocks_by_class_always_sum_to_the_pool():
    manager = CacheManager(20, BLOCK)
    adapter = manager.add_adapter(1, 3)
    run(manager, [1] * 9, adapter=adapter)
    leased(manager, [2] * 6)
    hbm = manager.state(100).hbm
    assert (hbm.adapters, hbm.history_kv, hbm.running_kv, hbm.free) == (3, 2, 2, 13)
    assert manager.state(100).bytes_swapped_in == 300


def test_a_block_given_back_twice_is_caught():
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    allocator.give(taken)
    with pytest.raises(AssertionError, match="twice"):
        allocator.give(taken[:1])


def test_a_leaked_block_is_caught():
    manager = CacheManager(8, BLOCK)
    leased(manager, [1] * 9).blocks.pop()
    with pytest.raises(AssertionError, match="leaked"):
        manager.check_integrity()


class Machine(RuleBasedStateMachine):
    """Random leases, growth, publishing, releases, kills, pins and flushes on a tight pool."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(24, BLOCK)
        self.uid = 3
        self.adapters = [self.manager.base, *(self.manager.add_adapter(i, i + 1) for i in (1, 2, 3))]
        self.live: list[tuple[Lease, list[int]]] = []

    @rule(adapter=st.integers(0, 3), tenant=st.sampled_from("ab"), seed=st.integers(0, 7), n=st.integers(1, 25))
    def acquire(self, adapter: int, tenant: str, seed: int, n: int) -> None:
        draw = random.Random(seed)
        tokens = [draw.randint(0, 1) for _ in range(n)]
        granted = self.manager.acquire(self.adapters[adapter], tenant, tokens, seed != 7, headroom=seed % 3)
        if granted is not None:
            self.live.append((granted[0], tokens))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), extra=st.integers(0, 6), computed=st.integers(0, 40))
    def grow_and_publish(self, which: int, extra: int, computed: int) -> None:
        lease, tokens = self.live[which % len(self.live)]
        if self.manager.grow(lease, len(tokens) + extra):
            tokens += [extra % 2] * extra
        self.manager.publish(lease, tokens, min(computed, len(tokens)))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.manager.release(self.live.pop(which % len(self.live))[0])

    @rule(which=st.integers(1, 3))
    def reload(self, which: int) -> None:
        self.manager.kill(self.adapters[which])
        self.uid += 1
        self.adapters[which] = self.manager.add_adapter(self.uid, which + 1)

    @rule(which=st.integers(1, 3), pinned=st.booleans())
    def pin(self, which: int, pinned: bool) -> None:
        self.manager.pin(self.adapters[which], pinned)

    @rule(which=st.integers(1, 3))
    def prefetch(self, which: int) -> None:
        self.manager.bring_in(self.adapters[which])

    @rule()
    def flush(self) -> None:
        self.manager.flush()

    @invariant()
    def whole(self) -> None:
        self.manager.check_integrity()
        state = self.manager.state(1)
        assert state.invalid_kv == 0
        hbm = state.hbm
        assert hbm.free + hbm.adapters + hbm.history_kv + hbm.running_kv == hbm.total

    def teardown(self) -> None:
        for lease, _ in self.live:
            self.manager.release(lease)
        for adapter in self.adapters[1:]:
            self.manager.kill(adapter)
        self.manager.flush()
        assert self.manager.free == self.manager.total


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestManager = Machine.TestCase
