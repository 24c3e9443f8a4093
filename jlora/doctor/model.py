"""Steps to be timed, and a Llama with random weights made on the device.

Adapters' blocks hold what the pool holds: speed depends on shapes and lists alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jlora.cache.lease import Lease
from jlora.cache.tree import AdapterNode
from jlora.engine import device
from jlora.engine.plan import ROW, Sequence, StepPlan, Work
from jlora.layout import BYTES, PoolLayout, smallest_block_tokens
from jlora.model import llama, sharding
from jlora.model.spec import ModelSpec
from jlora.pallas.counts import Count
from jlora.step_model import StepLoad
from jlora.types import Request, SamplingParams

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
        return sum(p.tokens for p in self.parts)

    @property
    def idle(self) -> StepCase:
        """The same step without adapters."""
        return replace(self, parts=tuple(replace(p, adapter=-1) for p in self.parts), ranks=())


def decode(count: int, context: int, ranks: Many[int] = ()) -> StepCase:
    """`count` sequences of one token each; adapters are dealt out to them in turn."""
    parts = tuple(Part(context - 1, 1, i % len(ranks) if ranks else -1) for i in range(count))
    return StepCase(f"decode {count} x {context}{_named(ranks)}", parts, tuple(ranks))


def prefill(tokens: int, ranks: Many[int] = ()) -> StepCase:
    """`tokens` of prompts without a prefix: one prompt, or one for each adapter."""
    count = max(1, len(ranks))
    parts = tuple(Part(0, tokens // count, i if ranks else -1) for i in range(count))
    return StepCase(f"prefill {tokens}{_named(ranks)}", parts, tuple(ranks))


def _named(ranks: Many[int]) -> str:
    return f", {len(ranks)} adapters r{min(ranks)}-{max(ranks)}" if ranks else ""


def mixed(count: int) -> tuple[int, ...]:
    """Ranks 8, 16, 32, 64 in turn."""
    return tuple((8, 16, 32, 64)[i % 4] for i in range(count))


def load_of(case: StepCase, blocks: Callable[[int], int]) -> StepLoad:
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


def those_that_fit(spec: ModelSpec, cases: Many[StepCase], kernels: str) -> tuple[list[StepCase], list[str]]:
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


def layout_for(spec: ModelSpec, cases: Many[StepCase], kernels: str) -> PoolLayout:
    """A pool that holds the largest of the cases."""
    block = smallest_block_tokens(spec, 32 if jax.default_backend() != "cpu" else 16)
    one = device.fitted(PoolLayout.of(spec, 1, block), kernels)
    return replace(one, blocks=1 + max(_blocks(one, case) for case in cases))


def _blocks(layout: PoolLayout, case: StepCase) -> int:
    pages = sum(layout.blocks_for(p.context + p.tokens) for p in case.parts)
    return pages + sum(len(projections(layout, rank)) for rank in case.ranks)


def projections(layout: PoolLayout, rank: int) -> tuple[str, ...]:
    """For each block of an adapter of q, k, v and o, the projection whose units it holds."""
    return tuple(name for name in TARGETS for _ in range(-(-rank // layout.units[name].per_block)))


def plan_of(layout: PoolLayout, case: StepCase, uids: Iterator[int]) -> StepPlan:
    """The case as the scheduler would plan it. Every sequence and every adapter has blocks of its own."""
    free = itertools.count(1)
    adapters = []
    for rank in case.ranks:
        node = AdapterNode(next(uids), len(projections(layout, rank)))
        node.device = tuple(itertools.islice(free, node.size))
        adapters.append(node)
    works = []
    for slot, part in enumerate(case.parts):
        adapter = adapters[part.adapter] if part.adapter >= 0 else AdapterNode(0, 0)
        length = part.context + part.tokens
        request = Request(str(slot), (1,) * length, SamplingParams(temperature=0.0, max_tokens=1))
        sequence = Sequence(request, 0, slot, 0, adapter, 0.0, slot=slot)
        blocks = tuple(itertools.islice(free, layout.blocks_for(length)))
        sequence.lease = Lease(sequence.origin, reuse=False, blocks=blocks)
        works.append(Work(sequence, part.context, part.tokens, samples=True))
    decodes = case.shape[1] == 1
    return StepPlan(tuple(works) if decodes else (), () if decodes else tuple(works), ())


def count_of(spec: ModelSpec, layout: PoolLayout, case: StepCase) -> Count:
    """FLOPs and bytes that a step cannot do without: weights once, KV once, adapters once, products."""
    size, slot = BYTES[spec.dtype], 2 * spec.kv_heads * spec.head_dim
    matrices = spec.layers * sum(i * o for i, o in spec.projection_shapes.values())
    head, sampled = spec.width * spec.vocab, max(2, case.shape[0])
    kv = sum(p.context + p.tokens for p in case.parts) * slot * spec.layers
    rank_numbers = spec.layers * sum(layout.units[n].a + layout.units[n].b for n in TARGETS)
    units = sum(case.ranks) * rank_numbers
    pairs = sum(p.tokens * p.context + p.tokens * (p.tokens + 1) // 2 for p in case.parts)
    products = 2 * case.tokens * matrices + 2 * sampled * head
    of_adapters = sum(p.tokens * case.ranks[p.adapter] for p in case.parts if p.adapter >= 0)
    lora = 2 * of_adapters * rank_numbers
    attention = 4 * pairs * spec.heads * spec.head_dim * spec.layers
    moved = size * (matrices + head + kv + units + case.tokens * spec.width)
    return Count(int(moved), int(products + lora + attention))


def weights(spec: ModelSpec, stacked: bool) -> llama.Params:
    """Scattered weights on the device, one at a time; norms are ones."""
    mesh, shapes, specs = sharding.make_mesh(1), llama.abstract(spec)[0], sharding.param_specs(spec)
    if stacked:
        shapes, specs = jax.eval_shape(llama.stack_layers, shapes), sharding.stacked_specs(specs)

    def make(path: Any, leaf: Any, where: Any) -> jax.Array:
        norm = "norm" in jax.tree_util.keystr(path)
        values = jnp.ones(leaf.shape, leaf.dtype) if norm else _scattered(leaf.shape, leaf.dtype)
        return jax.device_put(values, NamedSharding(mesh, where))

    return jax.tree_util.tree_map_with_path(make, shapes, specs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scattered(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Numbers of variance 1 / fan-in from a hash of each one's place.

    One fused loop: a generator of random numbers may need several times the weight's memory.
    """
    at = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) * jnp.uint32(0x9E3779B9)
    at = (at ^ (at >> 15)) * jnp.uint32(0x85EBCA6B)
    unit = (at >> 8).astype(jnp.float32) * (2.0 / 2**24) - 1
    return (unit * math.sqrt(3 / shape[-2])).astype(dtype)
