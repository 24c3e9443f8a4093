"""The layout of the pool: arithmetic shared by packing, kernels and policy.

The pool is one array `[L * P, B, 2K, H]`. Block b is the rows `b + l * P`, one per layer l. A row
is B token slots. A slot is `[2K, H]` numbers: for KV, head k has its keys at 2k and its values at
2k + 1. Block 0 is never allocated: padding points there.

An adapter is cut along its rank. A *unit* is one rank of one projection in one layer: a row of A,
then a column of B, in as few slots as hold them. A block holds units of one projection, so that a
kernel reads only what it needs. Unused units are zero and change nothing. Under tensor parallelism
each shard holds its slice of every unit, so the counts below are per shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jlora.errors import ConfigError
from jlora.model.spec import ModelSpec

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One projection's units: `a` numbers of A, then `b` of B, in `slots` slots; `per_block` units per block.

    B starts at a multiple of `align`, so that kernels read whole rows.
    """

    a: int
    b: int
    slots: int
    per_block: int
    align: int = 1

    @property
    def b_start(self) -> int:
        """Offset of B in the unit; the numbers between A and B are zero."""
        return -(-self.a // self.align) * self.align


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Shapes of the pool for one model; `blocks` includes block 0.

    Attributes:
        units: projection -> the layout of its rank units.
    """

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str
    tp: int
    units: Mapping[str, UnitLayout]

    @classmethod
    def of(cls, spec: ModelSpec, blocks: int, block_tokens: int, tp: int = 1) -> PoolLayout:
        """The layout for `spec`.

        Raises:
            ConfigError: tp does not divide the heads or widths, or a unit is wider than a block.
        """
        for what, size in (("key-value heads", spec.kv_heads), ("width", spec.width), ("MLP width", spec.mlp)):
            if size % tp:
                raise ConfigError(f"model.tp = {tp}: must divide the model's {size} {what}")
        slot = 2 * spec.kv_heads // tp * spec.head_dim
        units = {}
        for name, (d_in, d_out) in spec.projection_shapes.items():
            align = 2 * spec.head_dim  # a key row and a value row
            slots = -(-(-(-d_in // tp // align) * align + d_out // tp) // slot)
            if slots > block_tokens:
                raise ConfigError(
                    f"cache.block_tokens = {block_tokens}: must be at least {slots} to hold one rank of {name}"
                )
            units[name] = UnitLayout(d_in // tp, d_out // tp, slots, block_tokens // slots, align)
        return cls(spec.layers, blocks, block_tokens, spec.kv_heads, spec.head_dim, spec.dtype, tp, units)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the pool array over all shards."""
        return (self.layers * self.blocks, self.block_tokens, 2 * self.kv_heads, self.head_dim)

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of one block over all layers: [L, B, 2K, H]."""
        return (self.layers, self.block_tokens, 2 * self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and shards."""
        return self.layers * self.block_tokens * 2 * self.kv_heads * self.head_dim * BYTES[self.dtype]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` tokens."""
        return -(-tokens // self.block_tokens)


def smallest_block_tokens(spec: ModelSpec, at_least: int) -> int:
    """The first power of two >= `at_least` whose blocks hold a unit of every projection."""
    slot = 2 * spec.kv_heads * spec.head_dim
    need = max(-(-(i + o) // slot) for i, o in spec.projection_shapes.values())
    size = at_least
    while size < need:
        size *= 2
    return size
