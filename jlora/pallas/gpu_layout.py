"""Which pools and models the NVIDIA kernels take, and how units have to lie for them.

Plain arithmetic: the engine asks before anything is made, and `lora_refusal` and
`attention_refusal` are the recorded reasons when an op stays with XLA.

A block must hold 2, 4, ... 64 units at the same place in every block, so that one bulk copy takes a
chunk of all of them: `fit_units` widens a projection's units to the next width for which that is
so. Llama-2-7B needs nothing; in Llama-3-8B k and v grow from 3 slots to 4, its MLP from 9 to 16.
Copies and tensor cores take 8 rows together: a block of fewer units comes with rows of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jlora.layout import PoolLayout, UnitLayout
from jlora.pallas.ops import GROUPS

COPY_ROWS = 8  # rows that bulk copies and tensor cores take together
FEWEST = 2  # units of a block
UNITS = 64  # rank units of one product
PAGES = (16, 32, 64)  # tokens of a block: parts of a tile of 64
WIDTHS = (64, 128)  # of a head, and of a chunk of a unit


def fit_units(layout: PoolLayout) -> PoolLayout:
    """The layout with units that `gpu_lora` can read; a group without such a width stays as it is."""
    units = dict(layout.units)
    for group in GROUPS:
        slots = _fitting(layout.block_tokens, max(layout.units[name].slots for name in group))
        for name in group if slots else ():
            units[name] = replace(layout.units[name], slots=slots, per_block=layout.block_tokens // slots)
    return replace(layout, units=units)


def _fitting(block_tokens: int, slots: int) -> int:
    """The fewest slots, at least `slots`, that cut a block into 2, 4, ... 64 units; 0: none."""
    for count in range(slots, block_tokens // FEWEST + 1):
        if block_tokens % count == 0 and _takes(block_tokens // count):
            return count
    return 0


def chunk_width(units: Sequence[UnitLayout]) -> int:
    """Numbers of a unit that one row of a copy takes: the widest that A and B are made of; 0: none."""
    widths = [n for unit in units for n in (unit.a, unit.b_start, unit.b)]
    return next((width for width in reversed(WIDTHS) if not any(n % width for n in widths)), 0)


def _takes(units: int) -> bool:
    return units >= FEWEST and UNITS % units == 0


def tile_rows(per_block: int) -> int:
    """Rows of a tile of units that a block takes."""
    return max(per_block, COPY_ROWS)


def attention_refusal(layout: PoolLayout) -> str | None:
    """Why the attention kernels cannot read this pool; None: they can."""
    if layout.dtype != "bfloat16":
        return f"the pool is {layout.dtype}; the tensor-core kernels take bfloat16"
    if layout.head_dim not in WIDTHS:
        return f"a head is {layout.head_dim} wide; the kernels take {WIDTHS[0]} or {WIDTHS[1]}"
    if layout.block_tokens not in PAGES:
        return f"cache.block_tokens = {layout.block_tokens}; the kernels take 16, 32 or 64"
    return None


def lora_refusal(layout: PoolLayout, units: Sequence[UnitLayout]) -> str | None:
    """Why the LoRA kernels cannot read such units of projections of one input; None: they can."""
    if reason := attention_refusal(layout):
        return reason
    if len({(unit.a, unit.slots) for unit in units}) > 1:
        return f"projections of one input have units of unequal width: {[unit.slots for unit in units]} slots"
    for unit in units:
        if not chunk_width(units):
            return f"widths {unit.a} and {unit.b} are not made of chunks of {WIDTHS[0]} numbers"
        if unit.slots * unit.per_block != layout.block_tokens or not _takes(unit.per_block):
            return (
                f"a block of {layout.block_tokens} tokens holds {unit.per_block} units of {unit.slots} slots; "
                "the kernels take 2, 4, 8, 16, 32 or 64 units that fill it"
            )
    return None
