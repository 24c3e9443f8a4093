"""The jitted programs of one step: a forward over the pool, then sampling.

They are two programs, not one, so that compiled shapes add up instead of multiplying: the
forward is shaped by (sequences, chunk), sampling by the number of rows alone. Contexts, pages
and adapters have dynamic trip counts inside and are no shape at all.

Every program takes the pool or the slot state donated and gives it back updated in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jlora.layout import PoolLayout
from jlora.model import sampling, sharding
from jlora.model.llama import Joints, Params, forward, logits
from jlora.model.sampling import SampleBatch, Sampled, SlotState
from jlora.model.spec import PROJECTIONS, ROW_PARALLEL, ModelSpec
from jlora.pallas.reference import ActiveBlocks, Adapted, Pages, attention, lora, write_blocks, write_kv

# A field of a batch: numpy where the host makes it, jax.Array inside the program.
Array = Any


class Batch(NamedTuple):
    """One launch: S sequences with C tokens each, padded. All int32; T = S * C.

    Attributes:
        tokens: [S, C] token ids.
        source: [S] slot whose last sampled token is the input, -1 to use `tokens` (C = 1 only).
        starts, lengths: [S] position of the first token; context length after this chunk.
        write_rows, write_slots: [T] block id (outside the pool: padding) and slot for the new KV.
        table: [S, W] block ids of each sequence's context.
        adapters: [S] adapter index of the sequence in this launch, -1 for the base.
        blocks, owners: [M] active adapter blocks and the index they belong to, one projection
            after the other; projection i's are entries offsets[i] .. offsets[i + 1] - 1.
        offsets: [8].
        last: [R] index into T of the rows to sample from.
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


class Programs(NamedTuple):
    """The jitted programs; see `build` for each one's signature."""

    forward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    sample: Callable[..., tuple[SlotState, Sampled]]
    score: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    reset_slot: Callable[..., SlotState]
    write_blocks: Callable[..., jax.Array]


def build(spec: ModelSpec, layout: PoolLayout, mesh: Mesh, stacked: bool) -> Programs:
    """Programs for one model, pool and mesh.

    forward(params, pool, last, batch) -> pool, rows [R, D], hidden [T, D]
    sample(params, rows [S, D], state, sample_batch) -> state, Sampled
    score(params, hidden [T, D], targets [T]) -> logprob [T], top ids [T, 20], top logprobs [T, 20]
    reset_slot(state, slot, prompt, output, (bias ids, bias values)) -> state
    write_blocks(pool, ids [n], data [n, L, B, 2K, H]) -> pool
    """
    weights = sharding.param_specs(spec)
    weights = sharding.stacked_specs(weights) if stacked else weights
    pool, rep = sharding.POOL, sharding.REPLICATED

    def on_mesh(f: Callable, inputs: tuple, outputs: PartitionSpec | tuple, donate: int | None = None) -> Callable:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        # Stated, so that an output has the very sharding of the input it replaces: one cache entry.
        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), outputs, is_leaf=_is_spec)
        return jax.jit(mapped, donate_argnums=() if donate is None else (donate,), out_shardings=shardings)

    shard = sharding.shard_of(mesh)
    return Programs(
        on_mesh(partial(_forward, spec, layout, shard), (weights, pool, rep, rep), (pool, rep, rep), donate=1),
        on_mesh(partial(_sample, spec, shard), (weights, rep, rep, rep), (rep, rep), donate=2),
        on_mesh(partial(_score, spec, shard), (weights, rep, rep), rep),
        on_mesh(sampling.reset_slot, (rep, rep, rep, rep, rep), rep, donate=0),
        on_mesh(write_blocks, (pool, rep, sharding.BLOCKS), pool, donate=0),
    )


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _forward(spec: ModelSpec, layout: PoolLayout, shard, params: Params, pool: jax.Array, last: jax.Array, b: Batch):
    rows, chunk = b.tokens.shape
    tokens = b.tokens
    if chunk == 1:
        tokens = jnp.where(b.source[:, None] >= 0, last[jnp.maximum(b.source, 0)][:, None], tokens)
    positions = (b.starts[:, None] + jnp.arange(chunk, dtype=jnp.int32)).reshape(-1)
    adapters = jnp.repeat(b.adapters, chunk, total_repeat_length=rows * chunk)
    inside = (b.write_rows >= 0) & (b.write_rows < layout.blocks)
    outside = pool.shape[0] + jnp.arange(rows * chunk, dtype=jnp.int32)  # distinct: indices stay unique
    pages = Pages(b.table, b.lengths, b.starts)

    def attend(pool, layer, q, k, v):
        first = layer * layout.blocks
        pool, q, k, v = jax.lax.optimization_barrier((pool, q, k, v))  # the adapters' reads come before
        pool = write_kv(pool, jnp.where(inside, b.write_rows + first, outside), b.write_slots, k, v)
        pool, q = jax.lax.optimization_barrier((pool, q))  # reads come after this write
        out = attention(q.reshape(rows, chunk, *q.shape[1:]), pool, first, pages)
        return pool, out.reshape(rows * chunk, *q.shape[1:])

    def adapt(pool, layer, x, products):
        at = {name: PROJECTIONS.index(name) for name in products}
        active = {name: ActiveBlocks(b.blocks, b.owners, b.offsets[i], b.offsets[i + 1]) for name, i in at.items()}
        projections = [Adapted(y, active[name], layout.units[name]) for name, y in products.items()]
        x = x if all(name in ROW_PARALLEL for name in products) else shard.slice(x)
        return dict(zip(products, lora(x, pool, layer * layout.blocks, projections, adapters, shard.psum), strict=True))

    joints = Joints(attend, adapt, shard)
    pool, hidden = forward(spec, params, tokens.reshape(-1), positions, pool, joints)
    return pool, hidden[b.last], hidden


def _sample(spec: ModelSpec, shard, params: Params, rows: jax.Array, state: SlotState, batch: SampleBatch):
    return sampling.sample(logits(spec, params, rows, shard), state, batch)


def _score(spec: ModelSpec, shard, params: Params, hidden: jax.Array, targets: jax.Array):
    return sampling.report(logits(spec, params, hidden, shard), targets)
