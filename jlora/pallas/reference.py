"""The ops of a step in plain jnp: the specification, the CPU path and the kernels' test oracle.

`jlora.pallas.ops` has the equations, shapes and letters. Loops have dynamic trip counts, so the work
follows the real contexts and adapters without a compiled shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlora.layout import UnitLayout
from jlora.pallas.ops import ActiveBlocks, Adapted, Ops, Pages, Psum, acting

TILE_UNITS = 64  # rank units per turn of the loop: enough columns for an efficient product
WHOLE = 2  # a token in a tile costs up to so many times as much as in one product of all
SPAN = 64  # tokens of context per item of decode: efficient products, little waste
CHUNK_SPAN = 128  # the same for prefill, whose products are larger
NEG = -1e30  # finite, so that a fully masked tile gives zeros and not NaN


def write_kv(pool: jax.Array, rows: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """See `ops.WriteKV`."""
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[-1])
    return pool.at[rows, slots].set(kv, mode="drop", unique_indices=True)


def attention(q: jax.Array, pool: jax.Array, first_row: jax.Array | int, pages: Pages) -> jax.Array:
    """See `ops.Attention`. Returns zeros for padding rows.

    One online softmax over a work list of (row, span of pages). The spans of all rows follow each
    other and are cut into equal tiles, so a row costs its own pages, rounded up to a span: 3x faster
    at 128 decoding rows than padding every row to the longest. A span is normalised by its own
    maximum, then merged into its row.
    """
    rows, chunk, heads, width = q.shape
    tokens, kv_heads = pool.shape[1], pool.shape[2] // 2
    span, tile = _tiling(rows, chunk, tokens)
    # [S, K, G * C, H]: one matrix product per item and KV head
    q = (q * width**-0.5).reshape(rows, chunk, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
    group = q.shape[2]
    q = q.reshape(rows, kv_heads, -1, width)
    last = jnp.tile(pages.starts[:, None] + jnp.arange(chunk, dtype=jnp.int32), (1, group))  # [S, G * C]
    ends = jnp.cumsum(-(-pages.lengths // (span * tokens)))
    table = jnp.pad(pages.table, ((0, 0), (0, -pages.table.shape[1] % span))).reshape(rows, -1, span)

    def body(i, state):
        m, total, acc = state
        item = i * tile + jnp.arange(tile, dtype=jnp.int32)
        owner = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
        valid = owner < rows
        owner = jnp.minimum(owner, rows - 1)
        part = item - jnp.where(owner > 0, ends[owner - 1], 0)
        k, v = _split(_read_pages(pool, first_row + table[owner, part]))  # [tile, K, span * B, H]
        s = jnp.einsum("wkqh,wkbh->wkqb", q[owner], k).astype(jnp.float32)
        at = part[:, None] * span * tokens + jnp.arange(span * tokens, dtype=jnp.int32)
        held = valid[:, None] & (at < pages.lengths[owner][:, None])
        seen = held[:, None] & (at[:, None] <= last[owner][..., None])
        s = jnp.where(seen[:, None], s, NEG)
        v = jnp.where(held[:, None, :, None], v, 0)  # a reused block may hold NaN, and 0 · NaN is NaN
        own = s.max(-1)  # NEG if the span is after the token: then its share is 0
        p = jnp.exp(s - own[..., None])
        out = jnp.einsum("wkqb,wkbh->wkqh", p.astype(v.dtype), v).astype(jnp.float32)
        target = jnp.where(valid, owner, rows)
        new = m.at[target].max(own, mode="drop")
        decay, share = jnp.exp(m - new), jnp.exp(own - new[owner])
        total = (total * decay).at[target].add(p.sum(-1) * share, mode="drop")
        return new, total, (acc * decay[..., None]).at[target].add(out * share[..., None], mode="drop")

    zeros = jnp.zeros(q.shape, jnp.float32)
    start = jnp.full(q.shape[:-1], NEG, jnp.float32), zeros[..., 0], zeros
    _, total, acc = lax.fori_loop(0, -(-ends[-1] // tile), body, start)
    out = (acc / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
    return out.reshape(rows, kv_heads, group, chunk, width).transpose(0, 3, 1, 2, 4).reshape(rows, chunk, heads, width)


def _tiling(rows: int, chunk: int, tokens: int) -> tuple[int, int]:
    """Pages per item, and items per turn of the loop."""
    if chunk == 1:
        return max(1, SPAN // tokens), max(8, min(32, rows))
    return max(1, CHUNK_SPAN // tokens), max(8, min(16, rows))


def _read_pages(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """Pool rows `ids` [n, j], each row's j pages in sequence: [n, j * B, 2K, H].

    The barrier keeps this a copy of whole pages. Fused with the split into keys and values, XLA
    copies number by number, which is 1.5x slower on CPU.
    """
    kv = lax.optimization_barrier(pool.reshape(pool.shape[0], -1)[ids.reshape(-1)])
    return kv.reshape(ids.shape[0], -1, *pool.shape[2:])


def _split(kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[n, B, 2K, H] pages -> keys and values [n, K, B, H]: contiguous operands for the products."""
    kv = kv.reshape(*kv.shape[:-2], -1, 2, kv.shape[-1]).transpose(3, 0, 2, 1, 4)
    return kv[0], kv[1]


