"""Work lists of the Mosaic GPU kernels, computed on the device in plain jnp.

A grid is a compiled shape, and contexts and adapters are not. So a kernel's grid has room for the
worst launch, and a list assigns work to its blocks. Blocks past the end of the list return at once.
The lists do not depend on the layer. Each is a jitted function, so that a step of many layers traces
it once and XLA computes it once. Source of decode's splits: Dao et al. 2023, Flash-Decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlora.pallas.gpu_support import UNITS, tile_rows
from jlora.pallas.ops import ActiveBlocks, Pages

NEG, TINY = -1e30, 1e-30
NOBODY = -2  # owner of a unit that is padding; -1 is a token without an adapter
TILE_ROWS = 128  # rows of a prompt tile: two warpgroups of 64


class Splits(NamedTuple):
    """Decode's work list."""

    work: jax.Array  # [I, 4] row, first tile of its context, end tile, context length. No work if first = end.
    begin: jax.Array  # [S] a row has the items begin .. begin + count - 1
    count: jax.Array


@partial(jax.jit, static_argnames=("tile", "spare", "most"))
def splits(lengths: jax.Array, tile: int, spare: int, most: int) -> Splits:
    """Cuts contexts of `lengths` [S] tokens, in tiles of `tile` tokens, into at most S + `spare` items.

    All items have the same number of tiles, except the last of a row: the smallest number for which
    the list has room and a row has at most `most` items.
    """
    need = -(-lengths // tile)
    size = jnp.maximum(jnp.maximum(-(-jnp.sum(need) // spare), -(-jnp.max(need) // most)), 1)
    count = -(-need // size)
    ends = jnp.cumsum(count)
    item = jnp.arange(lengths.shape[0] + spare, dtype=jnp.int32)
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, lengths.shape[0] - 1)
    begin = ends - count
    first = (item - begin[row]) * size
    end = jnp.where(item < ends[-1], jnp.minimum(first + size, need[row]), first)
    return Splits(jnp.stack([row, first, end, lengths[row]], axis=1).astype(jnp.int32), begin, count)


def merged(out: jax.Array, weight: jax.Array, parts: Splits, most: int) -> jax.Array:
    """Merges the items of each row, in the order of the context.

    Args:
        out: [I, K, G, H] softmax of each item, normalised over its own tokens.
        weight: [I, K, G] log2 of each item's sum of powers of two.
    Returns:
        [S, K, G, H] float32; zeros for rows without items.
    """
    turn = jnp.arange(most, dtype=jnp.int32)
    at = jnp.minimum(parts.begin[:, None] + turn, out.shape[0] - 1)
    real = (turn < parts.count[:, None])[:, :, None, None]
    log = jnp.where(real, weight[at], NEG)
    share = jnp.where(real, jnp.exp2(log - log.max(axis=1, keepdims=True)), 0.0)
    parted = jnp.where(real[..., None], out[at].astype(jnp.float32), 0.0)
    total = jnp.maximum(share.sum(axis=1), TINY)
    return (parted * share[..., None]).sum(axis=1) / total[..., None]


@dataclass(frozen=True, slots=True)
class Pieces:
    """How (token, head) rows of a prompt fill a tile.

    A piece is one launch row's C tokens for one query head. With few heads per KV head, a tile
    holds several launch rows of a sequence; with many, a launch row takes several tiles.
    """

    chunk: int  # C, a divisor of 64
    group: int  # G

    @property
    def per_tile(self) -> int:
        return TILE_ROWS // self.chunk

    @property
    def rows(self) -> int:
        """Launch rows that share a tile."""
        return max(1, self.per_tile // self.group)

    @property
    def parts(self) -> int:
        """Tiles that share a launch row."""
        return -(-self.group // self.per_tile)


@partial(jax.jit, static_argnames=("pieces", "tile"))
def prompt_tiles(pages: Pages, pieces: Pieces, tile: int) -> jax.Array:
    """[S * parts, 8] int32: first row, rows (0: no work), first head, position, KV tiles, context length, 0, 0.

    Rows of one tile are consecutive and full, except the last. They have one page list, so a tile
    fetches their keys once.
    """
    chunk, count = pieces.chunk, pages.lengths.shape[0]
    row = jnp.arange(count, dtype=jnp.int32)
    full = (pages.lengths - pages.starts == chunk)[:-1]
    joined = full & (pages.starts[1:] == pages.lengths[:-1]) & (pages.lengths[1:] > pages.starts[1:])
    joined &= jnp.all(pages.table[1:] == pages.table[:-1], axis=1)
    head = jnp.concatenate([jnp.ones(1, bool), ~joined])
    run = row - jax.lax.cummax(jnp.where(head, row, 0))
    (first,) = jnp.nonzero(run % pieces.rows == 0, size=count, fill_value=count)
    rows = jnp.append(first[1:], count) - first
    last = jnp.minimum(first + rows, count) - 1
    first = jnp.minimum(first, count - 1)
    start = pages.starts[first]
    length = jnp.minimum(pages.lengths[last], start + rows * chunk)
    nothing = jnp.zeros_like(rows)
    tiles = jnp.stack([first, rows, nothing, start, -(-length // tile), length, nothing, nothing], axis=1)
    tiles = jnp.repeat(tiles.astype(jnp.int32), pieces.parts, axis=0)
    heads = jnp.arange(pieces.parts, dtype=jnp.int32) * pieces.per_tile
    return tiles.at[:, 2].set(jnp.tile(heads, count))


@dataclass(frozen=True, slots=True)
class Room:
    """Limits of a launch's adapters, which size its lists: distinct adapters, and their largest rank."""

    adapters: int
    rank: int
    run: int = 1  # consecutive tokens that always share an adapter (C in prompts)


class Pairs(NamedTuple):
    """The LoRA kernels' work list: pairs of a token tile and a tile of 64 rank units."""

    blocks: jax.Array  # [tiles * blocks per tile] of the unit tiles, ordered by projection
    owners: jax.Array  # [tiles * 64] of each row of a unit tile; a block of fewer than 8 units has rows of zeros
    work: jax.Array  # [N, 2] token tile, first entry of `blocks`; the first starts[-1] items are valid
    starts: jax.Array  # [projections * token tiles + 1] first pair of each (projection, token tile)


def token_tile(tokens: int) -> int:
    """Tokens of a tile: the largest multiple of 8 up to 64 that divides `tokens`, itself a multiple of 8."""
    return max(size for size in range(8, UNITS + 1, 8) if tokens % size == 0)


def unit_tiles(room: Room, per_block: int, entries: int) -> int:
    """Most unit tiles of a projection in any launch; `entries` is M."""
    blocks = min(entries, room.adapters * -(-room.rank // per_block))
    return -(-blocks // (UNITS // tile_rows(per_block)))


def pair_count(room: Room, per_block: int, entries: int, tokens: int) -> int:
    """Most pairs of a projection in any launch of `tokens` tokens."""
    tile = token_tile(tokens)
    of_tile = min(room.adapters, -(-tile // room.run) + (0 if tile % room.run == 0 else 1))
    wide = UNITS // tile_rows(per_block)
    spanned = -(-(-(-room.rank // per_block) - 1) // wide) + 1
    return tokens // tile * min(unit_tiles(room, per_block, entries), of_tile * spanned)


@partial(jax.jit, static_argnames=("per_block", "room"))
def unit_pairs(active: Sequence[ActiveBlocks], adapters: jax.Array, per_block: int, room: Room) -> Pairs:
    """The pairs of a launch.

    Args:
        active: the adapter blocks of each projection, all from the same lists.
        adapters: [T] with T a multiple of 8.
        per_block: units per block, a divisor of 64.
    """
    wide, entries = UNITS // tile_rows(per_block), active[0].blocks.shape[0]
    entry = jnp.arange(unit_tiles(room, per_block, entries) * wide, dtype=jnp.int32)
    blocks, owners = [], []
    for lists in active:
        at = jnp.minimum(lists.start + entry, entries - 1)
        real = lists.start + entry < lists.stop
        blocks.append(jnp.where(real, lists.blocks[at], 0))
        owners.append(jnp.where(real, lists.owners[at], NOBODY))
    block, owner = jnp.concatenate(blocks), jnp.concatenate(owners)
    seen = adapters.reshape(-1, token_tile(adapters.shape[0]))
    meets = (seen[None, :, None, :, None] == owner.reshape(len(active), 1, -1, 1, wide)).any((3, 4))
    size = len(active) * pair_count(room, per_block, entries, adapters.shape[0])
    which, token, unit = jnp.nonzero(meets, size=size, fill_value=0)
    ends = jnp.cumsum(meets.sum(axis=2).reshape(-1))
    work = jnp.stack([token, (which * meets.shape[2] + unit) * wide], axis=1)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    owner = jnp.repeat(owner, UNITS // wide, total_repeat_length=UNITS // wide * owner.shape[0])
    # The barrier keeps the lists: without it XLA would fuse their last sums into each layer's use of them.
    return jax.lax.optimization_barrier(Pairs(*(x.astype(jnp.int32) for x in (block, owner, work, starts))))
