"""Prompt and mixed attention for NVIDIA Hopper: several tokens per row, pages read in place.

A tile is 128 (token, query head) rows of one KV head and one sequence (`gpu_plan.prompt_tiles`): one
launch row of 32 tokens with G = 4, four of them with G = 1. A block of 384 threads has three
warpgroups. Two compute 64 rows each. One copies pages through a ring of stages, which the two
release tile by tile. The arithmetic is FlashAttention's (Dao 2023), with an online softmax in powers
of two, in registers except for the probabilities.

A bulk copy reads a piece of C tokens of one head from q [S, C, N, H], and another writes its result,
so nothing is rearranged in memory. The keys come in three loops: tiles that every row sees whole,
tiles on the diagonal, and the last tile, whose tail may contain anything. Its values go through the
warpgroup's own query tile, which is free by then, with the tail zeroed.

Rows of one token in a mixed launch are tiles that are mostly empty. This is correct, but a launch of
their own (`gpu_decode`) is faster if there are many.
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
from jlora.pallas.gpu_plan import Pieces
from jlora.pallas.ops import Pages

TILE = 64  # tokens of context per product; also the rows of a query tile, which holds the last values
COMPUTE = 2  # warpgroups that compute; one more copies pages
CHUNK = 32  # tokens of the longest piece; longer rows are cut


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tunable sizes.

    Attributes:
        stages: tiles of keys and values in flight per block.
        registers: keep probabilities in registers for the second product. The interpreter cannot
            run this, so shared memory is the default.
    """

    stages: int = 3
    registers: bool = False


class _Scratch(NamedTuple):
    q: Any  # [2, 64, H]
    k: Any  # [stages, TILE, H]
    v: Any
    p: Any  # [2, 64, TILE]
    pages: Any  # [W]
    q_in: Any
    k_in: Any
    v_in: Any
    k_out: Any
    v_out: Any
    pages_in: Any


@dataclass(frozen=True, slots=True)
class _Shape:
    pieces: Pieces
    width: int  # H
    block_tokens: int
    table: int  # entries of a page list
    stages: int
    registers: bool
    scale: float  # of logits, for powers of two

    @property
    def mine(self) -> int:
        """Pieces of one warpgroup."""
        return self.pieces.per_tile // COMPUTE

    def scratch(self) -> _Scratch:
        ready = plgpu.Barrier(num_arrivals=TILE // self.block_tokens, num_barriers=self.stages)
        given_back = plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=self.stages)
        return _Scratch(
            q=gpu.tiled(COMPUTE, gpu.ROWS, self.width),
            k=gpu.tiled(self.stages, TILE, self.width),
            v=gpu.tiled(self.stages, TILE, self.width),
            p=gpu.tiled(COMPUTE, gpu.ROWS, TILE),
            pages=plgpu.SMEM((self.table,), jnp.int32),
            q_in=plgpu.Barrier(num_arrivals=self.mine, num_barriers=COMPUTE),
            k_in=ready,
            v_in=ready,
            k_out=given_back,
            v_out=given_back,
            pages_in=plgpu.Barrier(num_barriers=len(gpu.list_parts(self.table))),
        )


class _Tile(NamedTuple):
    """A row of `gpu_plan.prompt_tiles`."""

    row: jax.Array
    rows: jax.Array
    head: jax.Array
    start: jax.Array
    count: jax.Array
    length: jax.Array


