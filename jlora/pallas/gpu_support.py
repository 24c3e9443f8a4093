"""GPUs, CUDA versions, pools and unit layouts that the NVIDIA kernels support. Plain arithmetic.

- The kernels use `wgmma`, which only compute capability 9.0 (Hopper: H100, H200) has.
- The compilers of CUDA 12.8 to 12.9.0 miscompile causal masks of such kernels. jax reports its CUDA
  version without the patch level, so all of 12.9 is refused, as in jax's own kernels.
- One bulk copy takes a chunk of all units of a block, so 2, 4, ... or 64 units must fill a block.
  `fit_units` widens a projection's units to the next width that satisfies this.
- Copies and tensor cores take 8 rows at once, so a block of fewer units has additional rows of zeros.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jlora.layout import PoolLayout, UnitLayout
from jlora.pallas.ops import GROUPS

CAPABILITY = "9.0"
MISCOMPILING = range(12080, 13000)
COPY_ROWS = 8  # rows that bulk copies and tensor cores take together
FEWEST = 2  # fewest units of a block
UNITS = 64  # rank units of one product
PAGES = (16, 32, 64)  # tokens per block: divisors of a tile of 64
WIDTHS = (64, 128)  # of a head, and of a chunk of a unit
LISTED = 16384  # page ids of one context that fit beside a kernel's tiles in shared memory (227 KiB on Hopper)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's capability and CUDA version."""

    capability: str = ""  # for example "9.0", or "gfx942" for AMD; empty if unknown
    cuda: int = 0  # 1000 * major + 10 * minor version; 0 if unknown

    @classmethod
    def of(cls, device: Any) -> Gpu:
        """The `Gpu` of a jax device; its fields are unknown for other devices."""
        version = re.search(r"\bcuda (\d+)", device.client.platform_version)
        return cls(str(getattr(device, "compute_capability", "")), int(version[1]) if version else 0)

    def refusal(self, kind: str) -> str | None:
        """Why the kernels cannot run on this GPU of `device_kind` `kind`; None if they can."""
        if self.capability != CAPABILITY:
            has = self.capability or "none that jax knows"
            return f"{kind} has compute capability {has}; the kernels' products (wgmma) need {CAPABILITY}: H100, H200"
        if self.cuda in MISCOMPILING:
            version = f"{self.cuda // 1000}.{self.cuda % 1000 // 10}"
            return f"jax was built with CUDA {version}, and 12.8 to 12.9.0 miscompile causal masks; use jax[cuda13]"
        return None


def refusal_of(device: Any) -> str | None:
    """Why the kernels cannot run on a jax device; None if they can."""
    return Gpu.of(device).refusal(device.device_kind)


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
        return f"the pool is {layout.dtype}; the kernels need model.dtype = bfloat16"
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
                f"a block of cache.block_tokens = {layout.block_tokens} holds {unit.per_block} units of {unit.slots} "
                "slots; the kernels need 2, 4, 8, 16, 32 or 64 units that fill it"
            )
    return None


def lora_refusals(layout: PoolLayout) -> dict[str, str]:
    """Why the LoRA kernels cannot read some groups of projections: group -> reason."""
    reasons = {"+".join(group): lora_refusal(layout, [layout.units[name] for name in group]) for group in GROUPS}
    return {group: reason for group, reason in reasons.items() if reason}
