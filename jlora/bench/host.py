"""R7 and R10: Python's time per engine step against running sequences and queued requests.

A tiny model, so that little of the time is the device's; everything the host does is the same as
for a large one: planning, packing the batch, dispatch, reading and committing the tokens.
Measured over decode steps with all slots taken and the queue as long as stated. The engine is
stepped here, from one thread, so that exactly those steps are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jlora.bench import ours, rounds
from jlora.bench.rounds import Journal, Sample, Side
from jlora.bench.throughput import Setup
from jlora.bench.workload import TINY, Plan, Workload, adapter_names, prepare
from jlora.engine.build import build
from jlora.engine.engine import Engine
from jlora.types import Request, SamplingParams

PROMPT = 16
# Room for sequences that outlast the measurement.
HOST = Plan(
    replace(TINY, max_len=2048), requests=1, prompt_tokens=(PROMPT, PROMPT), output_tokens=(8, 8), adapters=4, rank=4
)


@dataclass(frozen=True, slots=True)
class Load:
    """How many sequences run, how many requests wait behind them, and for how many steps."""

    running: int
    queued: int
    steps: int


LOADS = tuple(Load(running, 0, 64) for running in (1, 4, 16, 64)) + tuple(
    Load(64, queued, 64) for queued in (256, 2048)
)
QUICK_LOADS = (Load(1, 0, 8), Load(4, 0, 8), Load(4, 32, 8))


def run(setup: Setup, loads: Sequence[Load]) -> dict[str, Any]:
    """Seconds of host time per step for every load, and the fit over running sequences."""
    workload = prepare(setup.plan, setup.work / "workload")
    settings = {**setup.describe(), "loads": [[load.running, load.queued, load.steps] for load in loads]}
    journal = Journal(setup.work / "host.jsonl", settings)
    engines = {n: _build(setup, workload, n) for n in sorted({load.running for load in loads})}
    try:
        sides = [Side(_name(load), lambda load=load: _measure(engines[load.running], setup, load)) for load in loads]
        for side in sides:
            side.run()
        done = rounds.interleave(sides, journal, setup.budget, "host")
    finally:
        for engine in engines.values():
            engine.close()
    rows = [
        {
            "running": load.running,
            "queued": load.queued,
            "step_s": rounds.spread([r[_name(load)]["step_s"] for r in done]).median,
        }
        for load in loads
    ]
    free = [row for row in rows if row["queued"] == 0]
    slope, fixed = np.polyfit([row["running"] for row in free], [row["step_s"] for row in free], 1)
    summary = {"loads": rows, "fixed_us": fixed * 1e6, "per_sequence_us": slope * 1e6}
    return {"settings": settings, "rounds": done, "summary": summary}


def _name(load: Load) -> str:
    return f"{load.running} running, {load.queued} queued"


def _build(setup: Setup, workload: Workload, running: int) -> Engine:
    settings = {**setup.settings, "engine.max_seqs": running, "engine.max_queue": 8192}
    return build(ours.configure(workload, setup.dtype, settings)).engine


def _measure(engine: Engine, setup: Setup, load: Load) -> Sample:
    """Fills the slots and the queue, counts `steps` steps of decode, and empties both."""
    requests = _requests(setup, load)
    prompt_tokens = engine.stats().prompt_tokens + load.running * PROMPT
    for request in requests:
        engine.submit(request)
    while engine.stats().prompt_tokens < prompt_tokens:
        engine.step()
    before = engine.stats()
    for _ in range(load.steps):
        engine.step()
    after = engine.stats()
    for request in reversed(requests):  # the queue first, or it would move up
        engine.abort(request.id)
    while engine.busy:
        engine.step()
    host = after.host_step_s * after.steps - before.host_step_s * before.steps
    return {"step_s": host / load.steps, "steps": after.steps - before.steps, "waiting": after.waiting}


def _requests(setup: Setup, load: Load) -> list[Request]:
    names = adapter_names(setup.plan)
    tokens = setup.plan.spec.max_len - PROMPT
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = Request("", tuple(range(3, 3 + PROMPT)), sampling, bypass_prefix_cache=True)
    return [replace(request, id=f"host-{i}", adapter=names[i % len(names)]) for i in range(load.running + load.queued)]
