"""Block accounting of one memory tier: who may take how many, and which are free. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from jlora.cache.tree import ADAPTER, KV


class BlockAllocator:
    """Hands out block ids 1..total; block 0 is reserved for padding and never handed out.

    Freed ids come back last-in first-out, so a lightly loaded pool keeps touching the same memory.
    """

    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total, 0, -1))
        self._used = bytearray(total + 1)

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` block ids; the caller has made sure that they are free."""
        assert 0 <= count <= len(self._free), f"took {count} of {len(self._free)} free blocks"
        if not count:
            return ()
        taken = tuple(self._free[: -count - 1 : -1])
        del self._free[-count:]
        for block in taken:
            self._used[block] = 1
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Takes blocks back."""
        for block in blocks:
            assert self._used[block], f"block {block} given back twice"
            self._used[block] = 0
        self._free.extend(blocks)

    def check_integrity(self, owned: Sequence[int]) -> None:
        """Raises AssertionError unless `owned` are exactly the blocks in use, each once."""
        assert len(owned) == len(set(owned)), "a block has two owners"
        in_use = {b for b in range(1, self.total + 1) if self._used[b]}
        assert set(owned) == in_use, f"leaked or lost blocks: {sorted(in_use ^ set(owned))[:8]}"
        assert len(in_use) + len(self._free) == self.total and len(set(self._free)) == len(self._free)


class Tier:
    """One tier's blocks, counted by kind (ADAPTER, KV).

    Attributes:
        used: blocks held by each kind.
        limit: most blocks of each kind; both are the total unless a policy splits the tier.
        idle: blocks of each kind that eviction can free, leaves first.
        running: KV blocks that live leases go through.
    """

    def __init__(self, total: int, adapter_share: float | None = None):
        self.allocator = BlockAllocator(total)
        self.total = total
        self.split = adapter_share is not None
        adapters = total if adapter_share is None else min(max(1, round(adapter_share * total)), total - 1)
        self.limit = [adapters, total if adapter_share is None else total - adapters]
        self.used = [0, 0]
        self.idle = [0, 0]
        self.running = 0

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self.allocator.free

    def room(self, kind: int) -> int:
        """Blocks that `kind` may take now."""
        return min(self.allocator.free, self.limit[kind] - self.used[kind])

    def missing(self, adapter: int, kv: int) -> list[tuple[int | None, int]]:
        """What must be freed before so many blocks can be taken: (of which kind, how many)."""
        if not self.split:
            return [(None, adapter + kv - self.free)]
        return [(ADAPTER, adapter - self.room(ADAPTER)), (KV, kv - self.room(KV))]

    def reclaimable(self, kind: int | None) -> int:
        """Idle blocks of a kind, or of all."""
        return sum(self.idle) if kind is None else self.idle[kind]

    def take(self, kind: int, count: int) -> tuple[int, ...]:
        """Blocks for `kind`; the caller has made room."""
        taken = self.allocator.take(count)
        self.used[kind] += count
        return taken

    def give(self, kind: int, blocks: Sequence[int]) -> None:
        """Takes blocks back."""
        self.allocator.give(blocks)
        self.used[kind] -= len(blocks)
