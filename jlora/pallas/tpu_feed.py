"""Copies tiles of adapter blocks from the pool into a TPU's vector memory, and reads them there.

A unit is rows of 128 numbers. A 32-bit sublane holds a pair of bfloat16 rows, so everything here
counts 32-bit rows: 128 numbers in float32, 256 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlora.layout import UnitLayout

LANES, SUBLANES = 128, 8
NOBODY = -2  # owner of an unused unit; -1 is the base


@dataclass(frozen=True, slots=True)
class Tile:
    """Layout of a tile of one projection's units in vector memory: `slots` of each unit, from `first` on."""

    unit: UnitLayout
    slot_rows: int  # rows of 128 numbers in a slot (2K)
    first: int
    slots: int
    blocks: int  # pool blocks of a full tile
    units: int  # in the arithmetic; those behind the last fetched one are masked
    packing: int  # rows in one 32-bit sublane

    @classmethod
    def of(cls, unit: UnitLayout, pool: Any, units: int, first: int, slots: int) -> Tile:
        """A tile of about `units` units, in whole blocks, at least one."""
        blocks = max(1, units // unit.per_block)
        room = cdiv(max(units, unit.per_block), 8) * 8
        return cls(unit, pool.shape[2], first, slots, blocks, room, 4 // pool.dtype.itemsize)

    @property
    def step(self) -> int:
        """Numbers of a unit per load."""
        return LANES * self.packing

    @property
    def stride(self) -> int:
        """32-bit rows from one unit to the next."""
        return self.slots * self.slot_rows // self.packing

    def buffer(self, copies: int, dtype: Any) -> Any:
        """Scratch memory for `copies` tiles, with room for the last aligned window of rows."""
        room = cdiv(2 * SUBLANES * self.packing, self.slot_rows)
        return pltpu.VMEM((copies, self.units * self.slots + room, self.slot_rows, LANES), dtype)


class Lists(NamedTuple):
    """A launch's lists in scalar memory."""

    spans: Any  # [token tiles * P * 2] entries start .. stop - 1 of each token tile and projection
    met: Any  # [products * P * 2] the same for the rows of each product
    blocks: Any  # [M]
    owners: Any  # [M]
    place: Any  # [2] the layer's first pool row; the turn (two-kernel form only)


class Products(NamedTuple):
    """The products of a token tile: tokens per product, place of the first in `Lists.met`, and stride."""

    rows: int
    first: Any
    stride: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Copies one projection's tiles from the pool into its buffers in turn.

    Attributes:
        start, stop: this token tile's entries in the lists; cut: its products.
        pool: the whole pool, in HBM; arrived: a semaphore per buffer.
        views: buffers can be reshaped, which the interpreter with TPU semantics cannot do.
    """

    tile: Tile
    lists: Lists
    start: Any
    stop: Any
    cut: Products
    pool: Any
    buffers: Any
    arrived: Any
    views: bool

    @property
    def turns(self) -> Any:
        return lax.div(self.stop - self.start + (self.tile.blocks - 1), jnp.int32(self.tile.blocks))

    def count(self, turn: Any) -> Any:
        """Blocks of a tile: `tile.blocks`, fewer in the last tile, 0 behind it."""
        return jnp.clip(self.stop - self.start - turn * self.tile.blocks, 0, self.tile.blocks)

    def fetch(self, turn: Any) -> None:
        """Starts the copies of a tile's blocks."""
        self._each(turn, lambda copy: copy.start())

    def wait(self, turn: Any) -> None:
        self._each(turn, lambda copy: copy.wait())

    def products(self, turn: Any, tokens: int, product: Callable[[Any], None]) -> None:
        """Calls `product` with every run of rows of the token tile that has one of the tile's adapters."""
        first = self.start + turn * self.tile.blocks
        stop = first + self.count(turn)
        whole = tokens == self.cut.rows

        def run(i: Any, _: None) -> None:
            at = self.cut.first + i * self.cut.stride

            @pl.when(jnp.maximum(self.lists.met[at], first) < jnp.minimum(self.lists.met[at + 1], stop))
            def _() -> None:
                start = 0 if whole else pl.multiple_of(i * self.cut.rows, self.cut.rows)
                product(pl.ds(start, self.cut.rows))

        lax.fori_loop(0, 1 if whole else tokens // self.cut.rows, run, None)

    def rows(self, turn: Any, window: Any, at: int) -> jax.Array:
        """32-bit row `window` + `at` of every unit of a tile: [units, 128].

        `window` may be traced and is a multiple of 8, because the compiler must know where tiles begin.
        """
        tile, count = self.tile, self.buffers.shape[1] * self.tile.slot_rows // self.tile.packing
        size = (tile.units - 1) * tile.stride + 2 * SUBLANES
        if not self.views:
            words = _words(self.buffers[self._buffer(turn)], tile)
            return lax.dynamic_slice_in_dim(words, window, size)[at :: tile.stride][: tile.units]
        flat = self.buffers.at[self._buffer(turn)].reshape(count * tile.packing, LANES)
        flat = flat.bitcast(jnp.uint32) if tile.packing > 1 else flat
        near = flat.at[pl.ds(pl.multiple_of(window, SUBLANES), size)]
        return near[pl.ds(at, tile.units, stride=tile.stride), :]

    def owners(self, turn: Any) -> jax.Array:
        """[1, units] owner of each unit of a tile."""
        block = lax.div(lax.broadcasted_iota(jnp.int32, (1, self.tile.units), 1), jnp.int32(self.tile.unit.per_block))
        first = self.start + turn * self.tile.blocks

        def name(e: Any, row: jax.Array) -> jax.Array:
            return jnp.where(block == e, self.lists.owners[first + e], row)

        return lax.fori_loop(0, self.count(turn), name, jnp.full((1, self.tile.units), NOBODY, jnp.int32))

    def _buffer(self, turn: Any) -> Any:
        return lax.rem(turn, jnp.int32(self.buffers.shape[0])) if self.buffers.shape[0] > 1 else 0

    def _each(self, turn: Any, act: Callable[[Any], None]) -> None:
        unit, slots = self.tile.unit, self.tile.slots
        buffer, arrived = self.buffers.at[self._buffer(turn)], self.arrived.at[self._buffer(turn)]
        # Whole units of a block are contiguous: one copy. Parts of units: a copy per unit.
        pieces, size = (1, unit.per_block * slots) if slots == unit.slots else (unit.per_block, slots)

        def block(e: Any, _: None) -> None:
            row = self.lists.place[0] + self.lists.blocks[self.start + turn * self.tile.blocks + e]
            for piece in range(pieces):
                source = self.pool.at[row, pl.ds(piece * unit.slots + self.tile.first, size)]
                target = buffer.at[pl.ds((e * pieces + piece) * size, size)]
                act(pltpu.make_async_copy(source, target, arrived))

        lax.fori_loop(0, self.count(turn), block, None)


def _words(buffer: jax.Array, tile: Tile) -> jax.Array:
    """A whole buffer as 32-bit rows, by value."""
    rows = buffer.reshape(-1, LANES)
    if tile.packing == 1:
        return rows
    return lax.bitcast_convert_type(rows.reshape(-1, tile.packing, LANES).swapaxes(1, 2), jnp.uint32)


def numbers(words: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """32-bit rows as numbers [units, step]; zeros if not valid."""
    if valid is not None:
        words = jnp.where(valid, words, jnp.zeros_like(words))
    if words.dtype == jnp.float32:
        return words
    low, high = words << 16, words & jnp.uint32(0xFFFF0000)
    halves = [lax.bitcast_convert_type(w, jnp.float32).astype(jnp.bfloat16) for w in (low, high)]
    return jnp.concatenate(halves, axis=1)


def cdiv(a: Any, b: int) -> Any:
    """a / b, rounded up."""
    return (a + b - 1) // b
