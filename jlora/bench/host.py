"""R7 and R10: Python's time per engine step against running sequences and queued requests.

A tiny model, so that little of the time is the device's; everything the host does is the same as
for a large one: planning, packing the batch, dispatch, reading and committing the tokens.
Measured over decode steps with all slots taken and the queue as long as stated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jlora.bench import ours, rounds
from jlora.bench.rounds import Journal, Sample, Side
from jlora.bench.throughput import Setup
from jlora.bench.workload import TINY, Plan, Workload, adapter_names, prepare
from jlora.engine.engine import EngineStats
from jlora.engine.service import Service
from jlora.types import Request, SamplingParams, TokenEvent

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
    services = {n: _start(setup, workload, n) for n in sorted({load.running for load in loads})}
    try:
        sides = [Side(_name(load), lambda load=load: _measure(services[load.running], setup, load)) for load in loads]
        for side in sides:
            side.run()
        done = rounds.interleave(sides, journal, setup.budget, "host")
    finally:
        for service in services.values():
            service.stop()
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


def _start(setup: Setup, workload: Workload, running: int) -> Service:
    settings = {**setup.settings, "engine.max_seqs": running, "engine.max_queue": 8192}
    return Service.start(ours.configure(workload, setup.dtype, settings), progress=True)


def _measure(service: Service, setup: Setup, load: Load) -> Sample:
    """Fills the slots and the queue, lets `steps` steps pass, and empties both."""
    requests = _requests(setup, load)
    prompt_tokens = service.stats().prompt_tokens + load.running * PROMPT
    # Each call waits for the engine's next round; many at once share one.
    with ThreadPoolExecutor(64) as callers:
        list(callers.map(lambda request: service.submit(request, _ignore), requests))
        try:
            before = _wait(service, lambda s: s.waiting == load.queued and s.prompt_tokens >= prompt_tokens)
            after = _wait(service, lambda s: s.steps >= before.steps + load.steps)
        finally:
            list(callers.map(lambda request: service.abort(request.id), reversed(requests)))
    _wait(service, lambda s: s.live_requests == 0)
    host = after.host_step_s * after.steps - before.host_step_s * before.steps
    return {"step_s": host / (after.steps - before.steps), "steps": after.steps - before.steps}


def _requests(setup: Setup, load: Load) -> list[Request]:
    names = adapter_names(setup.plan)
    tokens = setup.plan.spec.max_len - PROMPT
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = Request("", tuple(range(3, 3 + PROMPT)), sampling, bypass_prefix_cache=True)
    return [replace(request, id=f"host-{i}", adapter=names[i % len(names)]) for i in range(load.running + load.queued)]


def _ignore(events: list[TokenEvent]) -> None:
    """The tokens are of no interest."""


def _wait(service: Service, ready: Callable[[EngineStats], bool]) -> EngineStats:
    end = time.monotonic() + 120
    while not ready(stats := service.stats()):
        if time.monotonic() > end:
            raise RuntimeError(f"the load never came about: {stats}")
        time.sleep(0.001)
    return stats
