"""Python's time per engine step against running sequences and queued requests (R7, R10).

A tiny model, so that little of the time is the device's; the host does the same work as for a large
one: planning, packing the batch, dispatch, reading and committing the tokens. Measured over decode
steps with every slot taken and the stated queue. The engine is stepped here, from one thread, so
that exactly those steps are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.jobs import Plan, prepare
from benchmarks.peers.ours import configure
from benchmarks.runner import Options
from jlora.engine.build import build, compile_rest
from jlora.engine.engine import Engine
from jlora.loadgen.checkpoints import TINY
from jlora.loadgen.rounds import Sample, Side
from jlora.types import Request, SamplingParams

PROMPT = 16
SPEC = replace(TINY, max_len=2048)  # room for sequences that outlast the measurement


@dataclass(frozen=True, slots=True)
class Load:
    """How many sequences run, how many requests wait behind them, and for how many steps."""

    running: int
    queued: int
    steps: int

    @property
    def name(self) -> str:
        """Of its side."""
        return f"{self.running} running, {self.queued} queued"


LOADS = tuple(Load(running, 0, 64) for running in (1, 4, 16, 64)) + tuple(Load(64, n, 64) for n in (256, 2048))
QUICK = (Load(1, 0, 8), Load(4, 0, 8), Load(4, 32, 8))


def run(options: Options) -> None:
    """Seconds of host time per step for every load."""
    loads = QUICK if options.quick else LOADS
    workload = prepare(Plan(SPEC, adapters=4, rank=4), options.folder("host") / "workload")
    records = options.records(f"host-{options.dtype}", {"workload": workload.plan.describe()})
    engines: dict[int, Engine] = {}
    try:
        for running in sorted({load.running for load in loads}):
            settings = {**options.settings, "engine.max_seqs": running, "engine.max_queue": 8192}
            engines[running] = compile_rest(build(configure(workload, options.dtype, settings))).engine
        sides = [
            Side(load.name, lambda load=load: _measure(engines[load.running], load, workload.plan.names))
            for load in loads
        ]
        for side in sides:
            side.run()  # not counted: first touches
        records.measure("rounds", sides, options.budget(5))
    finally:
        for engine in engines.values():
            engine.close()


def _measure(engine: Engine, load: Load, adapters: list[str]) -> Sample:
    """Fills the slots and the queue, counts steps of decode, and empties both."""
    sampling = SamplingParams(temperature=0.0, max_tokens=SPEC.max_len - PROMPT, ignore_eos=True)
    like = Request("", tuple(range(3, 3 + PROMPT)), sampling, bypass_prefix_cache=True)
    count = load.running + load.queued
    requests = [replace(like, id=f"host-{i}", adapter=adapters[i % len(adapters)]) for i in range(count)]
    prompt_tokens = engine.stats().prompt_tokens + load.running * PROMPT
    handles = [engine.submit(request) for request in requests]
    while engine.stats().prompt_tokens < prompt_tokens:
        engine.step()
    before = engine.stats()
    for _ in range(load.steps):
        engine.step()
    after = engine.stats()
    for handle in reversed(handles):  # the queue first, or it would move up
        engine.abort(handle)
    while engine.busy:
        engine.step()
    host = after.host_step_s * after.steps - before.host_step_s * before.steps
    steps = after.steps - before.steps
    return {"running": load.running, "queued": load.queued, "step_s": host / steps, "steps": steps}
