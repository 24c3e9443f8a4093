"""The jitted programs of one step: a forward pass over the pool, then sampling.

They are two programs, so that compiled shapes add up instead of multiplying. A launch whose adapter
or prefix is still arriving runs in groups of layers (`embed`, `layers` once per group, `finish`). Where
the host computes an adapter's part, a group runs layer by layer, in parts (`cut`).

Every program updates the donated pool or slot state in place and returns it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jlora.layout import PoolLayout
from jlora.model import sampling, sharding
from jlora.model.cut import CutLayer, Cutter
from jlora.model.llama import Joints, Params, Run, Shard, embed, forward, logits, no_adapters, over_layers, rms_norm
from jlora.model.packed import Packed
from jlora.model.sampling import Array, Sampled, SlotState
from jlora.model.spec import PROJECTIONS, ROW_PARALLEL, ModelSpec
from jlora.pallas.ops import GROUPS, ActiveBlocks, Adapted, Ops, Pages
from jlora.pallas.reference import XLA


@functools.cache
def record_type(rows: int, chunk: int, width: int, reads: int) -> np.dtype:
    """What the host writes for a launch of S rows with C tokens each. All int32.

    tokens [S, C]: token ids. source [S]: slot whose last sampled token is the input, -1 to use `tokens` (C = 1 only).
    starts, counts [S]: position of the row's first token, and how many tokens it has; the others are padding.
    adapters, acting [S]: adapter index of the row, -1 for the base, and the first position on which it acts.
    table [S, W]: block ids of the row's context.
    last [R]: indices into the S * C tokens of the rows to sample from.
    offsets [8]: projection i has the entries offsets[i] .. offsets[i + 1] - 1 of `Batch.lists`.
    merged []: the first so many pieces of the weights have the launch's only adapter merged into them:
        there, no adapter acts. A piece is a layer's projections of one of `jlora.pallas.ops.GROUPS`.
    """
    fields: dict[str, tuple[int, ...]] = {"tokens": (rows, chunk), "table": (rows, width)}
    fields |= dict.fromkeys(("source", "starts", "counts", "adapters", "acting"), (rows,))
    fields |= {"last": (reads,), "offsets": (len(PROJECTIONS) + 1,), "merged": ()}
    return np.dtype([(name, np.int32, shape) for name, shape in fields.items()])


class Batch(NamedTuple):
    """One launch as the programs take it.

    Attributes:
        record: of `record_type`.
        lists: [2, M] int32, active adapter blocks and the adapter index of each, ordered by projection.
            They change seldom, so they stay on the device. M = 0 selects a program without a LoRA op.
    """

    record: Packed
    lists: Array

    def fields(self, block_tokens: int) -> Fields:
        """The arrays of the launch; `block_tokens`: tokens of a block of the pool."""
        f = self.record.fields()
        xp = f["tokens"].__array_namespace__()  # the host reads them too
        offsets = xp.arange(f["tokens"].shape[1], dtype=np.int32)
        positions = f["starts"][:, None] + offsets
        page = xp.minimum(positions // block_tokens, f["table"].shape[1] - 1)
        block = xp.take_along_axis(f["table"], page, axis=1)
        acts = positions >= f["acting"][:, None]
        return Fields(
            tokens=f["tokens"],
            source=f["source"],
            positions=positions.reshape(-1),
            starts=f["starts"],
            lengths=f["starts"] + f["counts"],
            write_rows=xp.where(offsets < f["counts"][:, None], block, -1).reshape(-1),
            write_slots=(positions % block_tokens).reshape(-1),
            table=f["table"],
            adapters=xp.where(acts, f["adapters"][:, None], -1).reshape(-1),
            blocks=self.lists[0],
            owners=self.lists[1],
            offsets=f["offsets"],
            last=f["last"],
            merged=f["merged"],
        )


class Fields(NamedTuple):
    """One launch: S sequences with C tokens each, padded; T = S * C. What is not said here, `record_type` says.

    Attributes:
        positions: [T].
        lengths: [S] context length after this chunk.
        write_rows, write_slots: [T] block id and slot for the new KV; -1 is padding.
        adapters: [T] adapter index of each token, -1 for the base and before an activated LoRA's invocation.
        blocks, owners: [M] the rows of `Batch.lists`.
    """

    tokens: Array
    source: Array
    positions: Array
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


for kind in (SlotState, Sampled):  # what programs return, so that they can be kept as StableHLO
    export.register_namedtuple_serialization(kind, serialized_name=f"jlora.{kind.__name__}")


class Programs(NamedTuple):
    """The jitted programs; see `build` for each one's signature."""

    forward: Wrapped
    sample: Wrapped
    greedy: Wrapped | None
    drawn: Wrapped | None
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


