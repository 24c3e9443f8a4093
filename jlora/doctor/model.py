"""A Llama with random weights made on the device, and batches of any shape for its step.

Nothing is read from a disk and nothing large crosses the link: weights are scattered numbers made
on the device, adapters' blocks are part of the pool and hold what it holds. Speed depends on
shapes and on the lists alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jlora.config import Config
from jlora.engine import device
from jlora.engine.batch import BatchBuilder
from jlora.engine.plan import ROW
from jlora.layout import BYTES, PoolLayout, smallest_block_tokens
from jlora.model import llama, sampling, sharding, step
from jlora.model.spec import PROJECTIONS, ModelSpec
from jlora.pallas.counts import Count
from jlora.sim.hardware import StepLoad

TARGETS = ("q", "k", "v", "o")
WORKSPACE = 2**31  # bytes beside weights and pool: activations, logits, a product's own workspace


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences that are alike: `tokens` new ones behind `context` cached ones; an adapter's index or -1."""

    context: int
    tokens: int
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class StepCase:
    """One step: its sequences, and the rank of each adapter."""

    name: str
    parts: tuple[Part, ...]
    ranks: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens per row), as the engine lays it out."""
        if all(p.tokens == 1 for p in self.parts):
            return max(2, len(self.parts)), 1
        return sum(-(-p.tokens // ROW) for p in self.parts), ROW

    @property
    def tokens(self) -> int:
        """New tokens."""
        return sum(p.tokens for p in self.parts)


@dataclass(frozen=True, slots=True)
class StepKey:
    """A compiled step: its shape, and whether it is the one that knows no adapters."""

    shape: tuple[int, int]
    bare: bool = False


def decode(count: int, context: int, ranks: Sequence[int] = ()) -> StepCase:
    """`count` sequences of one token each; adapters are dealt out to them in turn."""
    parts = tuple(Part(context - 1, 1, i % len(ranks) if ranks else -1) for i in range(count))
    named = f", {len(ranks)} adapters r{min(ranks)}-{max(ranks)}" if ranks else ""
    return StepCase(f"decode {count} x {context}{named}", parts, tuple(ranks))


def prefill(tokens: int, ranks: Sequence[int] = ()) -> StepCase:
    """`tokens` of prompts without a prefix: one prompt, or one for each adapter."""
    count = max(1, len(ranks))
    parts = tuple(Part(0, tokens // count, i if ranks else -1) for i in range(count))
    named = f", {len(ranks)} adapters r{min(ranks)}-{max(ranks)}" if ranks else ""
    return StepCase(f"prefill {tokens}{named}", parts, tuple(ranks))


def mixed(count: int) -> tuple[int, ...]:
    """Ranks 8, 16, 32, 64 in turn."""
    return tuple((8, 16, 32, 64)[i % 4] for i in range(count))


def load_of(spec: ModelSpec, case: StepCase, blocks: Callable[[int], int]) -> StepLoad:
    """The case in the simulator's terms; `blocks`: of an adapter of a rank, as the simulator counts them."""
    per_adapter = [blocks(rank) for rank in case.ranks]
    new = {True: 0, False: 0}
    for part in case.parts:
        new[part.tokens == 1] += part.tokens
    return StepLoad(
        prompt=new[False],
        decode=new[True],
        context=sum(p.context + p.tokens for p in case.parts),
        pairs=sum(p.tokens * (p.context + (p.tokens + 1) / 2) for p in case.parts),
        adapter_blocks=sum(per_adapter),
        adapter_tokens=sum(p.tokens * per_adapter[p.adapter] for p in case.parts if p.adapter >= 0),
    )


