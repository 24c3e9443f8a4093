"""The jitted programs that merge an adapter into the base's weights, and take it out again bit by bit.

The delta of a projection is d = Aᵀ B in float32. A merge writes W' = round(W + d), in place, and an
unmerge Ŵ = round(W' - d). Rounding loses some entries, Ŵ != W. So a merge also computes Ŵ, and returns
the lost entries: where they are, and their bits. An unmerge puts them back. A digest of the bits of W,
taken before, proves it.

Every program works on one projection of one layer, so that it needs little memory beside the weights,
and a switch can stop between any two of them. Every array is one shard's under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jlora.model import sharding
from jlora.model.llama import Joints, Params, Run, Shard, dense_attend, embed, over_layers, rms_norm
from jlora.model.spec import PROJECTIONS, ROW_PARALLEL, ModelSpec

RANKS = 32  # ranks that one call of `accumulate` adds; A and B are padded to whole calls
PART = 1 << 23  # entries that a merge works on at once
MOST_LOST = 4  # at most one entry in so many may be lost; with more, an adapter is not merged
CHUNKS = (1 << 18, 1 << 15, 1 << 12)  # lost entries that one call of `take` or `patch` moves
SHARDS = PartitionSpec("tp")
_BITS = {"float32": jnp.uint32, "bfloat16": jnp.uint16}
_FORMAT = {"float32": (8, 23), "bfloat16": (8, 7)}  # bits of exponent and mantissa


class MergePrograms(NamedTuple):
    """The programs of one projection; `w` is its weight, or all layers' stacked weights, and `layer` an index.

    zeros() -> d                        a delta of zeros [in, out]
    accumulate(d, a [R, in], b [R, out]) -> d
    merge(w, layer, d) -> w, at, bits, count      entries that an unmerge would lose; `at` ascends
    unmerge(w, layer, d) -> w
    take[size](at, bits, first) -> at, bits       so many of them from `first` on; the largest size comes first
    patch(w, layer, at, bits) -> w                of one of these sizes; places outside of w are no entries
    digest(w, layer) -> uint32
    lost(w, layer, d) -> entries that a merge would lose, over those that it may

    most: entries that the lists have room for, on each shard
    """

    zeros: Wrapped
    accumulate: Wrapped
    merge: Wrapped
    unmerge: Wrapped
    take: Mapping[int, Wrapped]
    patch: Wrapped
    digest: Wrapped
    lost: Wrapped
    most: int


class ProbePrograms(NamedTuple):
    """The programs that measure what merging loses (see `_probe`).

    begin(embed, tokens [T]) -> three times x [T, D]
    layer(layers, index, factors, xs) -> xs
        factors: A [R, in] and B [R, out] of every projection, and how many times `RANKS` of them are no padding
    errors(head, norm, xs) -> squared errors of the logits of the unmerged and the merged path
        head: the embeddings, if the model ties them to it
    """

    begin: Wrapped
    layer: Wrapped
    errors: Wrapped


def chunks(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First entry and size of the chunks that move so many entries, from the largest size to the smallest.

    The last one may be padded, by up to three quarters: a call on a TPU copies a layer's weight, however few there are.
    """
    first = 0
    for size in sizes:
        while count - first > (size // 4 if size > sizes[-1] else 0):
            yield first, size
            first += size


def weight_spec(name: str) -> PartitionSpec:
    """How a projection's weight [in, out] is split."""
    return PartitionSpec("tp", None) if name in ROW_PARALLEL else PartitionSpec(None, "tp")


def factor_specs(name: str) -> tuple[PartitionSpec, PartitionSpec]:
    """How A [R, in] and B [R, out] of a projection are split: one of them is whole on every shard."""
    split = PartitionSpec(None, "tp")
    return (split, PartitionSpec()) if name in ROW_PARALLEL else (PartitionSpec(), split)


def build(spec: ModelSpec, mesh: Mesh, stacked: bool) -> dict[str, MergePrograms]:
    """The programs of every projection. `stacked`: the layers are one stacked tree."""
    found: dict[tuple, MergePrograms] = {}  # projections of equal shapes share them
    kinds = {name: (spec.projection_shapes[name], name in ROW_PARALLEL) for name in PROJECTIONS}
    for name, kind in kinds.items():
        if kind not in found:
            found[kind] = _of_projection(spec, mesh, stacked, name)
    return {name: found[kind] for name, kind in kinds.items()}


def _of_projection(spec: ModelSpec, mesh: Mesh, stacked: bool, name: str) -> MergePrograms:
    on_mesh = partial(_on_mesh, mesh)
    two = weight_spec(name)
    w = PartitionSpec(None, *two) if stacked else two
    one, rep, tp = SHARDS, sharding.REPLICATED, mesh.shape["tp"]
    rows, columns = spec.projection_shapes[name]
    rows, columns = (rows // tp, columns) if name in ROW_PARALLEL else (rows, columns // tp)
    most = rows * columns // MOST_LOST
    sizes = [size for size in CHUNKS if size <= most] or CHUNKS[-1:]
    room = -(-most // sizes[0]) * sizes[0]  # whole chunks
    place = _Place(stacked, spec.dtype, room)
    return MergePrograms(
        on_mesh(lambda: jnp.zeros((rows, columns), jnp.float32), (), two),
        on_mesh(_accumulate, (two, *factor_specs(name)), two, donate=0),
        on_mesh(partial(_merge, place), (w, rep, two), (w, one, one, one), donate=0),
        on_mesh(partial(_unmerge, place), (w, rep, two), w, donate=0),
        {size: on_mesh(partial(_take, size), (one, one, rep), (one, one)) for size in sizes},
        on_mesh(partial(_patch, place), (w, rep, one, one), w, donate=0),
        on_mesh(partial(_digest, place), (w, rep), rep),
        on_mesh(partial(_lost_share, place), (w, rep, two), rep),
        room,
    )


def build_probe(spec: ModelSpec, mesh: Mesh, stacked: bool) -> ProbePrograms:
    """The programs that measure an adapter's loss."""
    on_mesh = partial(_on_mesh, mesh)
    specs = sharding.param_specs(spec)
    layers = sharding.stacked_specs(specs)["layers"] if stacked else specs["layers"][0]
    rep, shard = sharding.REPLICATED, Shard("tp", mesh.shape["tp"])
    factors, three = {name: (*factor_specs(name), rep) for name in PROJECTIONS}, (rep, rep, rep)
    return ProbePrograms(
        on_mesh(lambda table, tokens: _begin(table, tokens, shard), (specs["embed"], rep), three),
        on_mesh(partial(_probe, _Probed(spec, shard, stacked)), (layers, rep, factors, three), three),
        on_mesh(partial(_errors, spec, shard), (specs["embed" if spec.tied else "head"], rep, three), (rep, rep)),
    )


def _on_mesh(mesh: Mesh, f: Callable, inputs: tuple, outputs: Any, donate: int | None = None) -> Wrapped:
    mapped = jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), outputs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return jax.jit(mapped, donate_argnums=() if donate is None else (donate,), out_shardings=shardings)


class _Place(NamedTuple):
    """Where a weight lies, its dtype, and how many lost entries a merge has room for."""

    stacked: bool
    dtype: str
    most: int

    def take(self, w: jax.Array, layer: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(w, layer, keepdims=False) if self.stacked else w

    def put(self, w: jax.Array, layer: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(w, new, layer, 0) if self.stacked else new

    def take_rows(self, w: jax.Array, layer: jax.Array, first: jax.Array, count: int) -> jax.Array:
        if not self.stacked:
            return lax.dynamic_slice_in_dim(w, first, count)
        return lax.dynamic_slice(w, (layer, first, 0), (1, count, w.shape[2]))[0]

    def put_rows(self, w: jax.Array, layer: jax.Array, first: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(w, new[None] if self.stacked else new, (layer, first, 0)[not self.stacked :])


def _accumulate(delta: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    product = lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)
    return delta + product


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """A float32 x as the nearest numbers of a dtype. XLA may drop a pair of conversions, and keeps this."""
    return lax.reduce_precision(x, *_FORMAT[dtype])


def bits(x: jax.Array) -> jax.Array:
    """The bits of floating-point numbers."""
    return lax.bitcast_convert_type(x, _BITS[str(x.dtype)])


def _lost(w: jax.Array, delta: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """W', and which entries an unmerge would not restore; both [in, out]."""
    merged = rounded(w.astype(jnp.float32) + delta, dtype)
    # Behind a barrier, or XLA might cancel the two sums.
    back = rounded(lax.optimization_barrier(merged) - delta, dtype)
    return merged.astype(dtype), bits(back.astype(dtype)) != bits(w)


def _parts(shape: tuple[int, ...], axis: int) -> int:
    """How many equal parts of one axis an array is worked on in."""
    return next(n for n in range(-(-prod(shape) // PART), shape[axis] + 1) if shape[axis] % n == 0)


def _merge(place: _Place, w: jax.Array, layer: jax.Array, delta: jax.Array):
    """In parts of some rows: what lists the lost entries takes 16 bytes an entry."""
    rows, parts = len(delta), _parts(delta.shape, 0)
    size = delta.size // parts

    def one(part: jax.Array, found: tuple) -> tuple:
        w, at, kept, count = found
        where = layer, part * (rows // parts)
        old = place.take_rows(w, *where, rows // parts)
        w, old = lax.optimization_barrier((w, old))  # all that is read later is this copy; else XLA copies all of w
        new, lost = _lost(old, lax.dynamic_slice_in_dim(delta, where[1], rows // parts), place.dtype)
        flat = lost.reshape(-1)
        turn = jnp.where(flat, count + jnp.cumsum(flat, dtype=jnp.int32) - 1, place.most)
        at = at.at[turn].set(part * size + jnp.arange(size, dtype=jnp.int32), mode="drop")
        kept = kept.at[turn].set(bits(old).reshape(-1), mode="drop")
        return place.put_rows(w, *where, new), at, kept, count + flat.sum(dtype=jnp.int32)

    nothing = jnp.full(place.most, delta.size, jnp.int32), jnp.zeros(place.most, _BITS[place.dtype])
    w, at, kept, count = lax.fori_loop(0, parts, one, (w, *nothing, jnp.int32(0)))
    return w, at, kept, count[None]


def _unmerge(place: _Place, w: jax.Array, layer: jax.Array, delta: jax.Array) -> jax.Array:
    old = place.take(w, layer).astype(jnp.float32)
    return place.put(w, layer, rounded(old - delta, place.dtype).astype(place.dtype))


def _take(size: int, at: jax.Array, kept: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Only what was lost goes over the link: the lists have room for far more."""
    return lax.dynamic_slice_in_dim(at, first, size), lax.dynamic_slice_in_dim(kept, first, size)


def _patch(place: _Place, w: jax.Array, layer: jax.Array, at: jax.Array, kept: jax.Array) -> jax.Array:
    values = lax.bitcast_convert_type(kept, w.dtype)
    # A scatter into a stack of layers copies all of them on a TPU: it goes into a copy of the layer.
    old = place.take(w, layer)
    return place.put(w, layer, old.reshape(-1).at[at].set(values, mode="drop").reshape(old.shape))


def _digest(place: _Place, w: jax.Array, layer: jax.Array) -> jax.Array:
    """The sum of every entry's bits mixed with its position: the same in any order of summation."""
    found = bits(place.take(w, layer)).astype(jnp.uint32).reshape(-1)
    at = lax.iota(jnp.uint32, found.size)
    mixed = found ^ (at * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    own = (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)
    return lax.psum(own * (2 * lax.axis_index("tp").astype(jnp.uint32) + 1), "tp")


# -- what merging loses ---------------------------------------------------------------------------


def _lost_share(place: _Place, w: jax.Array, layer: jax.Array, delta: jax.Array) -> jax.Array:
    """Of the shard that loses most: above 1, its list has no room for them."""
    parts = _parts(delta.shape, 0)
    rows = len(delta) // parts

    def one(part: jax.Array, count: jax.Array) -> jax.Array:
        old = place.take_rows(w, layer, part * rows, rows)
        return count + _lost(old, lax.dynamic_slice_in_dim(delta, part * rows, rows), place.dtype)[1].sum()

    return lax.pmax(lax.fori_loop(0, parts, one, jnp.int32(0)) * jnp.float32(MOST_LOST) / delta.size, "tp")


def exactly(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, in] in float32 times w, as if w was float32: a copy of it in float32 would take too much memory."""
    if w.dtype == jnp.float32:
        return jnp.matmul(x, w, precision="highest")
    parts, rest = [], x
    for _ in range(3):  # numbers of 8 bits that add up to the 24 of a float32
        parts.append(rounded(rest, str(w.dtype)))
        rest = rest - parts[-1]
    products = jnp.matmul(jnp.concatenate(parts).astype(w.dtype), w, preferred_element_type=jnp.float32)
    return products.reshape(3, len(x), -1).sum(0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Exact:
    """A weight that multiplies in float32."""

    w: jax.Array

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return exactly(x, self.w)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beside:
    """A weight with an adapter beside it: x @ this is x W + (x Aᵀ) B."""

    w: Any
    a: Any  # [in, R]
    b: Any

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.w + (x @ self.a) @ self.b


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Into:
    """A weight that an adapter is merged into: x [T, in] @ this is x round(W + Aᵀ B), some columns at a time."""

    w: jax.Array  # [in, out]
    a: jax.Array  # [R, in]
    b: jax.Array  # [R, out]
    tiles: jax.Array  # how many times `RANKS` are no padding

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        parts = _parts(self.w.shape, 1)
        size = self.w.shape[1] // parts

        def one(part: jax.Array) -> jax.Array:
            w = lax.dynamic_slice_in_dim(self.w, part * size, size, axis=1)

            def add(tile: jax.Array, delta: jax.Array) -> jax.Array:
                a = lax.dynamic_slice_in_dim(self.a, tile * RANKS, RANKS)
                return _accumulate(delta, a, lax.dynamic_slice(self.b, (tile * RANKS, part * size), (RANKS, size)))

            delta = lax.fori_loop(0, self.tiles, add, jnp.zeros(w.shape, jnp.float32))
            return x @ rounded(w.astype(jnp.float32) + delta, str(w.dtype)).astype(w.dtype)

        return lax.map(one, jnp.arange(parts)).swapaxes(0, 1).reshape(len(x), -1)


def _begin(table: jax.Array, tokens: jax.Array, shard: Shard):
    x = embed({"embed": table}, tokens, shard)
    return x.astype(jnp.float32), x, x


class _Probed(NamedTuple):
    spec: ModelSpec
    shard: Shard
    stacked: bool


def _probe(model: _Probed, layers: Params, index: jax.Array, factors: Mapping, xs: tuple):
    """One layer three times over one short prompt: exact (float32), unmerged, merged."""
    spec, shard, stacked = model
    w = {name: lax.dynamic_index_in_dim(v, index, keepdims=False) if stacked else v for name, v in layers.items()}
    positions = jnp.arange(xs[0].shape[0], dtype=jnp.int32)
    joints = Joints(dense_attend(1), shard=shard)
    beside = {name: _Beside(w[name], a.T, b) for name, (a, b, _) in factors.items()}
    merged = {name: _Into(w[name], *found) for name, found in factors.items()}
    exact = {name: v.astype(jnp.float32) for name, v in w.items() if name not in beside}
    exact |= {name: _Beside(*map(_Exact, (pair.w, pair.a, pair.b))) for name, pair in beside.items()}
    out = []
    for x, weights in zip(xs, (exact, {**w, **beside}, {**w, **merged}), strict=True):
        # For the attention of the exact path; TPUs multiply numbers of type float32 less exactly.
        with jax.default_matmul_precision("highest" if weights is exact else "default"):
            out.append(over_layers(spec, Run([weights], index, 1), positions, (None, x), joints)[1])
    return tuple(out)


def _errors(spec: ModelSpec, shard: Shard, head: jax.Array, norm: jax.Array, xs: tuple):
    head = head.T if spec.tied else head
    found = []
    for x, weight in zip(xs, (_Exact(head), head, head), strict=True):
        hidden = rms_norm(x, norm.astype(x.dtype), spec.norm_eps)
        found.append(shard.psum((shard.slice(hidden) @ weight).astype(jnp.float32)))
    exact, *others = found
    return tuple(jnp.sum((logits - exact) ** 2) for logits in others)