def head_of(params: Params) -> Params:
    """What logits are computed with: a call looks at every array that it is given."""
    return {"head": params["head"]} if "head" in params else {"embed": params["embed"]}


# On a GPU, XLA records a program's kernels as CUDA graphs. A call whose arrays lie elsewhere than the last one's, as a
# step's often do, first updates the graph, which took longer than to launch its kernels one by one (H100, 64 rows).
LONG = ("forward", "layers")  # programs of many kernels
UNGRAPHED = {"xla_gpu_graph_min_graph_size": 1_000_000}  # kernels: more than any program has
# XLA counts a donated pool several times. Beside one that fills the memory it would compute small arrays again rather
# than keep them: 13 more kernels in a step of 2 layers of Llama 3 8B, 21 in one of 5. No temporaries are worth it.
KEEPING = {"xla_disable_hlo_passes": "rematerialization"}


def _as_it_is(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Making(NamedTuple):
    """How programs are made.

    Attributes:
        wrap: wraps a named function whose arguments are arrays, before it is jitted; see `Traced`.
        host_waits: at every branch of a program, as a GPU's does.
        adapted: projections that an adapter may act on.
    """

    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]] = _as_it_is
    host_waits: bool = False
    adapted: tuple[str, ...] = PROJECTIONS


PLAIN = Making()


