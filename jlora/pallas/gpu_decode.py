"""Decode attention for NVIDIA Hopper: one token per row, pages read in place.

One token gives each KV head only G query rows, while tensor cores multiply 64 rows. So the products
are transposed: tokens of the context are the 64 rows, and the G heads, padded to 8, the columns.

    Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ

A block of 128 threads takes one KV head of one span of a context. It keeps a few tiles of 64 tokens
in flight, two bulk copies per page, and starts the next tile as soon as a slot is free. Three such
blocks fit an SM, so the copies of one hide the arithmetic of another.

Long contexts are cut into spans (`gpu_plan.splits`). Each is a softmax of its own with the logarithm
of its weight, and XLA merges them (`gpu_plan.merged`).

    sums     m, total: running maximum and sum (Milakov and Gimelshein 2018), in powers of two
    scratch  a tile of probabilities goes through shared memory, because the second product reads it
             transposed; the barriers of the column maximum order it against the next tile's

The tail of a context's last page may contain anything, also NaN: keys are masked after the product,
and values are zeroed in shared memory before it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jlora.pallas import gpu_common as gpu
from jlora.pallas import gpu_plan
from jlora.pallas.ops import Pages

TILE = 64  # tokens of context per product: the 64 rows of a warpgroup


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tunable sizes.

    Attributes:
        stages: tiles in flight per block; with 2, three blocks fit an SM.
        blocks: thread blocks to run at once: 132 SMs, three each.
    """

    stages: int = 2
    blocks: int = 396

    def spare(self, kv_heads: int) -> int:
        """Items in addition to one per row, so that few rows fill the GPU."""
        return max(1, -(-self.blocks // kv_heads))

    def most(self, rows: int, kv_heads: int) -> int:
        """Most items of one row: four times its fair share, so that a long context among short ones is cut."""
        return min(64, self.spare(kv_heads) + 1, max(4, -(-4 * self.blocks // (kv_heads * rows))))


class _Scratch(NamedTuple):
    q: Any  # [G, H]; the result's tile afterwards
    k: Any  # [stages, TILE, H]
    v: Any
    p: Any  # [G, TILE]
    weight: Any  # [G]
    pages: Any  # [W]
    q_in: Any
    k_in: Any
    v_in: Any
    pages_in: Any


@dataclass(frozen=True, slots=True)
class _Shape:
    group: int  # query heads per KV head, padded to 8
    width: int  # H
    block_tokens: int
    table: int  # entries of a page list
    stages: int
    scale: float  # of logits, for powers of two

    def scratch(self) -> _Scratch:
        copies = TILE // self.block_tokens
        ready = plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages)
        return _Scratch(
            q=gpu.tiled(self.group, self.width),
            k=gpu.tiled(self.stages, TILE, self.width),
            v=gpu.tiled(self.stages, TILE, self.width),
            p=gpu.tiled(self.group, TILE),
            weight=plgpu.SMEM((self.group,), jnp.float32),
            pages=plgpu.SMEM((self.table,), jnp.int32),
            q_in=plgpu.Barrier(),
            k_in=ready,
            v_in=ready,
            pages_in=plgpu.Barrier(num_barriers=len(gpu.list_parts(self.table))),
        )


@functools.partial(jax.jit, static_argnames="tiles")  # so that a step of many layers traces it once
def decode_attention(
    q: jax.Array, pool: jax.Array, first_row: jax.Array | int, pages: Pages, tiles: DecodeTiles = DecodeTiles()
) -> jax.Array:
    """Attention of one token per row: `ops.Attention` with q [S, N, H] bfloat16; returns the same shape."""
    rows, heads, width = q.shape
    block_tokens, kv_heads = pool.shape[1], pool.shape[2] // 2
    group = heads // kv_heads
    padded = -(-group // 8) * 8
    most = tiles.most(rows, kv_heads)
    parts = gpu_plan.splits(pages.lengths, TILE, tiles.spare(kv_heads), most)
    table = gpu.page_lists(pages.table, pages.lengths, block_tokens, TILE)
    shape = _Shape(padded, width, block_tokens, table.shape[1], tiles.stages, width**-0.5 * gpu.LOG2E)
    items = parts.work.shape[0]

    def paged_decode(*refs):
        _decode(shape, *refs)

    call = plgpu.kernel(
        paged_decode,
        out_type=(
            jax.ShapeDtypeStruct((items, kv_heads, padded, width), q.dtype),
            jax.ShapeDtypeStruct((items, kv_heads, padded), jnp.float32),
        ),
        scratch_types=[shape.scratch()],
        grid=(kv_heads, items),
        grid_names=("head", "item"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    turned = jnp.pad(q.reshape(rows, kv_heads, group, width), ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    first = gpu.row_argument(first_row)
    out, weight = call(turned, pool, table, parts.work, first)
    whole = gpu_plan.merged(out[:, :, :group], weight[:, :, :group], parts, most)
    return whole.reshape(rows, heads, width).astype(q.dtype)


def _decode(c: _Shape, q_g, pool_g, table_g, work_g, first_g, out_g, weight_g, s: _Scratch) -> None:
    """One KV head of one item."""
    head, item = lax.axis_index("head"), lax.axis_index("item")
    row, first, end, length = (work_g[item, i] for i in range(4))
    copies = TILE // c.block_tokens
    layer = first_g[0]
    count = end - first

    def bring(i, slot):
        """Keys and values of the item's i-th tile."""
        for odd, (target, arrived) in enumerate(((s.k, s.k_in), (s.v, s.v_in))):
            for j in range(copies):
                page = pool_g.at[layer + s.pages[(first + i) * copies + j], :, 2 * head + odd]
                place = target.at[slot, pl.ds(j * c.block_tokens, c.block_tokens)]
                plgpu.copy_gmem_to_smem(page, place, arrived.at[slot])

    @pl.when(count > 0)
    def _():
        plgpu.copy_gmem_to_smem(q_g.at[row, head], s.q, s.q_in)
        gpu.bring_list(table_g, row, s.pages, s.pages_in, (first * copies, end * copies))
        for i in range(c.stages):
            pl.when(i < count)(functools.partial(bring, i, i))
        plgpu.barrier_wait(s.q_in)
        start = (
            gpu.zeros((c.width, c.group), gpu.MATRIX),
            gpu.lowest(c.group, gpu.MATRIX.reduce(0)),
            gpu.zeros((TILE, c.group), gpu.MATRIX),
        )
        step = functools.partial(_tile, c, s, bring, (first, count, length))
        acc, m, total = lax.fori_loop(0, count, step, start)
        total = total.sum(axis=0)
        s.q.transpose((1, 0))[...] = (acc / gpu.along_columns(total, acc.shape)).astype(s.q.dtype)
        s.weight[...] = m + jnp.log(total) * gpu.LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.q, out_g.at[item, head])
        plgpu.copy_smem_to_gmem(s.weight, weight_g.at[item, head])
        plgpu.wait_smem_to_gmem(0)


def _tile(c: _Shape, s: _Scratch, bring, span, i, carry):
    """One tile of 64 tokens: acc [H, G], m [G], and total [64, G], a sum per place in the tile."""
    acc, m, total = carry
    first, count, length = span
    slot = lax.rem(i, jnp.int32(c.stages))
    begin = (first + i) * TILE
    plgpu.barrier_wait(s.k_in.at[slot])
    logits = gpu.product((TILE, c.group), s.k.at[slot], s.q.transpose((1, 0)))
    at = begin + plgpu.broadcasted_iota(jnp.int32, (TILE, c.group), 0, layout=gpu.MATRIX)
    logits = jnp.where(at < length, logits * c.scale, gpu.NEG)
    higher = jnp.maximum(m, logits.max(axis=0))
    decay = jnp.exp2(m - higher)
    p = jnp.exp2(logits - gpu.along_columns(higher, logits.shape))
    total = total * gpu.along_columns(decay, total.shape) + p
    s.p.transpose((1, 0))[...] = p.astype(s.p.dtype)
    plgpu.barrier_wait(s.v_in.at[slot])

    @pl.when(begin + TILE > length)
    def _():
        s.v.at[slot][...] = gpu.without_tail(s.v.at[slot], begin, length)

    plgpu.commit_smem()
    part = gpu.product((c.width, c.group), s.v.at[slot].transpose((1, 0)), s.p.transpose((1, 0)))
    acc = acc * gpu.along_columns(decay, acc.shape) + part
    pl.when(i + c.stages < count)(functools.partial(bring, i + c.stages, slot))
    return acc, higher, total
