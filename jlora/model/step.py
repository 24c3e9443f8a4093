"""The jitted programs of one step: a forward pass over the pool, then sampling.

They are two programs, so that compiled shapes add up instead of multiplying. A launch whose adapter
or prefix is still arriving runs in groups of layers (`embed`, `layers` once per group, `finish`). Where
the host computes an adapter's part, a group runs layer by layer, in parts (`cut`).

Every program updates the donated pool or slot state in place and returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jlora.layout import PoolLayout
from jlora.model import sampling, sharding
from jlora.model.cut import CutLayer, Cutter
from jlora.model.llama import Joints, Params, Run, Shard, embed, forward, logits, no_adapters, over_layers, rms_norm
from jlora.model.sampling import Array, SampleBatch, SlotState
from jlora.model.spec import PROJECTIONS, ROW_PARALLEL, ModelSpec
from jlora.pallas.ops import GROUPS, ActiveBlocks, Adapted, Ops, Pages
from jlora.pallas.reference import XLA


class Batch(NamedTuple):
    """One launch: S sequences with C tokens each, padded. All int32; T = S * C.

    Attributes:
        tokens: [S, C] token ids.
        source: [S] slot whose last sampled token is the input, -1 to use `tokens` (C = 1 only).
        starts, lengths: [S] position of the first token; context length after this chunk.
        write_rows, write_slots: [T] block id and slot for the new KV; a block id outside the pool is padding.
        table: [S, W] block ids of each sequence's context.
        adapters: [T] adapter index of each token, -1 for the base and before an activated LoRA's invocation.
        blocks, owners: [M] active adapter blocks and the adapter index of each, ordered by projection.
            Projection i has the entries offsets[i] .. offsets[i + 1] - 1. M = 0 selects a program
            without a LoRA op.
        offsets: [8].
        last: [R] indices into T of the rows to sample from.
        merged: the first so many pieces of the weights have the launch's only adapter merged into them:
            there, no adapter acts. A piece is a layer's projections of one of `jlora.pallas.ops.GROUPS`.
    """

    tokens: Array
    source: Array
    starts: Array
    lengths: Array
    write_rows: Array
    write_slots: Array
    table: Array
    adapters: Array
    blocks: Array
    owners: Array
    offsets: Array
    last: Array
    merged: Array


class Programs(NamedTuple):
    """The jitted programs; see `build` for each one's signature."""

    forward: Wrapped
    sample: Wrapped
    score: Wrapped
    reset_slot: Wrapped
    write_blocks: Wrapped
    read_blocks: Wrapped
    embed: Wrapped
    layers: Wrapped
    finish: Wrapped
    write_layers: Wrapped
    cut: CutLayer


def layer_groups(layers: int) -> int:
    """Number of equal groups of layers in a streamed launch: the largest divisor of `layers` up to 4."""
    return max(groups for groups in range(1, 5) if layers % groups == 0)


def group_layers(params: Params, group: int, size: int) -> Any:
    """A group's weights for `Programs.layers`: its part of a list, or the whole stacked tree."""
    layers = params["layers"]
    return layers[group * size : (group + 1) * size] if isinstance(layers, list) else layers


def build(spec: ModelSpec, layout: PoolLayout, mesh: Mesh, stacked: bool, ops: Ops = XLA) -> Programs:
    """Programs for one model, pool and mesh from `ops` (see `jlora.pallas.dispatch`).

    forward(params, pool, last, batch) -> pool, rows [R, D], hidden [T, D]
    sample(params, rows [S, D], state, sample_batch) -> state, Sampled
    score(params, hidden [T, D], targets [T]) -> logprob [T], top ids [T, 20], top logprobs [T, 20]
    reset_slot(state, slot, prompt, output, (bias ids, bias values)) -> state
    write_blocks(pool, ids [n], data [n, L, B, 2K, H]) -> pool
    read_blocks(pool, ids [n]) -> data [n, L, B, 2K, H]
    embed(params["embed"], last, batch) -> x [T, D]
    layers(group's weights, pool, x, first layer, batch) -> pool, x
    finish(params["norm"], x, batch) -> rows [R, D], hidden [T, D]
    write_layers(pool, ids [n], data [n, L / groups, B, 2K, H], first layer) -> pool
    cut: see `CutLayer`
    """
    weights = sharding.param_specs(spec)
    weights = sharding.stacked_specs(weights) if stacked else weights
    pool, rep = sharding.POOL, sharding.REPLICATED
    size = spec.layers // layer_groups(spec.layers)
    group = weights["layers"] if stacked else weights["layers"][:size]

    def on_mesh(f: Callable, inputs: tuple, outputs: PartitionSpec | tuple, donate: int | None = None) -> Wrapped:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        # Stated, so that an output has the sharding of the input that it replaces: jit then has one cache entry.
        shardings = jax.tree.map(
            lambda s: NamedSharding(mesh, s), outputs, is_leaf=lambda s: isinstance(s, PartitionSpec)
        )
        return jax.jit(mapped, donate_argnums=() if donate is None else (donate,), out_shardings=shardings)

    place = _Place(layout, Shard("tp", mesh.shape["tp"]), ops)
    return Programs(
        on_mesh(partial(_forward, spec, place), (weights, pool, rep, rep), (pool, rep, rep), donate=1),
        on_mesh(partial(_sample, spec, place.shard), (weights, rep, rep, rep), (rep, rep), donate=2),
        on_mesh(partial(_score, spec, place.shard), (weights, rep, rep), rep),
        on_mesh(sampling.reset_slot, (rep, rep, rep, rep, rep), rep, donate=0),
        on_mesh(ops.write_blocks, (pool, rep, sharding.BLOCKS), pool, donate=0),
        on_mesh(partial(ops.read_blocks, layers=spec.layers), (pool, rep), sharding.BLOCKS),
        on_mesh(partial(_embed, place.shard), (weights["embed"], rep, rep), rep),
        on_mesh(partial(_layers, spec, place), (group, pool, rep, rep, rep), (pool, rep), donate=1),
        on_mesh(partial(_finish, spec), (rep, rep, rep), (rep, rep)),
        on_mesh(partial(ops.write_layers, layers=spec.layers), (pool, rep, sharding.BLOCKS, rep), pool, donate=0),
        Cutter(spec, place.shard, partial(_attending, place), stacked).build(on_mesh, weights, pool),
    )


