"""The blocks of one memory tier: which are free, and how many each kind of node holds. No jax."""

from __future__ import annotations

from collections.abc import Sequence


class Tier:
    """Hands out block ids 1..total; block 0 is reserved for padding and never handed out.

    Freed ids come back last-in first-out, so a lightly loaded pool keeps touching the same memory.

    Attributes:
        most: the blocks that there are; `total` of them may be used (see `bound`).
        fresh: of `total`, those that were never taken, whose memory nothing has touched.
    """

    def __init__(self, total: int):
        self.most = self.total = self.fresh = total
        self.used = [0, 0]  # blocks by kind (ADAPTER, KV)
        self._free = list(range(total, 0, -1))  # the fresh ones first, so they are taken last
        self._taken = bytearray(total + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, kind: int, count: int) -> tuple[int, ...]:
        """`count` blocks for `kind`; the caller has made sure that they are free."""
        assert 0 <= count <= len(self._free), f"took {count} of {len(self._free)} free blocks"
        if not count:
            return ()
        taken = tuple(self._free[: -count - 1 : -1])
        del self._free[-count:]
        self.fresh = min(self.fresh, len(self._free))
        for block in taken:
            self._taken[block] = 1
        self.used[kind] += count
        return taken

    def give(self, kind: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._taken[block], f"block {block} given back twice"
            self._taken[block] = 0
        self._free.extend(blocks)
        self.used[kind] -= len(blocks)

    def bound(self, fresh: int) -> None:
        """Lets so many blocks be used beside those that were taken once: as many as their memory is there for."""
        touched = self.total - self.fresh
        self.total = min(self.most, touched + fresh)
        self._free[: self.fresh] = range(self.total, touched, -1)
        self.fresh = self.total - touched

    def check_integrity(self, owned: Sequence[int]) -> None:
        """Raises AssertionError unless `owned` are exactly the blocks in use, each once."""
        assert len(owned) == len(set(owned)), "a block has two owners"
        in_use = {b for b in range(1, self.most + 1) if self._taken[b]}
        assert set(owned) == in_use, f"leaked or lost blocks: {sorted(in_use ^ set(owned))[:8]}"
        assert len(in_use) + len(self._free) == self.total and len(set(self._free)) == len(self._free)
