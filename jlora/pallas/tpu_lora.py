"""LoRA on TPU (Mosaic), with adapters read in place in the pool.

A grid step owns a tile of tokens and goes through the active blocks of its tokens' adapters, a tile
of rank units at a time. The block ids and owners are in scalar memory before the kernel starts. So
it fetches a tile's blocks by plain copies, one per block, while it computes the tile before. It
computes only those runs of `LoraTiles.rows` tokens that have one of the tile's adapters:

    h = x Aᵀ            [rows, units]     matrix unit, over 128-wide pieces of x
    h = 0 where a unit's owner is not the token's adapter
    y = y + h B         [rows, b]         added in place to the base product

A unit is rows of 128 numbers in its slots: pieces of A, then of B. Piece c of every unit is one
strided load. A 32-bit sublane holds a pair of bfloat16 rows, so one load brings two pieces.

Work follows the active blocks:

- The lists give the number of turns. Adapters of different ranks share a tile.
- A token tile visits only blocks whose owners can be among its tokens.
- A run of tokens without any of a tile's adapters is not multiplied.
- A launch without active blocks does not run.

With at most `LoraTiles.tokens` tokens every block is read once. A longer prompt reads its own
adapters' blocks once per token tile.

On several devices x Aᵀ is summed over the shards between the two products. There the kernel has two
halves with the sum between them. The first fetches only the slots with A, the second those with B. A
turn takes a tile of every projection and costs one small all-reduce.

Source: Punica (Chen et al. 2023, section 4) and S-LoRA (Sheng et al. 2023, section 5); here with one
pool, without gathered copies and without padding to the largest rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlora.pallas.ops import Adapted, Psum, acting
from jlora.pallas.tiles import SMALLEST, Chip, LoraShape, LoraTiles
from jlora.pallas.tpu_feed import LANES, NOBODY, SUBLANES, Feed, Lists, Products, Tile, cdiv, numbers


def _shrink(feed: Feed, turn: Any, x: Any, rows: Any) -> jax.Array:
    """x Aᵀ for some rows and a tile: [rows, units] float32. Units that were not fetched have any value."""
    step = feed.tile.step

    def piece(h: jax.Array, words: jax.Array, at: Any, size: int) -> jax.Array:
        return h + _dot(x[rows, pl.ds(at, size)], numbers(words)[:, :size], ((1,), (1,)))

    start = jnp.zeros((rows.size, feed.tile.units), jnp.float32)
    return _pieces(feed, turn, (0, feed.tile.unit.a, step), piece, start)


def _expand(feed: Feed, turn: Any, h: jax.Array, out: Any, rows: Any) -> None:
    """out[rows] += h B for a tile."""
    tile = feed.tile
    first = (tile.unit.b_start - tile.first * tile.slot_rows * LANES) // tile.step  # B's row in the fetched part
    fetched = feed.count(turn) * tile.unit.per_block
    # Vector memory without a copy may hold NaN, and 0 · NaN is NaN.
    valid = lax.broadcasted_iota(jnp.int32, (tile.units, LANES), 0) < fetched
    h = h.astype(out.dtype)

    def piece(_: None, words: jax.Array, at: Any, size: int) -> None:
        here = (rows, pl.ds(at, size))
        delta = _dot(h, numbers(words, valid)[:, :size], ((1,), (0,)))
        out[here] = (out[here].astype(jnp.float32) + delta).astype(out.dtype)

    _pieces(feed, turn, (first, tile.unit.b, tile.step), piece, None)


def _pieces(feed: Feed, turn: Any, part: tuple[int, int, int], piece: Callable[..., Any], carry: Any) -> Any:
    """Folds `piece` over `part` (first 32-bit row in the unit, numbers, numbers per row) of a tile's units.

    A loop takes eight rows at a time, so that the compiled kernel stays small; the rest is unrolled.
    `piece(carry, words [units, 128], first number, count)` gives the next carry.
    """
    first, numbers, step = part
    near, over = divmod(first, SUBLANES)
    groups = numbers // (SUBLANES * step)

    def group(g: Any, carry: Any) -> Any:
        for r in range(SUBLANES):
            words = feed.rows(turn, (near + g) * SUBLANES, over + r)
            carry = piece(carry, words, pl.multiple_of((g * SUBLANES + r) * step, step), step)
        return carry

    if groups:
        carry = lax.fori_loop(0, groups, group, carry)
    for at in range(groups * SUBLANES * step, numbers, step):
        window, row = divmod(first + at // step, SUBLANES)
        carry = piece(carry, feed.rows(turn, window * SUBLANES, row), at, min(step, numbers - at))
    return carry


def _dot(x: jax.Array, y: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32)


def _mask(h: jax.Array, adapters: jax.Array, owners: jax.Array) -> jax.Array:
    return jnp.where(adapters == owners, h, 0.0)


def _fused(plan: Plan, *refs: Any) -> None:
    """Both products of every projection, for one tile of tokens."""
    lists, (adapters, x, pool), bases, outs, buffers, (arrived,) = plan.split(refs, plan.count, plan.count, plan.count)
    feeds = plan.feeds(lists, pool, buffers, arrived)
    for feed in feeds:  # start the first tile of every projection before computing anything
        feed.fetch(jnp.int32(0))
    for feed, base, out in zip(feeds, bases, outs, strict=True):
        out[...] = base[...]

        def turn(j: Any, _: None, feed: Feed = feed, out: Any = out) -> None:
            feed.fetch(j + 1)
            feed.wait(j)
            owners = feed.owners(j)

            def product(rows: Any) -> None:
                h = _mask(_shrink(feed, j, x, rows), adapters[rows, :], owners)
                _expand(feed, j, h, out, rows)

            feed.products(j, plan.tokens, product)

        lax.fori_loop(0, feed.turns, turn, None)


def _first_half(plan: Plan, *refs: Any) -> None:
    """x Aᵀ of one tile of every projection."""
    lists, (_, x, pool), _, outs, buffers, (arrived,) = plan.split(refs, 0, plan.count, plan.count)
    feeds = plan.feeds(lists, pool, buffers, arrived)
    turn = lists.place[1]
    for feed in feeds:
        feed.fetch(turn)
    for feed, out in zip(feeds, outs, strict=True):
        feed.wait(turn)
        out[...] = jnp.zeros_like(out)
        held = feed.owners(turn) != NOBODY

        def product(rows: Any, feed: Feed = feed, out: Any = out, held: Any = held) -> None:
            # Masked, so that the sum over shards is finite whatever the memory held.
            out[rows, :] = jnp.where(held, _shrink(feed, turn, x, rows), 0.0)

        feed.products(turn, plan.tokens, product)


def _second_half(plan: Plan, *refs: Any) -> None:
    """Adds h B of one tile of every projection."""
    lists, (adapters, h, pool), bases, outs, buffers, (arrived,) = plan.split(refs, plan.count, plan.count, plan.count)
    feeds = plan.feeds(lists, pool, buffers, arrived)
    turn, at = lists.place[1], 0
    for feed in feeds:
        feed.fetch(turn)
    for feed, base, out in zip(feeds, bases, outs, strict=True):
        out[...] = base[...]
        feed.wait(turn)
        units, owners = pl.ds(at, feed.tile.units), feed.owners(turn)

        def product(rows: Any, feed: Feed = feed, out: Any = out, units: Any = units, owners: Any = owners) -> None:
            _expand(feed, turn, _mask(h[rows, units], adapters[rows, :], owners), out, rows)

        feed.products(turn, plan.tokens, product)
        at += feed.tile.units


@dataclass(frozen=True, slots=True)
class Plan:
    """One kernel of a launch: its tiles, and the order of its references.

    Attributes:
        tokens, rows: of a grid step, and of one product.
    """

    tiles: tuple[Tile, ...]
    tokens: int
    rows: int
    sizes: LoraTiles
    buffers: int
    interpret: Any

    @property
    def count(self) -> int:
        """Projections."""
        return len(self.tiles)

    def split(self, refs: Sequence[Any], *sizes: int) -> tuple[Any, ...]:
        """Splits references into lists, the three inputs, groups of `sizes`, and the rest."""
        lists = len(Lists._fields)
        at = lists + 3
        parts: list[Any] = [Lists(*refs[:lists]), refs[lists:at]]
        for size in sizes:
            parts.append(refs[at : at + size])
            at += size
        return (*parts, refs[at:])

    def feeds(self, lists: Lists, pool: Any, buffers: Sequence[Any], arrived: Any) -> list[Feed]:
        """The feed of every projection."""
        step = pl.program_id(0)
        views = isinstance(self.interpret, bool)

        def feed(i: int, tile: Tile, buffer: Any) -> Feed:
            at = 2 * (self.count * step + i)
            products = Products(self.rows, 2 * (self.count * (self.tokens // self.rows) * step + i), 2 * self.count)
            span = (lists.spans[at], lists.spans[at + 1])
            return Feed(tile, lists, *span, products, pool, buffer, arrived.at[i], views)

        return [feed(i, tile, buffer) for i, (tile, buffer) in enumerate(zip(self.tiles, buffers, strict=True))]

    def call(self, kernel: Any, lists: Lists, inputs: Sequence[jax.Array], bases: Any, outs: Any) -> list[jax.Array]:
        """Launches `kernel` over the token tiles; `bases` become the outputs in place."""

        def rows(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((self.tokens, width), lambda i, *_: (i, 0))

        scratch = [t.buffer(self.buffers, inputs[2].dtype) for t in self.tiles]
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(lists.spans.shape[0] // (2 * self.count),),
            in_specs=[
                rows(1),
                rows(inputs[1].shape[1]),
                pl.BlockSpec(memory_space=pl.ANY),
                *(rows(base.shape[1]) for base in bases),
            ],
            out_specs=[rows(o.shape[1]) for o in outs],
            scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA((self.count, self.buffers))],
        )
        call = pl.pallas_call(
            functools.partial(kernel, self),
            grid_spec=spec,
            out_shape=[jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outs],
            input_output_aliases={len(lists) + 3 + i: i for i in range(len(bases))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), vmem_limit_bytes=self.sizes.vmem_bytes
            ),
            interpret=self.interpret,
            name=kernel.__name__.strip("_") + "_lora",
        )
        return list(call(*lists, *inputs, *bases))


@dataclass(frozen=True, eq=False)
class TpuLora:
    """`ops.Lora` on one kind of TPU; `interpret` runs the kernels on a CPU (True, or `InterpretParams`)."""

    chip: Chip
    interpret: Any = False

    def __call__(
        self,
        x: jax.Array,
        pool: jax.Array,
        first_row: jax.Array | int,
        projections: Sequence[Adapted],
        adapters: jax.Array,
        psum: Psum = None,
        acts: jax.Array | None = None,
    ) -> list[jax.Array]:
        """See `ops.Lora`."""
        launch = Launch.of(self, x, pool, projections, acting(adapters, acts))
        first = jnp.asarray(first_row, jnp.int32)
        bases = [p.base for p in projections]

        def fused(bases: list[jax.Array]) -> list[jax.Array]:
            whole = launch.plan([(0, p.unit.slots) for p in projections], 2)
            return whole.call(_fused, launch.lists(first, 0), launch.inputs(x, pool), bases, bases)

        if psum is None:
            active = sum((p.active.stop - p.active.start for p in projections), jnp.int32(0))
            return lax.cond(active > 0, fused, lambda bases: bases, bases)
        return _summed(launch, first, x, pool, psum)


@dataclass(frozen=True, slots=True)
class Launch:
    """Values that the kernels of a launch share."""

    projections: tuple[Adapted, ...]
    adapters: jax.Array
    spans: jax.Array
    met: jax.Array
    pool: Any
    tiles: LoraTiles
    tokens: int
    rows: int
    interpret: Any

    @classmethod
    def of(
        cls, op: TpuLora, x: jax.Array, pool: jax.Array, projections: Sequence[Adapted], adapters: jax.Array
    ) -> Launch:
        """Looks up the tile sizes, and finds the entries of each token tile and product."""
        size = pool.dtype.itemsize
        units = [p.unit for p in projections]
        outputs, slots, per_block = (tuple(getattr(u, name) for u in units) for name in ("b", "slots", "per_block"))
        shape = LoraShape(x.shape[0], x.shape[1], outputs, slots, per_block, pool.shape[2] * pool.shape[3] * size, size)
        tiles = op.chip.lora(shape)
        even = cdiv(x.shape[0], cdiv(x.shape[0], tiles.tokens))  # equal tiles, instead of full ones and a rest
        align = tiles.rows if even > tiles.rows else SMALLEST
        tokens = x.shape[0] if x.shape[0] <= tiles.tokens else min(tiles.tokens, cdiv(even, align) * align)
        rows = product_rows(tokens, tiles.rows)
        spans = entry_spans(projections, adapters, tokens)
        met = spans if rows == tokens else entry_spans(projections, adapters, rows, cdiv(x.shape[0], tokens) * tokens)
        like = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
        return cls(tuple(projections), adapters, spans, met, like, tiles, tokens, rows, op.interpret)

    def plan(self, parts: Sequence[tuple[int, int]], buffers: int) -> Plan:
        """A kernel that fetches `parts` (first slot, slots) of each projection's units."""
        pairs = zip(self.projections, parts, strict=True)
        made = tuple(Tile.of(p.unit, self.pool, self.tiles.units, *part) for p, part in pairs)
        return Plan(made, self.tokens, self.rows, self.tiles, buffers, self.interpret)

    def lists(self, first: jax.Array, turn: jax.Array | int) -> Lists:
        """The lists for scalar memory; `first` is the layer's first pool row."""
        active = self.projections[0].active
        place = jnp.stack([first, jnp.asarray(turn, jnp.int32)])
        return Lists(self.spans.reshape(-1), self.met.reshape(-1), active.blocks, active.owners, place)

    def inputs(self, x: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A kernel's three inputs."""
        return self.adapters[:, None], x, pool


def _summed(launch: Launch, first: jax.Array, x: jax.Array, pool: jax.Array, psum: Any) -> list[jax.Array]:
    """The two-kernel form, with a sum over the shards between the products, once per turn."""
    size = pool.shape[2] * pool.shape[3]
    units = [p.unit for p in launch.projections]
    a_part = launch.plan([(0, cdiv(u.a, size)) for u in units], 1)
    b_part = launch.plan([(u.b_start // size, u.slots - u.b_start // size) for u in units], 1)
    halves = [jax.ShapeDtypeStruct((x.shape[0], t.units), jnp.float32) for t in a_part.tiles]

    def turn(j: jax.Array, outs: list[jax.Array]) -> list[jax.Array]:
        lists = launch.lists(first, j)
        h = psum(jnp.concatenate(a_part.call(_first_half, lists, launch.inputs(x, pool), [], halves), axis=1))
        return b_part.call(_second_half, lists, launch.inputs(h, pool), outs, outs)

    held = launch.spans[..., 1] - launch.spans[..., 0]
    turns = [cdiv(held[:, i], t.blocks).max() for i, t in enumerate(a_part.tiles)]
    return lax.fori_loop(0, functools.reduce(jnp.maximum, turns), turn, [p.base for p in launch.projections])


def product_rows(tokens: int, most: int) -> int:
    """Rows of one product: a tile's tokens in equal parts of `most` / 2 to `most`, or all of them."""
    parts = (n for n in range(most, most // 2 - 1, -1) if tokens % n == 0 and n % SMALLEST == 0)
    return tokens if tokens <= most else next(parts, tokens)


def entry_spans(
    projections: Sequence[Adapted], adapters: jax.Array, tokens: int, padded_to: int | None = None
) -> jax.Array:
    """[token tiles, P, 2]: the entries whose owners can be among a token tile's adapters.

    Sequences of a launch follow each other and owners ascend, so a tile's adapters are few and
    their entries are contiguous.
    """
    ends = jnp.stack([jnp.stack([p.active.start, p.active.stop]) for p in projections])
    tiles = cdiv(padded_to or adapters.shape[0], tokens)
    if tiles == 1:
        return ends[None]
    padded = jnp.pad(adapters, (0, tiles * tokens - adapters.shape[0]), constant_values=-1).reshape(tiles, tokens)
    last = padded.max(1)
    first = jnp.where(padded < 0, last[:, None], padded).min(1)  # the lowest but -1
    owners = projections[0].active.owners
    entry = jnp.arange(owners.shape[0], dtype=jnp.int32)

    def below(limit: jax.Array) -> jax.Array:
        """[tiles, P] number of a projection's owners smaller than `limit` [tiles]."""
        small = owners < limit[:, None, None]
        inside = (entry >= ends[:, :1]) & (entry < ends[:, 1:])
        return (small & inside).sum(-1, dtype=jnp.int32)

    start = ends[:, 0] + below(first)
    stop = ends[:, 0] + below(last + 1)
    # For a tile of the base alone, first and last are -1, and no owner is below 0.
    return jnp.stack([start, stop], axis=-1)