class _Place(NamedTuple):
    layout: PoolLayout
    shard: Shard
    ops: Ops


def _forward(spec: ModelSpec, place: _Place, params: Params, pool: jax.Array, last: jax.Array, b: Batch):
    joints = _joints(place, pool.shape[0], b)
    pool, hidden = forward(spec, params, _tokens(last, b), _positions(b), pool, joints)
    return pool, hidden[b.last], hidden


def _embed(shard, table: jax.Array, last: jax.Array, b: Batch):
    return embed({"embed": table}, _tokens(last, b), shard)


def _layers(spec: ModelSpec, place: _Place, group, pool: jax.Array, x: jax.Array, first: jax.Array, b: Batch):
    run = Run(group, first, spec.layers // layer_groups(spec.layers))
    return over_layers(spec, run, _positions(b), (pool, x), _joints(place, pool.shape[0], b))


def _finish(spec: ModelSpec, norm: jax.Array, x: jax.Array, b: Batch):
    hidden = rms_norm(x, norm, spec.norm_eps)
    return hidden[b.last], hidden


def _tokens(last: jax.Array, b: Batch) -> jax.Array:
    """[T] input ids. A decoding row's last token may be on the device only."""
    tokens = b.tokens
    if tokens.shape[1] == 1:
        tokens = jnp.where(b.source[:, None] >= 0, last[jnp.maximum(b.source, 0)][:, None], tokens)
    return tokens.reshape(-1)


def _positions(b: Batch) -> jax.Array:
    return (b.starts[:, None] + jnp.arange(b.tokens.shape[1], dtype=jnp.int32)).reshape(-1)


def _attending(place: _Place, pool: jax.Array, b: Batch) -> tuple[jax.Array, Joints]:
    return _positions(b), _joints(place, pool.shape[0], b)


def _joints(place: _Place, pool_rows: int, b: Batch) -> Joints:
    """Attention over the launch's pages, and adapters from its active blocks."""
    layout, shard, ops = place
    rows, chunk = b.tokens.shape
    inside = (b.write_rows >= 0) & (b.write_rows < layout.blocks)
    outside = pool_rows + jnp.arange(rows * chunk, dtype=jnp.int32)  # distinct, because write_kv needs unique rows
    pages = Pages(b.table, b.lengths, b.starts)

    def attend(pool, layer, q, k, v):
        first = layer * layout.blocks
        # These barriers order the pool's reads and writes; otherwise XLA copies the pool.
        pool, q, k, v = jax.lax.optimization_barrier((pool, q, k, v))  # the adapters' reads come first
        pool = ops.write_kv(pool, jnp.where(inside, b.write_rows + first, outside), b.write_slots, k, v)
        pool, q = jax.lax.optimization_barrier((pool, q))  # attention reads after this write
        out = ops.attention(q.reshape(rows, chunk, *q.shape[1:]), pool, first, pages)
        return pool, out.reshape(rows * chunk, *q.shape[1:])

    def adapt(pool, layer, x, products):
        at = {name: PROJECTIONS.index(name) for name in products}
        active = {name: ActiveBlocks(b.blocks, b.owners, b.offsets[i], b.offsets[i + 1]) for name, i in at.items()}
        projections = [Adapted(y, active[name], layout.units[name]) for name, y in products.items()]
        x = x if all(name in ROW_PARALLEL for name in products) else shard.slice(x)
        psum = shard.psum if shard.size > 1 else None
        piece = layer * len(GROUPS) + GROUPS.index(tuple(products))
        adapters = jnp.where(piece < b.merged, -1, b.adapters)
        added = ops.lora(x, pool, layer * layout.blocks, projections, adapters, psum)
        return dict(zip(products, added, strict=True))

    return Joints(attend, adapt if b.blocks.shape[0] else no_adapters, shard)


def _sample(spec: ModelSpec, shard, params: Params, rows: jax.Array, state: SlotState, batch: SampleBatch):
    return sampling.sample(logits(spec, params, rows, shard), state, batch)


def _score(spec: ModelSpec, shard, params: Params, hidden: jax.Array, targets: jax.Array):
    return sampling.report(logits(spec, params, hidden, shard), targets)