@functools.partial(jax.jit, static_argnames="tiles")  # so that a step of many layers traces it once
def chunk_attention(
    q: jax.Array, pool: jax.Array, first_row: jax.Array | int, pages: Pages, tiles: PrefillTiles = PrefillTiles()
) -> jax.Array:
    """Attention of C > 1 tokens per row: `ops.Attention` with q [S, C, N, H] bfloat16."""
    rows, chunk, heads, width = q.shape
    piece = next(size for size in (8, 16, CHUNK) if size >= min(chunk, CHUNK))
    whole = -(-chunk // piece) * piece
    cut, at = _cut(jnp.pad(q, ((0, 0), (0, whole - chunk), (0, 0), (0, 0))), pages, piece)
    out = _attend(cut, pool, first_row, at, tiles)
    return out.reshape(rows, whole, heads, width)[:, :chunk]


def _cut(q: jax.Array, pages: Pages, piece: int) -> tuple[jax.Array, Pages]:
    """Cuts rows into rows of `piece` tokens; rows without tokens have length 0."""
    rows, chunk, heads, width = q.shape
    parts = chunk // piece
    if parts == 1:
        return q, pages
    starts = (pages.starts[:, None] + jnp.arange(parts, dtype=jnp.int32) * piece).reshape(-1)
    lengths = jnp.minimum(jnp.repeat(pages.lengths, parts), starts + piece)
    real = lengths > starts
    table = jnp.repeat(pages.table, parts, axis=0)
    cut = Pages(table, jnp.where(real, lengths, 0), jnp.where(real, starts, 0))
    return q.reshape(rows * parts, piece, heads, width), cut


def _attend(q, pool, first_row, pages: Pages, tiles: PrefillTiles) -> jax.Array:
    chunk, heads, width = q.shape[1:]
    block_tokens, kv_heads = pool.shape[1], pool.shape[2] // 2
    pieces = Pieces(chunk, heads // kv_heads)
    table = gpu.page_lists(pages.table, pages.lengths, block_tokens, TILE)
    work = gpu_plan.prompt_tiles(pages, pieces, TILE)
    scale = width**-0.5 * gpu.LOG2E
    shape = _Shape(pieces, width, block_tokens, table.shape[1], tiles.stages, tiles.registers, scale)

    def paged_prefill(*refs):
        _prefill(shape, *refs)

    call = plgpu.kernel(
        paged_prefill,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[shape.scratch()],
        grid=(kv_heads, work.shape[0]),
        grid_names=("head", "tile"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(q, pool, table, work, gpu.row_argument(first_row))


def _prefill(c: _Shape, q_g, pool_g, table_g, work_g, first_g, out_g, s: _Scratch) -> None:
    """One KV head of one tile. The last tiles, which have the most keys, start first."""
    head, warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")
    at = work_g.shape[0] - 1 - lax.axis_index("tile")
    tile = _Tile(*(work_g[at, i] for i in range(6)))

    @pl.when(warpgroup < COMPUTE)
    def _():
        plgpu.set_max_registers(232, action="increase")
        pl.when(tile.rows > 0)(functools.partial(_compute, c, s, tile, (q_g, out_g)))

    @pl.when(warpgroup == COMPUTE)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.when(tile.rows > 0)
        def _():
            copies = TILE // c.block_tokens
            longest = tile.row + tile.rows - 1  # a list ends with its row's length
            gpu.bring_list(table_g, longest, s.pages, s.pages_in, (0, tile.count * copies))
            _bring_pages(c, s, (pool_g, first_g[0], head), tile.count)


def _piece(c: _Shape, tile: _Tile, index: jax.Array):
    """Launch row and query head of a piece, and whether the tile has it."""
    group = jnp.int32(c.pieces.group)
    turn = lax.div(index, group) if c.pieces.parts == 1 else jnp.int32(0)
    inner = tile.head + index - turn * group
    real = (turn < tile.rows) & (inner < group)
    return tile.row + jnp.minimum(turn, tile.rows - 1), jnp.minimum(inner, group - 1), real


def _compute(c: _Shape, s: _Scratch, tile: _Tile, ends) -> None:
    """A warpgroup's 64 rows: reads queries, goes through all tiles of keys, writes results."""
    q_g, out_g = ends
    head, mine = lax.axis_index("head"), lax.axis_index("warpgroup")
    chunk, group = c.pieces.chunk, c.pieces.group
    for i in range(c.mine):
        row, inner, _real = _piece(c, tile, mine * c.mine + i)
        place = s.q.at[mine, pl.ds(i * chunk, chunk)]
        plgpu.copy_gmem_to_smem(q_g.at[row, :, head * group + inner], place, s.q_in.at[mine])
    plgpu.barrier_wait(s.q_in.at[mine])
    by_row = gpu.MATRIX.reduce(1)
    start = (
        gpu.zeros((gpu.ROWS, c.width), gpu.MATRIX),
        gpu.lowest(gpu.ROWS, by_row),
        gpu.zeros((gpu.ROWS,), by_row),
    )
    final = jnp.maximum(tile.count - 1, 0)
    whole = jnp.minimum(lax.div(tile.start + 1, jnp.int32(TILE)), final)
    step = functools.partial(_keys, c, s, tile)
    carry = lax.fori_loop(0, whole, functools.partial(step, masked=False, last=False), start)
    carry = lax.fori_loop(whole, final, functools.partial(step, masked=True, last=False), carry)
    acc, _, total = lax.fori_loop(final, tile.count, functools.partial(step, masked=True, last=True), carry)
    out = acc / gpu.along_rows(jnp.maximum(total, gpu.TINY), acc.shape)
    s.q.at[mine][...] = out.astype(s.q.dtype)
    plgpu.commit_smem()
    for i in range(c.mine):
        row, inner, real = _piece(c, tile, mine * c.mine + i)

        @pl.when(real)
        def _(i=i, row=row, inner=inner):
            place = s.q.at[mine, pl.ds(i * chunk, chunk)]
            plgpu.copy_smem_to_gmem(place, out_g.at[row, :, head * group + inner])

    plgpu.wait_smem_to_gmem(0)


def _keys(c: _Shape, s: _Scratch, tile: _Tile, i, carry, *, masked: bool, last: bool):
    """One tile of 64 tokens: acc [64, H], m [64], total [64]."""
    acc, m, total = carry
    mine = lax.axis_index("warpgroup")
    slot = lax.rem(i, jnp.int32(c.stages))
    plgpu.barrier_wait(s.k_in.at[slot])
    logits = gpu.product((gpu.ROWS, TILE), s.q.at[mine], s.k.at[slot].transpose((1, 0))) * c.scale
    plgpu.barrier_arrive(s.k_out.at[slot])
    if masked:
        logits = jnp.where(_seen(c, tile, mine, i * TILE), logits, gpu.NEG)
    higher = jnp.maximum(m, logits.max(axis=1))
    decay = jnp.exp2(m - higher)
    p = jnp.exp2(logits - gpu.along_rows(higher, logits.shape))
    total = total * decay + p.sum(axis=1)
    p = p.astype(s.p.dtype)
    if not c.registers:
        s.p.at[mine][...] = p
    plgpu.barrier_wait(s.v_in.at[slot])
    values = s.v.at[slot]
    if last:
        s.q.at[mine][...] = gpu.without_tail(values, i * TILE, tile.length)
        values = s.q.at[mine]
    if last or not c.registers:
        plgpu.commit_smem()
    part = gpu.product((gpu.ROWS, c.width), p if c.registers else s.p.at[mine], values)
    plgpu.barrier_arrive(s.v_out.at[slot])
    return acc * gpu.along_rows(decay, acc.shape) + part, higher, total


def _seen(c: _Shape, tile: _Tile, mine: jax.Array, begin: jax.Array) -> jax.Array:
    """[64, TILE] whether a row attends to a token: at or before its own, and inside the context."""
    shape = (gpu.ROWS, TILE)
    at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=gpu.MATRIX)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=gpu.MATRIX) + begin
    piece = lax.div(at, jnp.int32(c.pieces.chunk))
    turn = lax.div(piece + mine * c.mine, jnp.int32(c.pieces.group)) if c.pieces.parts == 1 else 0
    query = tile.start + at + (turn - piece) * c.pieces.chunk
    return (key <= query) & (key < tile.length)


def _bring_pages(c: _Shape, s: _Scratch, source, count: jax.Array) -> None:
    """The copying warpgroup: copies keys and values as slots become free."""
    pool_g, layer, head = source
    copies = TILE // c.block_tokens

    def given_back(slot):
        plgpu.barrier_wait(s.k_out.at[slot])
        plgpu.barrier_wait(s.v_out.at[slot])

    def load(i, _):
        slot = lax.rem(i, jnp.int32(c.stages))
        pl.when(i >= c.stages)(functools.partial(given_back, slot))
        rows = [layer + s.pages[i * copies + j] for j in range(copies)]
        for odd, (target, arrived) in enumerate(((s.k, s.k_in), (s.v, s.v_in))):
            for j, row in enumerate(rows):
                place = target.at[slot, pl.ds(j * c.block_tokens, c.block_tokens)]
                plgpu.copy_gmem_to_smem(pool_g.at[row, :, 2 * head + odd], place, arrived.at[slot])

    def drain(i, _):
        given_back(lax.rem(i, jnp.int32(c.stages)))

    lax.fori_loop(0, count, load, None)
    lax.fori_loop(jnp.maximum(count - c.stages, 0), count, drain, None)
