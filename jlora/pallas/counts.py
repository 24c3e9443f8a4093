"""Bytes and operations of the ops, counted from the shape alone: the roofline that kernels are held to.

    attention(case), lora(case)  ->  Count
    Count.floor(chip)            ->  seconds that no implementation can beat

What is counted is what the equation needs: every page of a context once, however many heads and
rows read it; every active block's real units once; operands in and results out; two operations
per multiplied pair that is not masked. What an implementation moves beyond it is its own affair,
and `jlora.pallas.gpu_counts` says so for the NVIDIA kernels. Plain arithmetic on `cases` records.

Source: the roofline model, Williams, Waterman and Patterson 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jlora.layout import BYTES

if TYPE_CHECKING:  # the cases make arrays too; counting needs their numbers only
    from jlora.pallas.cases import AttentionCase, LoraCase


@dataclass(frozen=True, slots=True)
class Chip:
    """What one device can do at best: bytes per second of its memory, bfloat16 operations per second."""

    name: str
    bytes_per_s: float
    flops_per_s: float


# The makers' figures, dense. A device report puts its own measured rates in their place.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("H100", 3.35e12, 989e12),
        Chip("H200", 4.8e12, 989e12),
        Chip("TPU v4", 1.228e12, 275e12),
        Chip("TPU v5e", 0.819e12, 197e12),
        Chip("TPU v5p", 2.765e12, 459e12),
        Chip("TPU v6e", 1.64e12, 918e12),
    )
}


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes between memory and the cores, and operations of the matrix units."""

    bytes: int
    flops: int

    def __add__(self, other: Count) -> Count:
        return Count(self.bytes + other.bytes, self.flops + other.flops)

    def floor(self, chip: Chip) -> float:
        """Seconds at least: memory and cores work at the same time, the slower one decides."""
        return max(self.bytes / chip.bytes_per_s, self.flops / chip.flops_per_s)

    def bound(self, chip: Chip) -> str:
        """Which of the two decides: "memory" or "compute"."""
        return "memory" if self.bytes / chip.bytes_per_s >= self.flops / chip.flops_per_s else "compute"


def seen(length: int, tokens: int) -> int:
    """(token, key) pairs of a row's `tokens` last tokens under the causal mask."""
    first = length - tokens
    return tokens * first + tokens * (tokens + 1) // 2


def attention(case: AttentionCase) -> Count:
    """One layer's attention on one shard."""
    spec, size = case.spec, BYTES[case.spec.dtype]
    heads, slot = spec.heads // case.tp, 2 * spec.kv_heads // case.tp * spec.head_dim
    # Rows that go on with a sequence read the pages of the rows before them again: counted once.
    contexts = [n for i, (n, _) in enumerate(case.rows) if i + 1 not in case.continued]
    tokens = sum(count for _, count in case.rows)
    moved = size * (sum(contexts) * slot + 2 * tokens * heads * spec.head_dim)
    pairs = sum(seen(length, count) for length, count in case.rows)
    return Count(moved, 4 * pairs * heads * spec.head_dim)


def lora(case: LoraCase) -> Count:
    """The adapters of one group of projections on one shard, added to their base products."""
    layout, size = case.layout, BYTES[case.spec.dtype]
    count = Count(0, 0)
    used = sum(n for who, n in case.tokens if who >= 0)
    if not used:
        return count
    for at, name in enumerate(case.group):
        unit = layout.units[name]
        ranks = [r if isinstance(r, int) else r[at] for r in case.ranks]
        present = {who for who, _ in case.tokens if who >= 0}
        units = sum(ranks[who] for who in present)
        touched = sum(n for who, n in case.tokens if who >= 0 and ranks[who])
        pairs = sum(n * ranks[who] for who, n in case.tokens if who >= 0)
        moved = size * (units * (unit.a + unit.b) + 2 * touched * unit.b)
        count += Count(moved, 2 * pairs * (unit.a + unit.b))
    return count + Count(size * used * case.input_width, 0)
