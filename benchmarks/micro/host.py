"""Python's time per engine step against running sequences, queued requests and registered adapters (R7, R10).

A tiny model, so that little of the time is the device's; the host does the same work as for a large
one: planning, packing the batch, dispatch, reading and committing the tokens. Measured over decode
steps with every slot taken and the stated queue. The engine is stepped here, from one thread, so
that exactly those steps are counted. Running sequences use the same few adapters whatever is
registered; the queue's requests take turns over all.
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
USED = 4  # adapters of the running sequences
SPEC = replace(TINY, max_len=2048)  # room for sequences that outlast the measurement


@dataclass(frozen=True, slots=True)
class Load:
    """How many sequences run, requests wait behind them, steps are counted, and adapters are registered."""

    running: int
    queued: int
    steps: int
    registered: int = USED

    @property
    def name(self) -> str:
        """Of its side."""
        many = f", {self.registered} adapters" if self.registered > USED else ""
        return f"{self.running} running, {self.queued} queued{many}"


LOADS = (
    *(Load(running, 0, 64) for running in (1, 4, 16, 64)),
    *(Load(64, queued, 64) for queued in (256, 2048, 10_000)),
    *(Load(64, queued, 64, 2000) for queued in (0, 10_000)),
)
QUICK = (Load(1, 0, 8), Load(4, 0, 8), Load(4, 32, 8), Load(4, 32, 8, 12))


def run(options: Options) -> None:
    """Seconds of host time per step for every load."""
    loads = QUICK if options.quick else LOADS
    workloads = {
        count: prepare(Plan(SPEC, adapters=count, rank=4), options.folder("host") / f"workload-{count}")
        for count in {load.registered for load in loads}
    }
    records = options.records(f"host-{options.dtype}", {"workload": workloads[USED].plan.describe()})
    engines: dict[tuple[int, int], Engine] = {}
    try:
        for running, count in sorted({(load.running, load.registered) for load in loads}):
            settings = {**options.settings, "engine.max_seqs": running, "engine.max_queue": 16_384}
            config = configure(workloads[count], options.dtype, settings)
            engines[running, count] = compile_rest(build(config)).engine
        sides = [
            Side(load.name, lambda load=load: _measure(engines[load.running, load.registered], load)) for load in loads
        ]
        for side in sides:
            side.run()  # not counted: first touches
        records.measure("rounds", sides, options.budget(5))
    finally:
        for engine in engines.values():
            engine.close()


def _measure(engine: Engine, load: Load) -> Sample:
    """Fills the slots and the queue, counts steps of decode, and empties both."""
    sampling = SamplingParams(temperature=0.0, max_tokens=SPEC.max_len - PROMPT, ignore_eos=True)
    like = Request("", tuple(range(3, 3 + PROMPT)), sampling, bypass_prefix_cache=True)
    adapters = [i % USED for i in range(load.running)] + [i % load.registered for i in range(load.queued)]
    requests = [replace(like, id=f"host-{i}", adapter=f"a{adapter}") for i, adapter in enumerate(adapters)]
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
    facts = {"running": load.running, "queued": load.queued, "adapters": load.registered}
    return {**facts, "step_s": host / steps, "steps": steps}
