"""Pools and unit layouts that the NVIDIA kernels support.

Plain arithmetic, used before anything is allocated. `lora_refusal` and `attention_refusal` give the
reason if XLA must serve an op.

One bulk copy takes a chunk of all units of a block, so 2, 4, ... or 64 units must fill a block.
`fit_units` widens a projection's units to the next width that satisfies this. Llama-2-7B needs no
change; in Llama-3-8B k and v grow from 3 slots to 4, and the MLP from 9 to 16. Copies and tensor
cores take 8 rows at once, so a block of fewer units has additional rows of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jlora.layout import PoolLayout, UnitLayout
from jlora.pallas.ops import GROUPS

COPY_ROWS = 8  # rows that bulk copies and tensor cores take together
FEWEST = 2  # fewest units of a block
UNITS = 64  # rank units of one product
PAGES = (16, 32, 64)  # tokens per block: divisors of a tile of 64
WIDTHS = (64, 128)  # of a head, and of a chunk of a unit


def fit_units(layout: PoolLayout) -> PoolLayout:
    """The layout with units that `gpu_lora` can read. A group without such a width keeps its layout."""
    units = dict(layout.units)
    for group in GROUPS:
        slots = _fitting(layout.block_tokens, max(layout.units[name].slots for name in group))
        for name in group if slots else ():
            units[name] = replace(layout.units[name], slots=slots, per_block=layout.block_tokens // slots)
    return replace(layout, units=units)


def _fitting(block_tokens: int, slots: int) -> int:
    """The fewest slots per unit, at least `slots`, that cut a block into 2, 4, ... 64 units; 0 if none does."""
    for count in range(slots, block_tokens // FEWEST + 1):
        if block_tokens % count == 0 and _takes(block_tokens // count):
            return count
    return 0


def chunk_width(units: Sequence[UnitLayout]) -> int:
    """Numbers per row of a copy: the largest width that divides A and B; 0 if none does."""
    widths = [n for unit in units for n in (unit.a, unit.b_start, unit.b)]
    return next((width for width in reversed(WIDTHS) if not any(n % width for n in widths)), 0)


def _takes(units: int) -> bool:
    return units >= FEWEST and UNITS % units == 0


def tile_rows(per_block: int) -> int:
    """Rows of a unit tile that a block occupies."""
    return max(per_block, COPY_ROWS)


def attention_refusal(layout: PoolLayout) -> str | None:
    """Why the attention kernels cannot read this pool; None if they can."""
    if layout.dtype != "bfloat16":
        return f"the pool is {layout.dtype}; the kernels need bfloat16"
    if layout.head_dim not in WIDTHS:
        return f"head_dim = {layout.head_dim}; the kernels need {WIDTHS[0]} or {WIDTHS[1]}"
    if layout.block_tokens not in PAGES:
        return f"cache.block_tokens = {layout.block_tokens}; the kernels need 16, 32 or 64"
    return None


def lora_refusal(layout: PoolLayout, units: Sequence[UnitLayout]) -> str | None:
    """Why the LoRA kernels cannot read the units of projections that share an input; None if they can."""
    if reason := attention_refusal(layout):
        return reason
    if len({(unit.a, unit.slots) for unit in units}) > 1:
        return f"projections that share an input have units of unequal width: {[unit.slots for unit in units]} slots"
    for unit in units:
        if not chunk_width(units):
            return f"widths {unit.a} and {unit.b} are not multiples of {WIDTHS[0]}"
        if unit.slots * unit.per_block != layout.block_tokens or not _takes(unit.per_block):
            return (
                f"a block of {layout.block_tokens} tokens holds {unit.per_block} units of {unit.slots} slots; "
                "the kernels need 2, 4, 8, 16, 32 or 64 units that fill it"
            )
    return None
