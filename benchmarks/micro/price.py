"""R4 on this machine: what adapters add to whole steps of the engine, decode and prefill.

A cell is a batch; its sides are the same batch without adapters, and dealt out in turn to so many of them. Each
side is whole steps of the runner, sampling included: the same launch every time, on random weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from benchmarks.runner import Options
from jlora.doctor import engine
from jlora.doctor.engine import World
from jlora.doctor.model import Part, StepCase, layout_for, mixed
from jlora.loadgen.checkpoints import LLAMA_100M, TINY
from jlora.loadgen.rounds import Sample, Side

RANKS: Mapping[int, tuple[int, ...]] = {0: (), 1: (32,), 8: mixed(8), 64: mixed(64)}  # about 30 in the mean
SAMPLE_S = 0.3  # a measurement repeats a step for at least so long


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that are alike: each computes `tokens` behind `context`."""

    name: str
    sequences: int
    context: int
    tokens: int

    def case(self, adapters: int) -> StepCase:
        """Dealt out to so many adapters; 0 is the base."""
        ranks = RANKS[adapters]
        owners = [i % adapters if adapters else -1 for i in range(self.sequences)]
        return StepCase(self.name, tuple(Part(self.context, self.tokens, owner) for owner in owners), ranks)

    @property
    def counts(self) -> list[int]:
        """Of adapters."""
        return [count for count in RANKS if count <= self.sequences]


FULL = (Batch("decode 8", 8, 127, 1), Batch("decode 64", 64, 127, 1), Batch("prefill 64 x 32", 64, 0, 32))
QUICK = (Batch("decode 8", 8, 15, 1), Batch("prefill 8 x 8", 8, 0, 8))


def run(options: Options) -> None:
    """Every batch, as many rounds as asked for (9)."""
    batches, spec = (QUICK, TINY) if options.quick else (FULL, LLAMA_100M)
    spec = replace(spec, dtype=options.dtype)
    records = options.records(f"price-{options.dtype}", {"ranks": [list(ranks) for ranks in RANKS.values()]})
    cases = [batch.case(count) for batch in batches for count in batch.counts]
    most = max(case.shape[0] * case.shape[1] for case in cases)
    config = engine.settings(max(batch.sequences for batch in batches), most, "auto")
    world = World(spec, config, layout_for(spec, cases, "auto"))
    try:
        for batch in batches:
            calls = {_named(count): world.repeated(world.plan(batch.case(count))) for count in batch.counts}
            for call in calls.values():
                jax.block_until_ready(call(1))
            sides = [Side(name, partial(_time, call)) for name, call in calls.items()]
            records.measure(batch.name, sides, options.budget(9))
    finally:
        world.close()


def _named(adapters: int) -> str:
    return "1 adapter" if adapters == 1 else f"{adapters} adapters" if adapters else "base"


def _time(call: Callable[[int], Any]) -> Sample:
    """Seconds of a step: the mean of as many as fill a sample."""
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < SAMPLE_S:
        jax.block_until_ready(call(1))
        count += 1
    return {"seconds": (time.perf_counter() - began) / count, "calls": count}
