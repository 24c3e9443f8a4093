"""Who does what: the work lists that the Mosaic GPU kernels follow, made on the device.

A grid is a compiled shape, contexts and adapters are not. So each kernel's grid has room for the
worst launch, and a list says what each of its blocks does; those past the end of the list leave
at once. The lists follow from a launch's metadata alone, not from the layer: each is a jitted
function, so that a step of many layers traces it once, and XLA computes equal ones once.

    splits        decode: contexts cut into about equal spans, so that few long ones fill the GPU too
    merged        their partial results put together (Dao et al. 2023, Flash-Decoding)
    prompt_tiles  prompts: 128 (token, head) rows of one sequence at a time
    unit_pairs    adapters: which 64 rank units meet which tokens

Everything is plain jnp and runs anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlora.pallas.gpu_layout import UNITS, tile_rows
from jlora.pallas.ops import ActiveBlocks, Pages

NEG, TINY = -1e30, 1e-30
NOBODY = -2  # owner of a unit that is padding; -1 is a token without an adapter
TILE_ROWS = 128  # rows of a prompt tile: two warpgroups of 64


class Splits(NamedTuple):
    """Decode's work list.

    Attributes:
        work: [I, 4] row, first tile of its context, end tile, context length; first = end: nothing to do.
        begin, count: [S] a row's items are begin .. begin + count - 1.
    """

    work: jax.Array
    begin: jax.Array
    count: jax.Array


@partial(jax.jit, static_argnames=("tile", "spare", "most"))
def splits(lengths: jax.Array, tile: int, spare: int, most: int) -> Splits:
    """Cuts contexts of `lengths` [S] tokens, in tiles of `tile` tokens, into at most S + `spare` items.

    Items have equally many tiles but for the last of each row: as few as the list has room for,
    and as many as keep a row to `most` items.
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
    """Puts rows together from their items, in the order of the context.

    Args:
        out: [I, K, G, H] an item's softmax, normalised over its own tokens.
        weight: [I, K, G] log2 of its sum of powers of two.
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

    A piece is one launch row's C tokens for one query head. With few heads per KV head a tile
    holds several launch rows of a sequence, with many a launch row takes several tiles.

    Attributes:
        chunk, group: C, a divisor of 64, and G.
    """

    chunk: int
    group: int

    @property
    def per_tile(self) -> int:
        """Pieces of a tile."""
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
    """[S * parts, 8] int32: first row, rows (0: nothing to do), first head, position, KV tiles, context length, 0, 0.

    Rows of one tile are consecutive, full but for the last, and have one page list: their keys
    are brought once for all of them.
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
    """How large a launch's adapters can be: what its lists must have room for.

    Attributes:
        adapters: distinct adapters of one launch.
        rank: the largest rank of an adapter.
        run: consecutive tokens that surely share an adapter (1 in decode, C in prompts).
    """

    adapters: int
    rank: int
    run: int = 1


class Pairs(NamedTuple):
    """The LoRA kernels' work list: tiles of 64 rank units, and the tiles of tokens that use them.

    Attributes:
        blocks: [tiles * blocks per tile] of every projection's unit tiles, one after the other.
        owners: [tiles * 64] of their rows: units, and zeros where a block has fewer than 8.
        work: [N, 2] token tile, first entry of `blocks`; of which the first starts[-1] are real.
        starts: [projections * token tiles + 1] where the pairs of (projection, token tile) begin.
    """

    blocks: jax.Array
    owners: jax.Array
    work: jax.Array
    starts: jax.Array


def token_tile(tokens: int) -> int:
    """Tokens of one tile: the largest multiple of 8 up to 64 that divides `tokens`, a multiple of 8."""
    return max(size for size in range(8, UNITS + 1, 8) if tokens % size == 0)


def unit_tiles(room: Room, per_block: int, entries: int) -> int:
    """Unit tiles that hold any launch's blocks of a projection; `entries` is M."""
    blocks = min(entries, room.adapters * -(-room.rank // per_block))
    return -(-blocks // (UNITS // tile_rows(per_block)))


def pair_count(room: Room, per_block: int, entries: int, tokens: int) -> int:
    """Pairs of a projection that any launch of `tokens` tokens can have."""
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
        per_block: units of a block, a divisor of 64; fewer than 8 have rows of zeros behind them.
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
    return Pairs(*(x.astype(jnp.int32) for x in (block, owner, work, starts)))
