"""Python's time per engine step against running sequences, queued requests and registered adapters (R7, R10).

A tiny model, so that little of the time is the device's; the host does the same work as for a large
one: planning, packing the batch, dispatch, reading and committing the tokens. Measured over decode
steps with every slot taken and the stated queue. The engine is stepped here, from one thread, so
that exactly those steps are counted. Running sequences use the same few adapters whatever is
registered; the queue's requests take turns over all.

Where a load names a device, each step also takes that long on it. The device runs one step after the other, so
what it waits for between two is the part of the host's work that does not hide behind it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from benchmarks.jobs import Plan, prepare
from benchmarks.peers.ours import configure
from benchmarks.runner import Options
from jlora.engine.build import Built, build, compile_rest
from jlora.engine.engine import Engine, Shape
from jlora.engine.plan import Drawn, StepPlan
from jlora.engine.ports import Pending, Runner, Swapper
from jlora.loadgen.checkpoints import TINY
from jlora.loadgen.rounds import Sample, Side
from jlora.types import Request, SamplingParams

PROMPT = 16
USED = 4  # adapters of the running sequences
SPEC = replace(TINY, max_len=2048)  # room for sequences that outlast the measurement


@dataclass(frozen=True, slots=True)
class Load:
    """How many sequences run, requests wait behind them, steps are counted, and adapters are registered.

    `device_s` is how long a step takes on the device at least.
    """

    running: int
    queued: int
    steps: int
    registered: int = USED
    device_s: float = 0.0

    @property
    def name(self) -> str:
        """Of its side."""
        many = f", {self.registered} adapters" if self.registered > USED else ""
        device = f", device {1e3 * self.device_s:g} ms" if self.device_s else ""
        return f"{self.running} running, {self.queued} queued{many}{device}"


LOADS = (
    *(Load(running, 0, 64) for running in (1, 4, 16, 64)),
    *(Load(64, queued, 64) for queued in (256, 2048, 10_000)),
    *(Load(64, queued, 64, 2000) for queued in (0, 10_000)),
    *(Load(running, 0, 64, device_s=0.005) for running in (1, 64)),
    Load(64, 10_000, 64, 2000, device_s=0.005),
)
QUICK = (Load(1, 0, 8), Load(4, 0, 8), Load(4, 32, 8), Load(4, 32, 8, 12), Load(4, 0, 8, device_s=0.002))


def run(options: Options) -> None:
    """Seconds of host time per step for every load, and seconds per step that the device waits."""
    loads = QUICK if options.quick else LOADS
    workloads = {
        count: prepare(Plan(SPEC, adapters=count, rank=4), options.folder("host") / f"workload-{count}")
        for count in {load.registered for load in loads}
    }
    records = options.records(f"host-{options.dtype}", {"workload": workloads[USED].plan.describe()})
    engines: dict[tuple[int, int], _Timed] = {}
    try:
        for running, count in sorted({(load.running, load.registered) for load in loads}):
            settings = {**options.settings, "engine.max_seqs": running, "engine.max_queue": 16_384}
            config = configure(workloads[count], options.dtype, settings)
            engines[running, count] = _timed(compile_rest(build(config)))
        sides = [
            Side(load.name, lambda load=load: _measure(engines[load.running, load.registered], load)) for load in loads
        ]
        for side in sides:
            side.run()  # not counted: first touches
        records.measure("rounds", sides, options.budget(5))
    finally:
        for timed in engines.values():
            timed.engine.close()


@dataclass(frozen=True, slots=True)
class _Timed:
    engine: Engine
    device: Device


def _timed(built: Built) -> _Timed:
    device = Device(built.parts.runner)
    info = built.info
    shape = Shape(info.limits.max_len, info.block_bytes, info.config.engine.overlap)
    return _Timed(Engine(replace(built.parts, runner=device), shape), device)


class Device:
    """A runner whose steps take `step_s` at least. `idle_s` is how long it has waited for a step after the last one."""

    compiling = False
    compiled_at = 0.0
    programs_left = 0

    def __init__(self, runner: Runner):
        self._runner = runner
        self._free_at = 0.0
        self.step_s = 0.0
        self.idle_s = 0.0

    def run(self, plan: StepPlan, swapper: Swapper) -> Pending:
        pending, now = self._runner.run(plan, swapper), time.monotonic()
        self.idle_s += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + self.step_s
        return _Step(pending, self._free_at) if self.step_s else pending

    @property
    def compiles_after_warmup(self) -> int:
        return self._runner.compiles_after_warmup

    def close(self) -> None:
        self._runner.close()


class _Step:
    """A dispatched step, see `jlora.engine.ports.Pending`; it ends at `end` of the monotonic clock."""

    def __init__(self, pending: Pending, end: float):
        self.plan, self.dispatched, self.stalled_s = pending.plan, pending.dispatched, pending.stalled_s
        self._pending, self._end = pending, end

    def read(self) -> list[Drawn]:
        drawn = self._pending.read()
        time.sleep(max(0.0, self._end - time.monotonic()))
        return drawn


def _measure(timed: _Timed, load: Load) -> Sample:
    """Fills the slots and the queue, counts steps of decode, and empties both."""
    engine, device = timed.engine, timed.device
    sampling = SamplingParams(temperature=0.0, max_tokens=SPEC.max_len - PROMPT, ignore_eos=True)
    like = Request("", tuple(range(3, 3 + PROMPT)), sampling, bypass_prefix_cache=True)
    adapters = [i % USED for i in range(load.running)] + [i % load.registered for i in range(load.queued)]
    requests = [replace(like, id=f"host-{i}", adapter=f"a{adapter}") for i, adapter in enumerate(adapters)]
    prompt_tokens = engine.stats().prompt_tokens + load.running * PROMPT
    handles = [engine.submit(request) for request in requests]
    while engine.stats().prompt_tokens < prompt_tokens:
        engine.step()
    device.step_s = load.device_s
    engine.step()  # the first one on the device
    before, idle_s = engine.stats(), device.idle_s
    for _ in range(load.steps):
        engine.step()
    after, idle_s = engine.stats(), device.idle_s - idle_s
    device.step_s = 0.0
    for handle in reversed(handles):  # the queue first, or it would move up
        engine.abort(handle)
    while engine.busy:
        engine.step()
    host = after.host_step_s * after.steps - before.host_step_s * before.steps
    steps = after.steps - before.steps
    facts = {"running": load.running, "queued": load.queued, "adapters": load.registered}
    idle = {"idle_s": idle_s / steps} if load.device_s else {}
    return {**facts, "step_s": host / steps, "steps": steps, **idle}
