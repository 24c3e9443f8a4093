"""`jlora bench lora`: what the adapters of one layer cost on this CPU, by active blocks and by dense slots.

    blocks   our op (`jlora.pallas.reference.CPU`): the adapters lie in blocks of the pool, a loop goes
             over the blocks of those that are in the batch
    dense    every registered adapter has a slot in stacks A [S, R, a] and B [S, R, b]; x is multiplied by
             all of A, what belongs to other slots is zeroed by a one-hot mask, the rest multiplied by all
             of B: the form of servers in JAX whose adapters live in a fixed number of slots
    base     the same layer's products without adapters, for scale

Both ways start from the same numbers and must give the same result before they are timed. Time is
of q, k, v (one call) and o of one layer; how many adapters are registered varies, how many are in
the batch does not: that is what the two ways differ in.

Source: the segmented product, Chen et al. 2023 (Punica), section 4; dense slots as in multi-LoRA
layers with a static adapter axis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rounds
from benchmarks.rounds import Budget, Side
from jlora.layout import PoolLayout
from jlora.loadgen.checkpoints import LLAMA_100M, TINY
from jlora.model.spec import ModelSpec
from jlora.pallas import reference
from jlora.pallas.ops import ActiveBlocks, Adapted

GROUPS = (("q", "k", "v"), ("o",))  # the projections that are adapted, by input
BLOCK_TOKENS = 16
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of the largest value
SAMPLE_S = 0.05  # a measurement repeats a call for at least so long


@dataclass(frozen=True, slots=True)
class Batch:
    """A launch: `tokens`, and how many adapters they are dealt out to, in runs of `run` tokens."""

    name: str
    tokens: int
    adapters: int
    run: int = 1

    def owners(self) -> np.ndarray:
        """[T] index of each token's adapter in the batch."""
        return np.arange(self.tokens) // self.run % self.adapters


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared: every batch with every number of registered adapters that is not below its own."""

    spec: ModelSpec
    rank: int
    registered: tuple[int, ...]
    batches: tuple[Batch, ...]

    def cases(self) -> list[tuple[Batch, int]]:
        """(batch, registered adapters)."""
        return [(b, s) for b in self.batches for s in self.registered if s >= b.adapters]


FULL = Plan(
    LLAMA_100M,
    16,
    (8, 32, 128, 512),
    (Batch("decode 64", 64, 8), Batch("decode 64", 64, 64), Batch("prefill 512", 512, 4, 128)),
)
QUICK = Plan(TINY, 4, (2, 8), (Batch("decode 4", 4, 2), Batch("prefill 32", 32, 2, 16)))


class Registered(NamedTuple):
    """Some adapters in both forms: a pool, the blocks of each (projection, adapter), and stacks."""

    layout: PoolLayout
    pool: jax.Array
    blocks: Mapping[str, np.ndarray]  # [S, blocks of one]
    stacks: Mapping[str, tuple[jax.Array, jax.Array]]  # A [S, R, a], B [S, R, b]


def run(plan: Plan, dtype: str, budget: Budget, work: Path) -> dict[str, Any]:
    """Measures; the raw rounds and a summary.

    Raises:
        RuntimeError: the two ways do not give the same result.
    """
    plan = replace(plan, spec=replace(plan.spec, dtype=dtype))
    settings = {"plan": asdict(plan), "dtype": dtype, "block_tokens": BLOCK_TOKENS, "sample_s": SAMPLE_S}
    journal = rounds.Journal(work / f"lora-{dtype}.jsonl", settings)
    sides: dict[str, Callable[[], Any]] = {}
    for count in plan.registered:
        adapters = register(plan, count)
        for batch in (b for b, s in plan.cases() if s == count):
            ways = compared(plan, batch, adapters)
            sides |= {f"{way} {_name(batch, count)}": call for way, call in ways.items()}
    for batch in plan.batches:
        sides[f"base {batch.name}"] = base(plan, batch)
    timed = [Side(name, lambda call=call: _time(call)) for name, call in sides.items()]
    for side in timed:
        side.run()  # compiled, and touched for the first time
    done = rounds.interleave(timed, journal, budget, f"lora {dtype}")
    return {"settings": settings, "rounds": done, "summary": summarise(plan, done)}


def summarise(plan: Plan, done: Sequence[Mapping[str, rounds.Sample]]) -> list[dict[str, Any]]:
    """Per case: median seconds of a layer, the ratio round by round, the controls."""
    rows = []
    for batch, count in plan.cases():
        ours, theirs = (f"{way} {_name(batch, count)}" for way in ("blocks", "dense"))
        rows.append(
            {
                "batch": batch.name,
                "in_batch": batch.adapters,
                "registered": count,
                "base_s": rounds.spread([r[f"base {batch.name}"]["seconds"] for r in done]).median,
                "blocks_s": rounds.spread([r[ours]["seconds"] for r in done]).median,
                "dense_s": rounds.spread([r[theirs]["seconds"] for r in done]).median,
                "ratio": asdict(rounds.speed_ratio(done, ours, theirs)),
                "blocks_control": rounds.control(done, ours),
                "dense_control": rounds.control(done, theirs),
                "rounds": len(done),
            }
        )
    return rows


def register(plan: Plan, count: int) -> Registered:
    """`count` adapters of the plan's rank on one layer, random, as blocks and as stacks."""
    spec, rng = replace(plan.spec, layers=1), np.random.default_rng(count)
    one = PoolLayout.of(spec, 1, BLOCK_TOKENS)
    names = [name for group in GROUPS for name in group]
    needed = {name: -(-plan.rank // one.units[name].per_block) for name in names}
    layout = replace(one, blocks=1 + count * sum(needed.values()))
    pool = np.zeros((layout.blocks, BLOCK_TOKENS * 2 * spec.kv_heads * spec.head_dim), np.float32)
    blocks, stacks, first = {}, {}, 1
    for name in names:
        unit = layout.units[name]
        blocks[name] = first + np.arange(count * needed[name]).reshape(count, -1)
        a = rng.standard_normal((count, plan.rank, unit.a), np.float32) / np.sqrt(unit.a)
        b = rng.standard_normal((count, plan.rank, unit.b), np.float32)
        size = pool.shape[1] // BLOCK_TOKENS * unit.slots
        units = np.zeros((count, needed[name] * unit.per_block, size), np.float32)
        units[:, : plan.rank, : unit.a] = a
        units[:, : plan.rank, unit.b_start : unit.b_start + unit.b] = b
        filled = units.reshape(count * needed[name], unit.per_block * size)
        pool[first : first + len(filled), : filled.shape[1]] = filled
        stacks[name] = jnp.asarray(a, spec.dtype), jnp.asarray(b, spec.dtype)
        first += len(filled)
    return Registered(layout, jnp.asarray(pool.reshape(layout.shape), spec.dtype), blocks, stacks)


def compared(plan: Plan, batch: Batch, adapters: Registered) -> dict[str, Callable[[], Any]]:
    """Both ways on one batch, checked against each other; each a call that gives what to wait for."""
    count = len(adapters.blocks["q"])
    chosen = np.linspace(0, count - 1, batch.adapters).round().astype(np.int32)  # spread over the registered
    owner = batch.owners()
    inputs, bases = _activations(plan, batch)
    lists = [_lists(adapters, group, chosen) for group in GROUPS]
    by_blocks = jax.jit(lambda *args: _by_blocks(adapters.layout, *args))
    slots = jnp.asarray(chosen[owner], jnp.int32)
    ways: dict[str, Callable[[], Any]] = {
        "blocks": lambda: by_blocks(adapters.pool, inputs, bases, lists, jnp.asarray(owner, jnp.int32)),
        "dense": lambda: _dense(adapters.stacks, inputs, bases, slots),
    }
    ours, theirs = (jax.tree.map(lambda y: np.asarray(y, np.float32), ways[way]()) for way in ways)
    for name, wanted in theirs.items():
        error = float(np.abs(ours[name] - wanted).max() / np.abs(wanted).max())
        if not error < TOLERANCE[plan.spec.dtype]:
            raise RuntimeError(f"{_name(batch, count)}: {name} differs by {error:.1e} of the largest value")
    return ways


def base(plan: Plan, batch: Batch) -> Callable[[], Any]:
    """The layer's products of the same projections."""
    rng = np.random.default_rng(1)
    shapes = plan.spec.projection_shapes
    weights = {n: jnp.asarray(rng.standard_normal(shapes[n], np.float32), plan.spec.dtype) for g in GROUPS for n in g}
    inputs = _activations(plan, batch)[0]
    products = jax.jit(lambda xs, ws: {n: x @ ws[n] for x, group in zip(xs, GROUPS, strict=True) for n in group})
    return lambda: products(inputs, weights)


def _activations(plan: Plan, batch: Batch) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Each group's input [T, a], and each projection's base product [T, b]."""
    rng, shapes = np.random.default_rng(0), plan.spec.projection_shapes

    def normal(width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((batch.tokens, width), np.float32), plan.spec.dtype)

    return [normal(shapes[group[0]][0]) for group in GROUPS], {n: normal(shapes[n][1]) for g in GROUPS for n in g}


def _lists(adapters: Registered, group: Sequence[str], chosen: np.ndarray) -> list[ActiveBlocks]:
    """A group's active blocks, as a launch has them: entries of all projections in one list, with room."""
    parts = [adapters.blocks[name][chosen] for name in group]
    owners = [np.repeat(np.arange(len(chosen)), part.shape[1]) for part in parts]
    ends = np.cumsum([0, *(part.size for part in parts)])
    lists = np.zeros((2, adapters.layout.blocks), np.int32)
    lists[0, : ends[-1]] = np.concatenate([part.reshape(-1) for part in parts])
    lists[1, : ends[-1]] = np.concatenate(owners)
    blocks, of = jnp.asarray(lists[0]), jnp.asarray(lists[1])
    return [ActiveBlocks(blocks, of, jnp.int32(a), jnp.int32(b)) for a, b in zip(ends, ends[1:], strict=False)]


def _by_blocks(layout: PoolLayout, pool, inputs, bases, lists, owner) -> dict[str, jax.Array]:
    made = {}
    for group, x, active in zip(GROUPS, inputs, lists, strict=True):
        parts = [Adapted(bases[n], entries, layout.units[n]) for n, entries in zip(group, active, strict=True)]
        made |= dict(zip(group, reference.CPU.lora(x, pool, 0, parts, owner), strict=True))
    return made


@jax.jit
def _dense(stacks, inputs, bases, slots) -> dict[str, jax.Array]:
    """y + ((x Aᵀ) · one-hot of the token's slot) B over all S slots."""
    made = {}
    for group, x in zip(GROUPS, inputs, strict=True):
        for name in group:
            a, b = stacks[name]
            own = jax.nn.one_hot(slots, a.shape[0], dtype=x.dtype)
            h = jnp.einsum("ta,sra->tsr", x, a) * own[:, :, None]
            made[name] = bases[name] + jnp.einsum("tsr,srb->tb", h, b)
    return made


def _time(call: Callable[[], Any]) -> rounds.Sample:
    """Seconds of a call: the mean of as many as fill a sample."""
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < SAMPLE_S:
        jax.block_until_ready(call())
        count += 1
    return {"seconds": (time.perf_counter() - began) / count, "calls": count}


def _name(batch: Batch, registered: int) -> str:
    return f"{batch.name}, {batch.adapters} of {registered} adapters"
