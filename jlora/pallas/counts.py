"""The roofline of the ops: bytes and operations of a shape.

Counts what the equation needs: every page of a context once, however many heads and rows read it;
every active block's real units once; operands and results; two operations per product that is not
masked.

Source: the roofline model, Williams, Waterman and Patterson 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jlora.layout import BYTES

if TYPE_CHECKING:  # `cases` imports jax, and counting does not need it
    from jlora.pallas.cases import AttentionCase, LoraCase


@dataclass(frozen=True, slots=True)
class Chip:
    """Peak rates of one device: memory bytes and bfloat16 operations per second."""

    name: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes from and to memory, and operations of the matrix units."""

    bytes: int
    flops: int

    def __add__(self, other: Count) -> Count:
        return Count(self.bytes + other.bytes, self.flops + other.flops)

    def floor(self, chip: Chip) -> float:
        """Least seconds: memory and cores work in parallel, so the slower one decides."""
        return max(self.bytes / chip.bytes_per_s, self.flops / chip.flops_per_s)

    def bound(self, chip: Chip) -> str:
        """What limits the op: "memory" or "compute"."""
        return "memory" if self.bytes / chip.bytes_per_s >= self.flops / chip.flops_per_s else "compute"


def seen(length: int, tokens: int) -> int:
    """(token, key) pairs of a row's last `tokens` tokens under the causal mask."""
    first = length - tokens
    return tokens * first + tokens * (tokens + 1) // 2


def attention(case: AttentionCase) -> Count:
    """One layer's attention on one shard."""
    spec, size = case.spec, BYTES[case.spec.dtype]
    heads, slot = spec.heads // case.tp, 2 * spec.kv_heads // case.tp * spec.head_dim
    # Rows that continue a sequence read the same pages as the rows before them: count them once.
    contexts = [n for i, (n, _) in enumerate(case.rows) if i + 1 not in case.continued]
    tokens = sum(count for _, count in case.rows)
    moved = size * (sum(contexts) * slot + 2 * tokens * heads * spec.head_dim)
    pairs = sum(seen(length, count) for length, count in case.rows)
    return Count(moved, 4 * pairs * heads * spec.head_dim)


def lora(case: LoraCase) -> Count:
    """The adapters of one group of projections on one shard, with the addition to the base products."""
    layout, size = case.layout, BYTES[case.spec.dtype]
    count = Count(0, 0)
    used = sum(n for owner, n in case.tokens if owner >= 0)
    for name in case.group:
        unit = layout.units[name]
        ranks = case.ranks_of(name)
        present = {owner for owner, _ in case.tokens if owner >= 0}
        units = sum(ranks[owner] for owner in present)
        touched = sum(n for owner, n in case.tokens if owner >= 0 and ranks[owner])
        pairs = sum(n * ranks[owner] for owner, n in case.tokens if owner >= 0)
        moved = size * (units * (unit.a + unit.b) + 2 * touched * unit.b)
        count += Count(moved, 2 * pairs * (unit.a + unit.b))
    return count + Count(size * used * case.input_width, 0)
