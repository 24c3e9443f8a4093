"""The block allocator of one memory tier. Plain Python, no jax."""

from __future__ import annotations


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

    def take(self, count: int) -> list[int]:
        """`count` block ids; the caller has made sure that they are free."""
        assert 0 <= count <= len(self._free), f"took {count} of {len(self._free)} free blocks"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._used[block] = 1
        return taken

    def give(self, blocks: list[int]) -> None:
        """Takes blocks back."""
        for block in blocks:
            assert self._used[block], f"block {block} given back twice"
            self._used[block] = 0
        self._free.extend(blocks)

    def check_integrity(self, owned: list[int]) -> None:
        """Raises AssertionError unless `owned` are exactly the blocks in use, each once."""
        assert len(owned) == len(set(owned)), "a block has two owners"
        in_use = {b for b in range(1, self.total + 1) if self._used[b]}
        assert set(owned) == in_use, f"leaked or lost blocks: {sorted(in_use ^ set(owned))[:8]}"
        assert len(in_use) + len(self._free) == self.total and len(set(self._free)) == len(self._free)