def those_that_fit(spec: ModelSpec, cases: Sequence[StepCase], kernels: str) -> tuple[list[StepCase], list[str]]:
    """The cases that this device's memory holds beside the weights, and why the others do not fit."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if not limit:
        return list(cases), []
    block = layout_for(spec, cases, kernels).block_bytes
    weights_ = spec.parameters * BYTES[spec.dtype]
    room = limit - weights_ - WORKSPACE
    held, reasons = [], []
    for case in cases:
        need = layout_for(spec, [case], kernels).blocks * block
        if need <= room:
            held.append(case)
        else:
            need_gb, have = (weights_ + WORKSPACE + need) / 1e9, limit / 1e9
            reasons.append(f"{spec.name}: {case.name}: {need_gb:.1f} GB needed, {have:.1f} GB of memory")
    return held, reasons


def layout_for(spec: ModelSpec, cases: Sequence[StepCase], kernels: str) -> PoolLayout:
    """A pool that holds the largest of the cases."""
    block = smallest_block_tokens(spec, 32 if jax.default_backend() != "cpu" else 16)
    one = device.fitted(PoolLayout.of(spec, 1, block), kernels)
    return replace(one, blocks=1 + max(_blocks(one, case) for case in cases))


def _blocks(layout: PoolLayout, case: StepCase) -> int:
    pages = sum(layout.blocks_for(p.context + p.tokens) for p in case.parts)
    return pages + sum(adapter_blocks(layout, rank) for rank in case.ranks)


def adapter_blocks(layout: PoolLayout, rank: int) -> int:
    """Blocks of an adapter of q, k, v and o."""
    return sum(-(-rank // layout.units[name].per_block) for name in TARGETS)


def batch_of(layout: PoolLayout, case: StepCase, width: int) -> step.Batch:
    """The case as the runner would hand it to the step; numpy."""
    free = iter(range(1, layout.blocks))
    entries: list[tuple[int, int]] = []
    offsets = [0]
    for name in PROJECTIONS:
        for owner, rank in enumerate(case.ranks if name in TARGETS else ()):
            entries += [(next(free), owner) for _ in range(-(-rank // layout.units[name].per_block))]
        offsets.append(len(entries))
    lists = np.zeros((2, layout.blocks), np.int32)
    lists[:, : len(entries)] = np.array(entries, np.int32).reshape(-1, 2).T
    rows, chunk = case.shape
    table = np.zeros((rows, width), np.int32)
    starts, counts, adapters = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    row = 0
    for part in case.parts:
        pages = [next(free) for _ in range(layout.blocks_for(part.context + part.tokens))]
        for at in range(0, part.tokens, chunk):
            table[row, : len(pages)] = pages
            starts[row], counts[row] = part.context + at, min(chunk, part.tokens - at)
            adapters[row] = part.adapter
            row += 1
    positions = starts[:, None] + np.arange(chunk, dtype=np.int32)
    page = np.take_along_axis(table, np.minimum(positions // layout.block_tokens, width - 1), axis=1)
    inside = np.arange(chunk) < counts[:, None]
    return step.Batch(
        tokens=np.ones((rows, chunk), np.int32),
        source=np.full(rows, -1, np.int32),
        starts=starts,
        lengths=starts + counts,
        write_rows=np.where(inside, page, -1).reshape(-1).astype(np.int32),
        write_slots=(positions % layout.block_tokens).reshape(-1).astype(np.int32),
        table=table,
        adapters=np.repeat(adapters, chunk),
        blocks=lists[0],
        owners=lists[1],
        offsets=np.array(offsets, np.int32),
        last=(np.arange(max(2, rows), dtype=np.int32) * chunk).clip(0, rows * chunk - 1),
    )


def count_of(spec: ModelSpec, layout: PoolLayout, case: StepCase) -> Count:
    """FLOPs and bytes that a step cannot do without: weights once, KV once, adapters once, products."""
    size, slot = BYTES[spec.dtype], 2 * spec.kv_heads * spec.head_dim
    matrices = spec.layers * sum(i * o for i, o in spec.projection_shapes.values())
    head, sampled = spec.width * spec.vocab, max(2, case.shape[0])
    kv = sum(p.context + p.tokens for p in case.parts) * slot * spec.layers
    units = sum(case.ranks) * spec.layers * sum(layout.units[n].a + layout.units[n].b for n in TARGETS)
    pairs = sum(p.tokens * p.context + p.tokens * (p.tokens + 1) // 2 for p in case.parts)
    products = 2 * case.tokens * matrices + 2 * sampled * head
    of_adapters = sum(p.tokens * case.ranks[p.adapter] for p in case.parts if p.adapter >= 0)
    lora = 2 * of_adapters * spec.layers * sum(layout.units[n].a + layout.units[n].b for n in TARGETS)
    attention = 4 * pairs * spec.heads * spec.head_dim * spec.layers
    moved = size * (matrices + head + kv + units + case.tokens * spec.width)
    return Count(int(moved), int(products + lora + attention))


def weights(spec: ModelSpec, stacked: bool) -> llama.Params:
    """Scattered weights on the device, one at a time; norms are ones."""
    mesh = sharding.make_mesh(1)
    shapes = llama.abstract(spec)[0]
    shapes = jax.eval_shape(llama.stack_layers, shapes) if stacked else shapes
    specs = sharding.param_specs(spec)
    specs = sharding.stacked_specs(specs) if stacked else specs

    def make(path: Any, leaf: Any, where: Any) -> jax.Array:
        norm = "norm" in jax.tree_util.keystr(path)
        return _scattered(leaf.shape, leaf.dtype, norm, NamedSharding(mesh, where))()

    return jax.tree_util.tree_map_with_path(make, shapes, specs)


@functools.lru_cache(maxsize=64)  # layers are alike: each kind of weight is compiled once
def _scattered(shape: tuple[int, ...], dtype: Any, norm: bool, where: NamedSharding) -> Callable[[], jax.Array]:
    """Makes ones, or numbers of variance 1 / fan-in from a hash of each one's place.

    One fused loop: beside the weight nothing is in memory, where a generator of random numbers may
    need several times as much.
    """

    def fill() -> jax.Array:
        if norm:
            return jnp.ones(shape, dtype)
        at = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) * jnp.uint32(0x9E3779B9)
        at = (at ^ (at >> 15)) * jnp.uint32(0x85EBCA6B)
        unit = (at >> 8).astype(jnp.float32) * (2.0 / 2**24) - 1
        return (unit * math.sqrt(3 / shape[-2])).astype(dtype)

    return jax.jit(fill, out_shardings=where)


class DeviceModel:
    """Weights, pool and compiled steps of one model, to be timed.

    Args:
        cases: every case that will be timed; the pool is as large as the largest needs.
        config: `engine.kernels` says which ops.
    """

    def __init__(self, spec: ModelSpec, cases: Sequence[StepCase], config: Config):
        self.spec = spec
        self.layout = layout_for(spec, cases, config.engine.kernels)
        self.stacked = device.uses_scan(config.engine.layers, jax.devices()[0].platform)
        self._mesh = sharding.make_mesh(1)
        self._builder = BatchBuilder(self.layout, config.engine, spec, lambda uid: ())
        shapes = tuple(dict.fromkeys(case.shape for case in cases))
        self.chosen = device.choose_ops(config, spec, self.layout, shapes)
        self.params = weights(spec, self.stacked)
        self.programs = step.build(spec, self.layout, self._mesh, self.stacked, self.chosen.ops)
        self._pool = jax.jit(
            lambda: jnp.zeros(self.layout.shape, self.layout.dtype),
            out_shardings=NamedSharding(self._mesh, sharding.POOL),
        )()
        self._slots = config.engine.max_seqs
        replicated = NamedSharding(self._mesh, sharding.REPLICATED)
        self._state = jax.jit(lambda: sampling.empty_slots(self._slots, spec.vocab), out_shardings=replicated)()
        self._steps: dict[StepKey, tuple[Any, Any]] = {}

    def compile(self, keys: Sequence[StepKey]) -> None:
        """Compiles some steps, several at a time."""
        todo = [key for key in dict.fromkeys(keys) if key not in self._steps]
        with ThreadPoolExecutor(4) as pool:
            self._steps |= zip(todo, pool.map(self._compile, todo), strict=True)

    def runner(self, case: StepCase, bare: bool = False) -> Callable[[int], Any]:
        """A function that runs so many steps of the case, one after the other, and gives what to wait for.

        Args:
            bare: by the program that knows no adapters. Its step is compiled, as the other one is.
        """
        forward, sample = self._steps[StepKey(case.shape, bare)]
        replicated = NamedSharding(self._mesh, sharding.REPLICATED)
        width = self.layout.blocks_for(self.spec.max_len)
        batch = batch_of(self.layout, case, width)
        batch = batch._replace(blocks=batch.blocks[:0], owners=batch.owners[:0]) if bare else batch
        batch, drawn = jax.device_put((batch, self._sampling(case.shape)), replicated)

        def run(count: int) -> Any:
            for _ in range(count):
                self._pool, rows, _ = forward(self.params, self._pool, self._state.last, batch)
                self._state, sampled = sample(self.params, rows, self._state, drawn)
            return sampled.token

        return run

    def hand_over(self) -> llama.Params:
        """The weights, for an owner with a pool of its own; this one's is freed, and no step runs any more."""
        for leaf in jax.tree.leaves((self._pool, self._state)):
            leaf.delete()
        self._steps.clear()
        return self.params

    def close(self) -> None:
        """Frees the device."""
        for leaf in jax.tree.leaves(self.hand_over()):
            leaf.delete()

    def _sampling(self, shape: tuple[int, int]) -> Any:
        return self._builder.blank(*shape).sampling

    def _compile(self, key: StepKey) -> tuple[Any, Any]:
        batch = self._builder.blank(*key.shape, bare=key.bare).batch
        forward = self.programs.forward.lower(self.params, self._pool, self._state.last, batch).compile()
        rows = jax.ShapeDtypeStruct((max(2, key.shape[0]), self.spec.width), jnp.dtype(self.spec.dtype))
        sample = self.programs.sample.lower(self.params, rows, self._state, self._sampling(key.shape)).compile()
        return forward, sample