def lora(
    x: jax.Array,
    pool: jax.Array,
    first_row: jax.Array | int,
    projections: Sequence[Adapted],
    adapters: jax.Array,
    psum: Psum = None,
    acts: jax.Array | None = None,
    token_tile: Callable[[int], int] | None = None,
    units: Callable[[int], int] = lambda tokens: TILE_UNITS,
) -> list[jax.Array]:
    """See `ops.Lora`. Calls `psum` once per product for all projections.

    Args:
        token_tile: T -> tokens per product. Where an adapter's tokens lie in few of these tiles, the others are
            skipped: rows in the order of their adapters pay for their own. None takes all T at once, for a
            device on which a turn of a loop costs more than a product.
        units: T -> rank units per turn of the loop.
    """
    count, adapters = x.shape[0], acting(adapters, acts)
    tiles = [max(1, units(count) // p.unit.per_block) for p in projections]
    most = min(token_tile(count), count) if token_tile else count
    size = max(n for n in range(1, most + 1) if count % n == 0)

    def body(i, outs):
        parts = [_tile(pool, first_row, p.active, p.unit, tile, i) for p, tile in zip(projections, tiles, strict=True)]

        def whole(outs):
            return [out + delta for out, delta in zip(outs, _deltas(x, parts, adapters, psum), strict=True)]

        if size == count:
            return whole(outs)
        met = _met(adapters.reshape(-1, size), [owner for _, _, owner in parts])
        order = jnp.argsort(~met)  # tiles to compute first

        def turn(k, outs):
            here = functools.partial(lax.dynamic_slice_in_dim, start_index=order[k] * size, slice_size=size)
            put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=order[k] * size, axis=0)
            added = _deltas(here(x), parts, here(adapters), psum)
            return [put(out, here(out) + delta) for out, delta in zip(outs, added, strict=True)]

        turns = met.sum()
        few = turns * size * WHOLE <= count
        return lax.cond(few, lambda outs: lax.fori_loop(0, turns, turn, outs), whole, outs)

    trips = [-(-(p.active.stop - p.active.start) // tile) for p, tile in zip(projections, tiles, strict=True)]
    return lax.fori_loop(0, functools.reduce(jnp.maximum, trips), body, [p.base for p in projections])


# A tile of a projection's blocks: A [n, a], B [n, b], and the owner of each unit [n].
_Part = tuple[jax.Array, jax.Array, jax.Array]


def _deltas(x: jax.Array, parts: Sequence[_Part], adapters: jax.Array, psum: Psum) -> list[jax.Array]:
    """The terms that one tile of each projection adds to the tokens x [t, a]."""
    h = jnp.concatenate([x @ a.T for a, _, _ in parts], axis=1)
    h = h if psum is None else psum(h)
    ends = np.cumsum([a.shape[0] for a, _, _ in parts])[:-1]
    split = zip(jnp.split(h, ends, axis=1), parts, strict=True)
    return [jnp.where(adapters[:, None] == owner, part, 0) @ b for part, (_, b, owner) in split]


def _met(adapters: jax.Array, owners: Sequence[jax.Array]) -> jax.Array:
    """[tiles] whether a token of the tile, adapters [tiles, size], may have one of `owners`."""
    low = functools.reduce(jnp.minimum, [jnp.where(o < 0, np.iinfo(np.int32).max, o).min() for o in owners])
    high = functools.reduce(jnp.maximum, [o.max() for o in owners])
    return ((adapters >= low) & (adapters <= high)).any(1)


def _tile(pool, first_row, active: ActiveBlocks, unit: UnitLayout, tile: int, i) -> _Part:
    """The i-th tile of a projection's blocks."""
    entry = active.start + i * tile + jnp.arange(tile, dtype=jnp.int32)
    at = jnp.minimum(entry, active.blocks.shape[0] - 1)
    owner = jnp.where(entry < active.stop, active.owners[at], -2)  # -2 is no token's adapter
    size = unit.slots * pool.shape[2] * pool.shape[3]
    rows = pool[first_row + active.blocks[at]].reshape(tile, -1)
    cells = rows[:, : unit.per_block * size].reshape(tile * unit.per_block, size)
    owners = jnp.repeat(owner, unit.per_block, total_repeat_length=tile * unit.per_block)
    return cells[:, : unit.a], cells[:, unit.b_start : unit.b_start + unit.b], owners


def block_rows(ids: jax.Array, layers: int, blocks: int) -> jax.Array:
    """[n] block ids -> [n * L] pool rows, block-major. Ids outside [0, P) give rows outside the pool."""
    rows = ids[:, None] + jnp.arange(layers, dtype=jnp.int32) * blocks
    inside = (ids >= 0) & (ids < blocks)
    return jnp.where(inside[:, None], rows, layers * blocks).reshape(-1)


def write_blocks(pool: jax.Array, ids: jax.Array, data: jax.Array) -> jax.Array:
    """See `ops.WriteBlocks`."""
    n, layers = data.shape[:2]
    rows = block_rows(ids, layers, pool.shape[0] // layers)
    return pool.at[rows].set(data.reshape(n * layers, *data.shape[2:]), mode="drop")


def read_blocks(pool: jax.Array, ids: jax.Array, layers: int) -> jax.Array:
    """See `ops.ReadBlocks`."""
    rows = block_rows(ids, layers, pool.shape[0] // layers)
    return pool[rows].reshape(ids.shape[0], layers, *pool.shape[1:])


def write_layers(pool: jax.Array, ids: jax.Array, data: jax.Array, first: jax.Array, layers: int) -> jax.Array:
    """See `ops.WriteLayers`."""
    n, count = data.shape[:2]
    blocks = pool.shape[0] // layers
    rows = ids[:, None] + (first + jnp.arange(count, dtype=jnp.int32)) * blocks
    inside = (ids >= 0) & (ids < blocks)
    rows = jnp.where(inside[:, None], rows, pool.shape[0]).reshape(-1)
    return pool.at[rows].set(data.reshape(n * count, *data.shape[2:]), mode="drop")


def _token_tile(tokens: int) -> int:
    """Few where each row may have an adapter of its own, more where a row is a chunk of a prompt."""
    return 16 if tokens <= 128 else 128


def _units(tokens: int) -> int:
    """Few for few tokens, which have few adapters: a small one pays for few units that are not its own.

    Measured in docs/notes/cpu-speed.md.
    """
    return 20 if tokens <= 16 else TILE_UNITS


XLA = Ops(attention, lora, write_kv, write_blocks, write_layers, read_blocks)
CPU = replace(XLA, lora=functools.partial(lora, token_tile=_token_tile, units=_units))
