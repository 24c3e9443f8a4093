"""What the adapters of one layer cost on this machine, by active blocks and by dense slots.

    blocks   our op (`jlora.pallas.reference.CPU`): adapters lie in blocks of the pool, and a loop goes
             over the blocks of the adapters in the batch
    dense    every registered adapter has a slot in stacks A [S, R, a] and B [S, R, b]. x is multiplied by
             all of A, other slots are masked by a one-hot, and the rest is multiplied by all of B
    base     the same products without adapters, for scale

Both ways start from the same numbers and must give the same result before they are timed. How many
adapters are registered varies; how many are in the batch does not.

Source: the segmented product, Chen et al. 2023 (Punica), section 4; dense slots as in multi-LoRA layers
with a static adapter axis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.runner import Options
from jlora.loadgen.checkpoints import LLAMA_100M, TINY
from jlora.loadgen.rounds import Sample, Side
from jlora.model.spec import ModelSpec
from jlora.pallas import cases, reference
from jlora.pallas.cases import LoraCase
from jlora.pallas.ops import Adapted

GROUPS = (("q", "k", "v"), ("o",))  # the projections that are adapted, by input
BLOCK_TOKENS = 16
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of the largest value
SAMPLE_S = 0.05  # a measurement repeats a call for at least so long


@dataclass(frozen=True, slots=True)
class Batch:
    """A launch: `tokens`, dealt out to the adapters in runs of `run` tokens."""

    name: str
    tokens: int
    adapters: int
    run: int = 1

    def runs(self) -> tuple[tuple[int, int], ...]:
        """(adapter, tokens) in launch order."""
        return tuple((i % self.adapters, self.run) for i in range(self.tokens // self.run))


FULL = (Batch("decode 64", 64, 8), Batch("decode 64", 64, 64), Batch("prefill 512", 512, 4, 128))
QUICK = (Batch("decode 4", 4, 2), Batch("prefill 32", 32, 2, 16))
REGISTERED, QUICK_REGISTERED = (8, 32, 128, 512), (2, 8)


def run(options: Options) -> None:
    """Times every batch with every number of registered adapters. Raises RuntimeError if the ways differ."""
    spec, rank = (TINY, 4) if options.quick else (LLAMA_100M, 16)
    spec = replace(spec, dtype=options.dtype, layers=1)
    settings = {"width": spec.width, "rank": rank, "block_tokens": BLOCK_TOKENS}
    records = options.records(f"lora-{options.dtype}", settings)
    for batch in QUICK if options.quick else FULL:
        for count in (n for n in (QUICK_REGISTERED if options.quick else REGISTERED) if n >= batch.adapters):
            ways = compared(spec, rank, batch, count)
            sides = [Side(name, lambda call=call: _time(call)) for name, call in ways.items()]
            cell = f"{batch.name}, {batch.adapters} of {count} adapters"
            records.measure(cell, sides, options.budget(15))


def compared(spec: ModelSpec, rank: int, batch: Batch, registered: int) -> dict[str, Callable[[], Any]]:
    """All ways on one batch, checked against each other; each a call that gives what to wait for.

    The pool of the blocks holds the batch's adapters only: what else is registered is never touched.
    """
    launches = [
        LoraCase(batch.name, spec, BLOCK_TOKENS, group, (rank,) * batch.adapters, batch.runs()) for group in GROUPS
    ]
    inputs = [cases.lora_inputs(case, junk=0.0) for case in launches]
    units = [[p.unit for p in found[3]] for found in inputs]
    arrays = [(x, pool, first, [(p.base, p.active) for p in parts], who) for x, pool, first, parts, who in inputs]
    chosen = np.linspace(0, registered - 1, batch.adapters).round().astype(np.int32)  # spread over the registered
    slots = jnp.asarray(chosen[np.asarray(inputs[0][4])])
    stacks = [_stacks(case, found, chosen, registered) for case, found in zip(launches, inputs, strict=True)]

    @jax.jit
    def by_blocks(arrays: Any) -> list[Any]:
        return [
            reference.CPU.lora(
                x, pool, first, [Adapted(base, active, u) for (base, active), u in zip(parts, of, strict=True)], who
            )
            for (x, pool, first, parts, who), of in zip(arrays, units, strict=True)
        ]

    calls: dict[str, Callable[[], Any]] = {
        "blocks": lambda: by_blocks(arrays),
        "dense": lambda: _dense(arrays, stacks, slots),
        "base": _base(spec, [found[0] for found in inputs]),
    }
    ours, theirs = (jax.tree.map(lambda y: np.asarray(y, np.float32), calls[way]()) for way in ("blocks", "dense"))
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
        if not error < TOLERANCE[spec.dtype]:
            raise RuntimeError(f"{batch.name}, {registered} adapters: blocks and dense differ by {error:.1e}")
    return calls


def _stacks(case: LoraCase, found: tuple[Any, ...], chosen: np.ndarray, registered: int) -> list[Mapping[str, Any]]:
    """A [S, R, a] and B [S, R, b] of each projection; slots that are not in the batch hold random numbers."""
    pool, rng, stacks = np.asarray(found[1], np.float32), np.random.default_rng(registered), []
    rank: Any = case.ranks[0]
    for part in found[3]:
        unit, blocks = part.unit, np.asarray(part.active.blocks[int(part.active.start) : int(part.active.stop)])
        cells = pool[case.layout.blocks + blocks].reshape(len(blocks), -1)
        size = pool.shape[2] * pool.shape[3] * unit.slots
        units = cells[:, : unit.per_block * size].reshape(len(chosen), -1, size)[:, :rank]
        a = rng.standard_normal((registered, rank, unit.a), np.float32)
        b = rng.standard_normal((registered, rank, unit.b), np.float32)
        a[chosen], b[chosen] = units[..., : unit.a], units[..., unit.b_start : unit.b_start + unit.b]
        stacks.append({"a": jnp.asarray(a, case.spec.dtype), "b": jnp.asarray(b, case.spec.dtype)})
    return stacks


@jax.jit
def _dense(arrays: Any, stacks: Any, slots: jax.Array) -> list[Any]:
    """y + ((x Aᵀ) · one-hot of the token's slot) B over all S slots."""
    made = []
    for (x, _, _, parts, _), group in zip(arrays, stacks, strict=True):
        outs = []
        for (base, _), stack in zip(parts, group, strict=True):
            own = jax.nn.one_hot(slots, stack["a"].shape[0], dtype=x.dtype)
            h = jnp.einsum("ta,sra->tsr", x, stack["a"]) * own[:, :, None]
            outs.append(base + jnp.einsum("tsr,srb->tb", h, stack["b"]))
        made.append(outs)
    return made


def _base(spec: ModelSpec, inputs: list[jax.Array]) -> Callable[[], Any]:
    """The layer's own products of the same projections."""
    rng, shapes = np.random.default_rng(1), spec.projection_shapes
    weights = [[jnp.asarray(rng.standard_normal(shapes[n], np.float32), spec.dtype) for n in g] for g in GROUPS]
    products = jax.jit(lambda xs, ws: [[x @ w for w in group] for x, group in zip(xs, ws, strict=True)])
    return lambda: products(inputs, weights)


def _time(call: Callable[[], Any]) -> Sample:
    """Seconds of a call: the mean of as many as fill a sample."""
    jax.block_until_ready(call())
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < SAMPLE_S:
        jax.block_until_ready(call())
        count += 1
    return {"seconds": (time.perf_counter() - began) / count, "calls": count}
