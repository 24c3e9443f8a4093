"""Shared parts of the Mosaic GPU kernels: layout of shared memory, page lists.

A kernel is a program for one thread block (CTA) of an SM, written for whole *warpgroups* of 128
threads. One bulk copy (TMA) brings a page `pool[row, :, head]` from global memory into a tile of
shared memory, steps over the other heads, and arrives at a barrier. Tensor cores (wgmma) read the
tile in place: M = 64 rows per warpgroup, N a multiple of 8, K a multiple of 16. Both need the tile
in pieces of 8 rows by 128 bytes, swizzled against bank conflicts; `tiled` makes such tiles.

Every kernel keeps these rules:

- A slice of a tile starts and ends at a multiple of 8 rows. So do pages and groups of units.
- A tile is refilled only after every reader is done. Threads' writes are committed before tensor
  cores or copies read them.
- Unused rows of an operand may contain anything, because rows do not mix. Unused columns must be
  finite, because 0 times NaN is NaN.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
NEG = -1e30  # finite, so that a fully masked tile gives zeros and not NaN
TINY = 1e-30
ROWS = 64  # rows of one warpgroup's product
COPY = 256  # most elements in one dimension of a bulk copy
MATRIX = plgpu.Layout.WGMMA  # layout of a product's result in a warpgroup's registers


def tiled(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Scratch [..., rows, columns] in shared memory, for bulk copies and tensor cores."""
    wide = 128 // jnp.dtype(dtype).itemsize
    pieces = plgpu.TilingTransform((8, wide))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(pieces, swizzle))


def along_rows(v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number per row, [R] -> [R, C]."""
    return lax.broadcast_in_dim(v, shape, [0])


def along_columns(v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number per column, [C] -> [R, C]."""
    return lax.broadcast_in_dim(v, shape, [1])


def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    """float32 zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def lowest(size: int, layout: Any) -> jax.Array:
    """Start of a running maximum."""
    return plgpu.layout_cast(jnp.full((size,), NEG, jnp.float32), layout)


def product(shape: tuple[int, int], a: Any, b: Any) -> jax.Array:
    """a b on tensor cores, in float32 registers. Waits for the result."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def without_tail(tile: Any, first: jax.Array, length: jax.Array) -> jax.Array:
    """A tile of values [tokens, H] with zeros from `length` on, where memory may hold NaN."""
    v = plgpu.layout_cast(tile[...], MATRIX)
    at = first + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=MATRIX)
    return jnp.where(at < length, v, jnp.zeros_like(v))


def row_argument(first_row: jax.Array | int) -> jax.Array:
    """A layer's first pool row as an array [1], which needs no launch."""
    return jnp.asarray(first_row, jnp.int32).reshape(1)


@partial(jax.jit, static_argnames=("block_tokens", "tile"))
def page_lists(table: jax.Array, lengths: jax.Array, block_tokens: int, tile: int) -> jax.Array:
    """[S, W] block ids for the kernels: padded to whole tiles, block 0 past a row's length."""
    pages = -(-lengths // block_tokens)
    table = jnp.where(jnp.arange(table.shape[1], dtype=jnp.int32) < pages[:, None], table, 0)
    whole = math.lcm(max(1, tile // block_tokens), 4)  # copies are multiples of 16 bytes, 4 ids
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % whole)))


def list_parts(width: int) -> list[tuple[int, int]]:
    """(first, size) of the copies of a page list of `width` entries."""
    return [(at, min(COPY, width - at)) for at in range(0, width, COPY)]


def bring_list(table: Any, row: jax.Array, target: Any, arrived: Any, used: tuple[Any, Any]) -> None:
    """Copies the parts with entries used[0] .. used[1] - 1 of a row's page list, and waits for them.

    Args:
        table, target: [S, W] int32 in global memory, [W] in shared memory.
        arrived: a barrier for each of `list_parts(W)`.
    """
    parts = list_parts(target.shape[0])
    for i, (at, size) in enumerate(parts):

        @pl.when((used[0] < at + size) & (at < used[1]))
        def _(i=i, at=at, size=size):
            plgpu.copy_gmem_to_smem(table.at[row, pl.ds(at, size)], target.at[pl.ds(at, size)], arrived.at[i])

    for i, (at, size) in enumerate(parts):

        @pl.when((used[0] < at + size) & (at < used[1]))
        def _(i=i):
            plgpu.barrier_wait(arrived.at[i])
