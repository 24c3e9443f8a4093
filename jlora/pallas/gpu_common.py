"""What the Mosaic GPU kernels share: how shared memory is laid out, how a page list is brought in.

A kernel is a program for one thread block (CTA) of an SM, written for whole *warpgroups* of 128
threads. Bulk copies (TMA) bring a page `pool[row, :, head]` from global memory into a tile of
shared memory with one instruction, skipping over the other heads, and announce themselves at a
barrier. Tensor cores (wgmma) then read the tile where it lies: M = 64 rows per warpgroup, N a
multiple of 8, K a multiple of 16. Both need the tile cut into pieces of 8 rows by 128 bytes, with
the bytes of a piece swizzled so that no two threads meet at one bank; `tiled` asks for that.

Rules that follow, and that every kernel here keeps:

- a slice of a tile starts and ends at a multiple of 8 rows, so pages and groups of units do too;
- a tile is refilled only after all who read it are done; what threads wrote is committed before
  tensor cores or copies read it;
- rows of an operand that stand for nothing may hold anything, because rows do not meet; columns
  must be finite, because 0 times NaN is NaN.
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
NEG = -1e30  # finite, so that a fully masked tile gives zeros and never NaN
TINY = 1e-30
ROWS = 64  # rows of one warpgroup's product
COPY = 256  # most elements of one dimension of a bulk copy
MATRIX = plgpu.Layout.WGMMA  # how a warpgroup's registers hold the result of a product


def tiled(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Scratch [..., rows, columns] in shared memory, as bulk copies write and tensor cores read it."""
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
    """float32 zeros in registers, as a loop's start."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def lowest(size: int, layout: Any) -> jax.Array:
    """A running maximum's start."""
    return plgpu.layout_cast(jnp.full((size,), NEG, jnp.float32), layout)


def product(shape: tuple[int, int], a: Any, b: Any) -> jax.Array:
    """a b on tensor cores, in float32 registers; returns when it is done."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def without_tail(tile: Any, first: jax.Array, length: jax.Array) -> jax.Array:
    """A tile of values [tokens, H], zero from `length` on: what lies there may be NaN."""
    v = plgpu.layout_cast(tile[...], MATRIX)
    at = first + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=MATRIX)
    return jnp.where(at < length, v, jnp.zeros_like(v))


def row_argument(first_row: jax.Array | int) -> jax.Array:
    """A layer's first pool row as kernels read it: [1], which is the scalar itself and costs no launch."""
    return jnp.asarray(first_row, jnp.int32).reshape(1)


@partial(jax.jit, static_argnames=("block_tokens", "tile"))
def page_lists(table: jax.Array, lengths: jax.Array, block_tokens: int, tile: int) -> jax.Array:
    """[S, W] block ids as the kernels read them: padded to whole tiles, block 0 past a row's length."""
    pages = -(-lengths // block_tokens)
    table = jnp.where(jnp.arange(table.shape[1], dtype=jnp.int32) < pages[:, None], table, 0)
    whole = math.lcm(max(1, tile // block_tokens), 4)  # 4 ids are the 16 bytes that copies are made of
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % whole)))


def list_parts(width: int) -> list[tuple[int, int]]:
    """(first, size) of the copies that bring a page list of `width` entries into shared memory."""
    return [(at, min(COPY, width - at)) for at in range(0, width, COPY)]


def bring_list(table: Any, row: jax.Array, target: Any, arrived: Any, used: tuple[Any, Any]) -> None:
    """Copies entries used[0] .. used[1] - 1 of a row's page list, in whole parts, and waits for them.

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
