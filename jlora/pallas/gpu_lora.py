"""The segmented LoRA product for NVIDIA Hopper, with adapters' blocks read in place.

    shrink   x Aᵀ       for every pair of a token tile and a unit tile, split over the input width
    combine  h          the sum of the splits, 0 where the token's adapter does not own the unit
    expand   y += h B   in place on the base product, a token tile by 128 outputs per block

A block's rank units are rows of C chunks of 128 (or 64) numbers, A then B (`jlora.layout`). So the
pool is also `[rows, units, C, 128]`, and one bulk copy reads chunk c of all units of a block. A
product takes 64 units of one projection. `gpu_plan.unit_pairs` lists the pairs, and only these are
read: each block once per tile of 64 tokens. `expand` writes only where it adds something, so a
projection without adapters stays untouched.

`shrink` and `combine` are as many thread blocks as fill the GPU, and each takes pairs in turn: the
lists have room for the largest launch, and a block per pair would cost time to start. Projections
that share an input share the three launches. There are no atomics: splits are added in a fixed
order, so results do not depend on the run. Under tensor parallelism the one psum is on h.

Source: Punica (Chen et al. 2023, section 4) for shrink and expand; S-LoRA (Sheng et al. 2023,
section 5) for reading adapters from one paged pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jlora.layout import UnitLayout
from jlora.pallas import gpu_common as gpu
from jlora.pallas import gpu_plan
from jlora.pallas.gpu_plan import Pairs, Room
from jlora.pallas.gpu_support import UNITS, chunk_width, tile_rows
from jlora.pallas.ops import Adapted, Psum


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Tunable sizes.

    Attributes:
        stages: tiles in flight per block of `shrink`, `combine` and `expand`; with these, two
            blocks fit an SM.
        chunks: input chunks per block of `shrink`, with one token tile and with more. Fewer chunks
            fill the GPU when there are few pairs; more leave fewer splits.
        blocks: thread blocks of `shrink` and of `combine`: 132 SMs, two each.
    """

    stages: tuple[int, int, int] = (2, 3, 3)
    chunks: tuple[int, int] = (4, 8)
    blocks: int = 264


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Static arguments of a compiled `lora`."""

    units: tuple[UnitLayout, ...]
    psum: Psum
    room: Room
    tiles: LoraTiles


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of one launch; its projections differ only in `outputs`."""

    tokens: int  # of a tile
    units: int  # of a block
    rows: int  # of a unit tile that a block occupies: its units, at least 8
    width: int  # of a chunk
    inputs: int  # chunks of A
    b_start: int  # the chunk at which B starts
    outputs: tuple[int, ...]  # chunks of B, per projection
    split: int  # chunks of A per block of shrink
    tiles: LoraTiles

    @property
    def copies(self) -> int:
        """Blocks per unit tile."""
        return UNITS // self.rows

    @property
    def splits(self) -> int:
        """Parts of the input width."""
        return -(-self.inputs // self.split)


class _Shrink(NamedTuple):
    x: Any  # [stages, 64, width]
    a: Any  # [stages, UNITS, width]
    h: Any  # [64, UNITS] float32
    arrived: Any


class _Combine(NamedTuple):
    part: Any  # [stages, 64, UNITS] float32
    h: Any  # [64, UNITS]
    adapters: Any  # [64]
    owners: Any  # [UNITS]
    arrived: Any
    met: Any


class _Expand(NamedTuple):
    y: Any  # [64, width]
    h: Any  # [stages, 64, UNITS]
    b: Any  # [stages, UNITS, width]
    y_in: Any
    arrived: Any


def lora(
    x: jax.Array,
    pool: jax.Array,
    first_row: jax.Array | int,
    projections: Sequence[Adapted],
    adapters: jax.Array,
    psum: Psum = None,
    acts: jax.Array | None = None,
    *,
    room: Room,
    tiles: LoraTiles = LoraTiles(),
) -> list[jax.Array]:
    """`ops.Lora` in bfloat16, for units that `gpu_support.lora_refusal` accepts.

    Args:
        room: limits of every launch. Blocks beyond them would be ignored, so it must be made of the
            engine's limits on sequences and ranks.
    """
    fixed = _Fixed(tuple(p.unit for p in projections), psum, room, tiles)
    bases, active = [p.base for p in projections], [p.active for p in projections]
    return _add(x, pool, first_row, bases, active, adapters, acts, fixed)


@partial(jax.jit, static_argnames="fixed")  # so that a step of many layers traces it once
def _add(x, pool, first_row, bases, active, adapters, acts, fixed: _Fixed) -> list[jax.Array]:
    count = x.shape[0]
    padding = -count % 8
    x = jnp.pad(x, ((0, padding), (0, 0)))
    adapters = jnp.pad(adapters, (0, padding), constant_values=-1)
    bases = [jnp.pad(base, ((0, padding), (0, 0))) for base in bases]
    unit, tile, width = fixed.units[0], gpu_plan.token_tile(x.shape[0]), chunk_width(fixed.units)
    pairs = gpu_plan.unit_pairs(active, adapters, unit.per_block, fixed.room)
    if acts is not None:
        pairs = pairs._replace(starts=jnp.where(acts, pairs.starts, 0))
    shape = _Shape(
        tokens=tile,
        units=unit.per_block,
        rows=tile_rows(unit.per_block),
        width=width,
        inputs=unit.a // width,
        b_start=unit.b_start // width,
        outputs=tuple(u.b // width for u in fixed.units),
        split=min(fixed.tiles.chunks[x.shape[0] > tile], unit.a // width),
        tiles=fixed.tiles,
    )
    cells = pool.reshape(pool.shape[0], unit.per_block, -1, width)
    first = gpu.row_argument(first_row)
    h = _combine(shape, _shrink(shape, x, cells, first, pairs), pairs, adapters)
    h = h if fixed.psum is None else fixed.psum(h)
    return [y[:count] for y in _expand(shape, h, cells, first, pairs, bases)]


def _units(c: _Shape, cells_g, row: jax.Array, chunk: jax.Array):
    """One chunk of a block's units, with zeros up to 8 rows, which a copy reads past the end of an array."""
    if c.units == c.rows:
        return cells_g.at[row, :, chunk]
    start = pl.multiple_of(row * 0, 8)  # not a constant, because constants are checked against the array's end
    return cells_g.at[row, pl.ds(start, c.rows), chunk]


def _in_turn(count: jax.Array, work: Callable[[jax.Array], None]) -> None:
    """Does items 0 .. count - 1, distributed over all blocks of the launch."""
    me, all_blocks = lax.axis_index("block"), lax.axis_size("block")

    def turn(i, _):
        work(me + i * all_blocks)

    lax.fori_loop(0, lax.div(count - me + all_blocks - 1, jnp.int32(all_blocks)), turn, None)


def _shrink(shape: _Shape, x, cells, first, pairs: Pairs) -> jax.Array:
    """Split sums of x Aᵀ: [splits, N, tokens, 64] float32. Only valid pairs are written."""
    stages, most = shape.tiles.stages[0], pairs.work.shape[0]
    scratch = _Shrink(
        x=gpu.tiled(stages, gpu.ROWS, shape.width),
        a=gpu.tiled(stages, UNITS, shape.width),
        h=gpu.tiled(gpu.ROWS, UNITS, dtype=jnp.float32),
        arrived=plgpu.Barrier(num_arrivals=1 + shape.copies, num_barriers=stages),
    )

    def lora_shrink(x_g, cells_g, blocks_g, work_g, starts_g, first_g, h_g, s):
        source = x_g, cells_g, blocks_g, work_g, first_g
        items = starts_g[pairs.starts.shape[0] - 1] * shape.splits
        _in_turn(items, partial(_shrink_item, shape, source, h_g, s))

    call = plgpu.kernel(
        lora_shrink,
        out_type=jax.ShapeDtypeStruct((shape.splits, most, shape.tokens, UNITS), jnp.float32),
        scratch_types=[scratch],
        grid=(min(shape.tiles.blocks, shape.splits * most),),
        grid_names=("block",),
    )
    return call(x, cells, pairs.blocks, pairs.work, pairs.starts, first)


def _shrink_item(c: _Shape, source, h_g, s: _Shrink, item: jax.Array) -> None:
    """One span of the input width for one pair; neighbouring items read neighbouring memory."""
    x_g, cells_g, blocks_g, work_g, first_g = source
    stages = c.tiles.stages[0]
    pair, split = lax.div(item, jnp.int32(c.splits)), lax.rem(item, jnp.int32(c.splits))
    token, entry = work_g[pair, 0], work_g[pair, 1]
    rows = [first_g[0] + blocks_g[entry + j] for j in range(c.copies)]
    begin = split * c.split
    count = jnp.minimum(c.split, c.inputs - begin)

    def bring(i, slot):
        chunk = begin + i
        tokens = pl.ds(pl.multiple_of(token * c.tokens, 8), c.tokens)
        inputs = pl.ds(pl.multiple_of(chunk * c.width, c.width), c.width)
        arrived = s.arrived.at[slot]
        plgpu.copy_gmem_to_smem(x_g.at[tokens, inputs], s.x.at[slot, pl.ds(0, c.tokens)], arrived)
        for j, row in enumerate(rows):
            plgpu.copy_gmem_to_smem(_units(c, cells_g, row, chunk), s.a.at[slot, pl.ds(j * c.rows, c.rows)], arrived)

    def step(i, acc):
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(s.arrived.at[slot])
        acc = acc + gpu.product((gpu.ROWS, UNITS), s.x.at[slot], s.a.at[slot].transpose((1, 0)))
        pl.when(i + stages < count)(partial(bring, i + stages, slot))
        return acc

    for i in range(stages):
        pl.when(i < count)(partial(bring, i, i))
    s.h[...] = lax.fori_loop(0, count, step, gpu.zeros((gpu.ROWS, UNITS), gpu.MATRIX))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s.h.at[pl.ds(0, c.tokens)], h_g.at[split, pair])
    plgpu.wait_smem_to_gmem(0)


def _combine(shape: _Shape, parts, pairs: Pairs, adapters) -> jax.Array:
    """h [N, tokens, 64] bfloat16: the sum of the splits where the token's adapter owns the unit, else 0."""
    stages, most = shape.tiles.stages[1], pairs.work.shape[0]
    scratch = _Combine(
        part=gpu.tiled(stages, gpu.ROWS, UNITS, dtype=jnp.float32),
        h=gpu.tiled(gpu.ROWS, UNITS),
        adapters=plgpu.SMEM((gpu.ROWS,), jnp.int32),
        owners=plgpu.SMEM((UNITS,), jnp.int32),
        arrived=plgpu.Barrier(num_barriers=stages),
        met=plgpu.Barrier(num_arrivals=2),
    )

    def lora_combine(parts_g, owners_g, adapters_g, work_g, starts_g, h_g, s):
        source = parts_g, owners_g, adapters_g, work_g
        _in_turn(starts_g[pairs.starts.shape[0] - 1], partial(_combine_pair, shape, source, h_g, s))

    call = plgpu.kernel(
        lora_combine,
        out_type=jax.ShapeDtypeStruct((most, shape.tokens, UNITS), jnp.bfloat16),
        scratch_types=[scratch],
        grid=(min(shape.tiles.blocks, most),),
        grid_names=("block",),
    )
    return call(parts, pairs.owners, adapters, pairs.work, pairs.starts)


def _combine_pair(c: _Shape, source, h_g, s: _Combine, pair: jax.Array) -> None:
    parts_g, owners_g, adapters_g, work_g = source
    stages, here = c.tiles.stages[1], pl.ds(0, c.tokens)
    token, entry = work_g[pair, 0], work_g[pair, 1]
    tokens = pl.ds(pl.multiple_of(token * c.tokens, 8), c.tokens)
    units = pl.ds(pl.multiple_of(entry * c.rows, UNITS), UNITS)

    def bring(i, slot):
        plgpu.copy_gmem_to_smem(parts_g.at[i, pair], s.part.at[slot, here], s.arrived.at[slot])

    def step(i, acc):
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(s.arrived.at[slot])
        acc = acc + plgpu.layout_cast(s.part[slot], gpu.MATRIX)
        plgpu.commit_smem()  # every thread has read the slot before a copy refills it
        pl.when(i + stages < c.splits)(partial(bring, i + stages, slot))
        return acc

    plgpu.copy_gmem_to_smem(adapters_g.at[tokens], s.adapters.at[here], s.met)
    plgpu.copy_gmem_to_smem(owners_g.at[units], s.owners, s.met)
    for i in range(min(stages, c.splits)):
        bring(i, i)
    acc = lax.fori_loop(0, c.splits, step, gpu.zeros((gpu.ROWS, UNITS), gpu.MATRIX))
    plgpu.barrier_wait(s.met)
    mine = plgpu.load(s.adapters, layout=gpu.MATRIX.reduce(1))
    owner = plgpu.load(s.owners, layout=gpu.MATRIX.reduce(0))
    keep = gpu.along_rows(mine, acc.shape) == gpu.along_columns(owner, acc.shape)
    s.h[...] = jnp.where(keep, acc, jnp.zeros_like(acc)).astype(s.h.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s.h.at[here], h_g.at[pair])
    plgpu.wait_smem_to_gmem(0)


def _expand(shape: _Shape, h, cells, first, pairs: Pairs, bases: Sequence[jax.Array]) -> list[jax.Array]:
    """The bases with h B added, each in its own memory."""
    scratch = _Expand(
        y=gpu.tiled(gpu.ROWS, shape.width),
        h=gpu.tiled(shape.tiles.stages[2], gpu.ROWS, UNITS),
        b=gpu.tiled(shape.tiles.stages[2], UNITS, shape.width),
        y_in=plgpu.Barrier(),
        arrived=plgpu.Barrier(num_arrivals=1 + shape.copies, num_barriers=shape.tiles.stages[2]),
    )
    token_tiles = bases[0].shape[0] // shape.tokens

    def lora_expand(*refs):
        _expand_block(shape, *refs[:6], y_refs=refs[6 : 6 + len(bases)], s=refs[-1])

    call = plgpu.kernel(
        lora_expand,
        out_type=(),
        scratch_types=[scratch],
        grid=(sum(shape.outputs), token_tiles),
        grid_names=("chunk", "token"),
    )
    outputs = [jax.new_ref(base) for base in bases]
    call(h, cells, pairs.blocks, pairs.work, pairs.starts, first, *outputs)
    return [jax.freeze(y) for y in outputs]


def _expand_block(c: _Shape, h_g, cells_g, blocks_g, work_g, starts_g, first_g, *, y_refs, s: _Expand) -> None:
    """A chunk of outputs of one projection for one tile of tokens."""
    chunk, token = lax.axis_index("chunk"), lax.axis_index("token")
    which, begin = jnp.int32(0), jnp.int32(0)
    for i in range(1, len(c.outputs)):
        passed = chunk >= sum(c.outputs[:i])
        which = jnp.where(passed, jnp.int32(i), which)
        begin = jnp.where(passed, jnp.int32(sum(c.outputs[:i])), begin)
    inner = chunk - begin
    at = which * lax.axis_size("token") + token
    pair, count = starts_g[at], starts_g[at + 1] - starts_g[at]
    layer = first_g[0]

    def window(y_g):
        tokens = pl.ds(pl.multiple_of(token * c.tokens, 8), c.tokens)
        return y_g.at[tokens, pl.ds(pl.multiple_of(inner * c.width, c.width), c.width)]

    def bring(i, slot):
        arrived = s.arrived.at[slot]
        plgpu.copy_gmem_to_smem(h_g.at[pair + i], s.h.at[slot, pl.ds(0, c.tokens)], arrived)
        entry = work_g[pair + i, 1]
        for j in range(c.copies):
            units = _units(c, cells_g, layer + blocks_g[entry + j], c.b_start + inner)
            plgpu.copy_gmem_to_smem(units, s.b.at[slot, pl.ds(j * c.rows, c.rows)], arrived)

    def step(i, acc):
        slot = lax.rem(i, jnp.int32(c.tiles.stages[2]))
        plgpu.barrier_wait(s.arrived.at[slot])
        acc = acc + gpu.product((gpu.ROWS, c.width), s.h.at[slot], s.b.at[slot])
        pl.when(i + c.tiles.stages[2] < count)(partial(bring, i + c.tiles.stages[2], slot))
        return acc

    @pl.when(count > 0)
    def _():
        mine = s.y.at[pl.ds(0, c.tokens)]
        for i, y_g in enumerate(y_refs):
            pl.when(which == i)(lambda y_g=y_g: plgpu.copy_gmem_to_smem(window(y_g), mine, s.y_in))
        for i in range(c.tiles.stages[2]):
            pl.when(i < count)(partial(bring, i, i))
        plgpu.barrier_wait(s.y_in)
        base = plgpu.layout_cast(s.y[...], gpu.MATRIX).astype(jnp.float32)
        s.y[...] = lax.fori_loop(0, count, step, base).astype(s.y.dtype)
        plgpu.commit_smem()
        for i, y_g in enumerate(y_refs):
            pl.when(which == i)(lambda y_g=y_g: plgpu.copy_smem_to_gmem(mine, window(y_g)))
        plgpu.wait_smem_to_gmem(0)