def build(
    spec: ModelSpec, layout: PoolLayout, mesh: Mesh, stacked: bool, ops: Ops = XLA, making: Making = PLAIN
) -> Programs:
    """Programs for one model, pool and mesh from `ops` (see `jlora.pallas.dispatch`).

    forward(params, pool, last, batch) -> pool, rows [R, D], hidden [T, D]
    sample(head_of(params), rows [S, D], state, rows of `sampling.row_type`) -> state, Sampled
    greedy, drawn: the same without branches, of rows that need none (`Launch.draws`); None where branches cost nothing
    score(head_of(params), hidden [T, D], targets [T]) -> logprob [T], top ids [T, 20], top logprobs [T, 20]
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
    head = head_of(weights)
    group = weights["layers"] if stacked else weights["layers"][:size]

    def on_mesh(f: Callable, inputs: tuple, outputs: PartitionSpec | tuple, donate: int | None = None) -> Wrapped:
        body = _exactly(f) if spec.dtype == "float32" else f
        mapped = jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        # Stated, so that an output has the sharding of the input that it replaces: jit then has one cache entry.
        shardings = jax.tree.map(
            lambda s: NamedSharding(mesh, s), outputs, is_leaf=lambda s: isinstance(s, PartitionSpec)
        )
        donated = () if donate is None else (donate,)
        options = _on_gpu(_name(f)) if making.host_waits else None
        return jax.jit(
            making.wrap(_name(f), mapped), donate_argnums=donated, out_shardings=shardings, compiler_options=options
        )

    place = _Place(layout, Shard("tp", mesh.shape["tp"]), ops, making.adapted)

    def drawing(draw: Callable) -> Wrapped:
        return on_mesh(partial(draw, spec, place.shard), (head, rep, rep, rep), (rep, rep), donate=2)

    return Programs(
        on_mesh(partial(_forward, spec, place), (weights, pool, rep, rep), (pool, rep, rep), donate=1),
        drawing(_sample),
        drawing(_greedy) if making.host_waits else None,
        drawing(_drawn) if making.host_waits else None,
        on_mesh(partial(_score, spec, place.shard), (head, rep, rep), rep),
        on_mesh(sampling.reset_slot, (rep, rep, rep, rep, rep), rep, donate=0),
        on_mesh(ops.write_blocks, (pool, rep, sharding.BLOCKS), pool, donate=0),
        on_mesh(partial(ops.read_blocks, layers=spec.layers), (pool, rep), sharding.BLOCKS),
        on_mesh(partial(_embed, place), (weights["embed"], rep, rep), rep),
        on_mesh(partial(_layers, spec, place), (group, pool, rep, rep, rep), (pool, rep), donate=1),
        on_mesh(partial(_finish, spec, place), (rep, rep, rep), (rep, rep)),
        on_mesh(partial(ops.write_layers, layers=spec.layers), (pool, rep, sharding.BLOCKS, rep), pool, donate=0),
        Cutter(spec, place.shard, partial(_attending, place), stacked).build(on_mesh, weights, pool),
    )


def _exactly(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with products of float32 in float32: by default a GPU takes TF32 for them, and a TPU bfloat16."""

    def traced(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return f(*args)

    return traced


def _on_gpu(name: str) -> dict[str, Any]:
    """Options of XLA for a program."""
    return KEEPING | UNGRAPHED if name in LONG else KEEPING


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return function.__name__.strip("_")


class _Place(NamedTuple):
    layout: PoolLayout
    shard: Shard
    ops: Ops
    adapted: tuple[str, ...]

    def fields(self, batch: Batch) -> Fields:
        return batch.fields(self.layout.block_tokens)


def _forward(spec: ModelSpec, place: _Place, params: Params, pool: jax.Array, last: jax.Array, batch: Batch):
    b = place.fields(batch)
    joints = _joints(place, pool.shape[0], b)
    pool, hidden = forward(spec, params, _tokens(last, b), b.positions, pool, joints)
    return pool, hidden[b.last], hidden


def _embed(place: _Place, table: jax.Array, last: jax.Array, batch: Batch):
    return embed({"embed": table}, _tokens(last, place.fields(batch)), place.shard)


def _layers(spec: ModelSpec, place: _Place, group, pool: jax.Array, x: jax.Array, first: jax.Array, batch: Batch):
    b, run = place.fields(batch), Run(group, first, spec.layers // layer_groups(spec.layers))
    return over_layers(spec, run, b.positions, (pool, x), _joints(place, pool.shape[0], b))


def _finish(spec: ModelSpec, place: _Place, norm: jax.Array, x: jax.Array, batch: Batch):
    hidden = rms_norm(x, norm, spec.norm_eps)
    return hidden[place.fields(batch).last], hidden


def _tokens(last: jax.Array, b: Fields) -> jax.Array:
    """[T] input ids. A decoding row's last token may be on the device only."""
    tokens = b.tokens
    if tokens.shape[1] == 1:
        tokens = jnp.where(b.source[:, None] >= 0, last[jnp.maximum(b.source, 0)][:, None], tokens)
    return tokens.reshape(-1)


def _attending(place: _Place, pool: jax.Array, batch: Batch) -> tuple[jax.Array, Joints]:
    b = place.fields(batch)
    return b.positions, _joints(place, pool.shape[0], b)


def _joints(place: _Place, pool_rows: int, b: Fields) -> Joints:
    """Attention over the launch's pages, and adapters from its active blocks."""
    layout, shard, ops, adapted = place
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
        if set(adapted).isdisjoint(products):
            return products
        at = {name: PROJECTIONS.index(name) for name in products}
        active = {name: ActiveBlocks(b.blocks, b.owners, b.offsets[i], b.offsets[i + 1]) for name, i in at.items()}
        projections = [Adapted(y, active[name], layout.units[name]) for name, y in products.items()]
        x = x if all(name in ROW_PARALLEL for name in products) else shard.slice(x)
        psum = shard.psum if shard.size > 1 else None
        piece = layer * len(GROUPS) + GROUPS.index(tuple(products))
        added = ops.lora(x, pool, layer * layout.blocks, projections, b.adapters, psum, piece >= b.merged)
        return dict(zip(products, added, strict=True))

    return Joints(attend, adapt if b.blocks.shape[0] else no_adapters, shard)


def _sample(spec: ModelSpec, shard, params: Params, rows: jax.Array, state: SlotState, batch: Packed):
    return sampling.sample(logits(spec, params, rows, shard), state, sampling.SampleBatch.of(batch))


def _greedy(spec: ModelSpec, shard, params: Params, rows: jax.Array, state: SlotState, batch: Packed):
    return sampling.greedy(logits(spec, params, rows, shard), state, sampling.SampleBatch.of(batch))


def _drawn(spec: ModelSpec, shard, params: Params, rows: jax.Array, state: SlotState, batch: Packed):
    return sampling.drawn(logits(spec, params, rows, shard), state, sampling.SampleBatch.of(batch))


def _score(spec: ModelSpec, shard, params: Params, hidden: jax.Array, targets: jax.Array):
    return sampling.report(logits(spec, params, hidden, shard), targets)
