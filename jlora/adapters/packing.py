"""Packs an adapter, cut along its rank, into blocks of the pool (see `jlora.layout`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jlora.adapters.adapter import Adapter
from jlora.errors import InvalidArgument
from jlora.layout import PoolLayout, UnitLayout

# Of the packed form, which replicas of several releases send to each other: a change of `pack`, of the layout, or of
# which adapters are accepted raises it.
FORMAT = 1
NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class Packed:
    """An adapter as blocks on the host.

    Attributes:
        data: [n, L, B, 2K, H] in the pool's dtype. A block is contiguous, so one copy moves it.
        projections: the projection whose units each of the n blocks holds.
    """

    data: np.ndarray
    projections: tuple[str, ...]


def largest_ranks(ranks: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Projection -> its largest rank, of pairs (projection, rank)."""
    largest: dict[str, int] = {}
    for name, rank in ranks:
        largest[name] = max(largest.get(name, 0), rank)
    return largest


def blocks_of(ranks: Mapping[str, int], layout: PoolLayout) -> int:
    """Blocks of an adapter with these largest ranks of projections."""
    return sum(-(-rank // layout.units[name].per_block) for name, rank in ranks.items())


def pack(adapter: Adapter, layout: PoolLayout) -> Packed:
    """Puts every rank unit into its block. Raises InvalidArgument if a weight overflows the pool's dtype."""
    parts, projections = [], []
    for name, rank in largest_ranks((name, len(a)) for (_, name), (a, _) in adapter.weights.items()).items():
        unit = layout.units[name]
        count = -(-rank // unit.per_block)
        shards = [_pack_shard(adapter, layout, name, unit, count, shard) for shard in range(layout.tp)]
        parts.append(np.concatenate(shards, axis=3))
        projections += [name] * count
    data = np.concatenate(parts) if parts else np.zeros((0, *layout.block_shape), NUMPY_DTYPES[layout.dtype])
    if not all_finite(data):  # float32 reaches a little further than bfloat16
        raise InvalidArgument(f"weights: do not fit {layout.dtype}: a value is too large")
    return Packed(data, tuple(projections))


def all_finite(data: np.ndarray) -> bool:
    """Whether no value is infinite or NaN: with its bits as an integer, no other is as large as infinity.

    It copies nothing, where `np.isfinite` of bfloat16 converts every value.
    """
    bits = (np.dtype(f"{sign}{data.itemsize}") for sign in "iu")  # of all, the largest without a sign, and with one
    return all(
        data.view(kind).max(initial=0) < np.array(limit, data.dtype).view(kind)
        for kind, limit in zip(bits, (np.inf, -np.inf), strict=True)
    )


def _pack_shard(
    adapter: Adapter, layout: PoolLayout, name: str, unit: UnitLayout, count: int, shard: int
) -> np.ndarray:
    """One projection's `count` blocks on one shard: [count, L, B, 2K/tp, H]."""
    heads = 2 * layout.kv_heads // layout.tp
    slot = heads * layout.head_dim
    used = unit.per_block * unit.slots * slot
    flat = np.zeros((count, layout.layers, layout.block_tokens * slot), NUMPY_DTYPES[layout.dtype])
    for layer in range(layout.layers):
        pair = adapter.weights.get((layer, name))
        if pair is None:
            continue
        a, b = (w[:, shard * n : (shard + 1) * n] for w, n in zip(pair, (unit.a, unit.b), strict=True))
        for block in range(-(-len(a) // unit.per_block)):
            ranks = slice(block * unit.per_block, (block + 1) * unit.per_block)
            units = flat[block, layer, :used].reshape(unit.per_block, unit.slots * slot)[: len(a[ranks])]
            units[:, : unit.a] = a[ranks]
            units[:, unit.b_start : unit.b_start + unit.b] = b[ranks]
    return flat.reshape(count, layout.layers, layout.block_tokens, heads, layout.head_dim)


def unpack(data: np.ndarray, layout: PoolLayout, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """One projection's blocks of one layer, [n, B, 2K, H], as each shard's A [r, in] and B [r, out] in float32.

    r counts the blocks' units, also those without a rank, which are zero.
    """
    unit, count = layout.units[name], len(data)
    parts = data.reshape(count, layout.block_tokens, layout.tp, -1)
    factors = []
    for shard in range(layout.tp):
        flat = parts[:, :, shard].reshape(count, -1)
        size = unit.slots * flat.shape[1] // layout.block_tokens
        units = flat[:, : unit.per_block * size].reshape(-1, size).astype(np.float32, copy=False)
        factors.append((units[:, : unit.a], units[:, unit.b_start : unit.b_start + unit.b]))
    return factors
