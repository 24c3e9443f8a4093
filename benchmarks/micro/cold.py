"""Time to the first token of a request whose adapter is not on the device, by the way it starts.

One engine for each link serves all ways in turn: wait, stream, cpu, and auto, which picks for each request. It
does so twice: by costs that it rehearses at its start, and by a file that `jlora doctor fit` wrote for this
engine (`engine.step_model`). The link is emulated in both directions, for copies and for the exchanges of the
host's help alike. The engine is stepped here, from one thread. Beside each time is what either predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.runner import Options
from jlora import config as configuration
from jlora.cache import inspect
from jlora.cache.readiness import Helps
from jlora.doctor import engine_fit
from jlora.doctor.engine_fit import Course
from jlora.engine import cold_start
from jlora.engine.build import Built, build, compile_rest
from jlora.engine.cold_start import Chooser
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_adapter, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.types import Request, SamplingParams, Timing

WAYS = ("wait", "stream", "cpu", "auto", "auto, file")
COURSE = Course({"fit": 2, "held": 1}, 3, 3.0)
BURST = 4  # requests at once, each for an adapter of its own
SETTINGS = {
    "engine.max_seqs": 4, "engine.max_step_tokens": 128, "engine.cold_start": "auto",
    "cache.monitor_s": 60, "cache.hbm_blocks": 1024, "cache.host_blocks": 4096,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that come at once, each for an adapter of its own."""

    gbps: float
    rank: int
    tokens: int
    requests: int = 1

    @property
    def name(self) -> str:
        """Of its cell."""
        burst = f", {self.requests} at once" if self.requests > 1 else ""
        return f"{self.gbps:g} GB/s, rank {self.rank}, {self.tokens} tokens{burst}"


RANKS, LINKS, PROMPTS = (16, 64, 128), (0.05, 0.5), (16, 64, 128)
CASES = (
    *(Case(gbps, rank, tokens) for gbps in LINKS for rank in RANKS for tokens in PROMPTS),
    *(Case(gbps, 64, tokens, BURST) for gbps in LINKS for tokens in (16, 64)),
)
QUICK = (Case(0.01, 4, 16), Case(0.01, 4, 16, 2))


def run(options: Options) -> None:
    """Every case, as many rounds as asked for (3)."""
    cases, spec = (QUICK, TINY) if options.quick else (CASES, LLAMA_100M)
    folder = options.folder("cold")
    if not (folder / "model").exists():
        write_model(folder / "model", spec, 0)
    names = _adapters(folder, cases)
    settings = {**SETTINGS, "model.path": str(folder / "model"), "model.dtype": options.dtype, **options.settings}
    records = options.records(f"cold-{options.dtype}", {"cases": [case.name for case in cases]})
    for gbps in sorted({case.gbps for case in cases}):
        linked = {**settings, "cache.link_gbps": gbps}
        linked["engine.step_model"] = str(_fitted(folder / f"steps-{options.dtype}-{gbps:g}.json", linked, options))
        linked |= {f"adapters.paths.{name}": str(folder / name) for name in names}
        built = compile_rest(build(configuration.load(None, linked)), progress=True)
        try:
            starts = _Starts(built)
            for case in cases:
                if case.gbps == gbps:
                    sides = [Side(way, partial(starts.sample, way, case)) for way in WAYS]
                    records.measure(case.name, sides, options.budget(3))
        finally:
            built.engine.close()


def _fitted(path: Path, settings: dict[str, Any], options: Options) -> Path:
    """The file of `jlora doctor fit` for an engine of these settings."""
    if not path.exists():
        built = engine_fit.started(settings["model.path"], settings)
        try:
            course = engine_fit.QUICK if options.quick else COURSE
            engine_fit.run(built, course, lambda what: print(what, flush=True)).steps.write(path)
        finally:
            built.engine.close()
    return path


def _adapters(folder: Path, cases: tuple[Case, ...]) -> list[str]:
    """Writes adapters of each rank, on q, k, v and o; their names."""
    spec, names = (TINY if cases is QUICK else LLAMA_100M), []
    for rank in sorted({case.rank for case in cases}):
        for index in range(BURST):
            names.append(f"r{rank}-{index}")
            if not (folder / names[-1]).exists():
                write_adapter(folder / names[-1], spec, rank, index)
    return names


def empty(built: Built) -> None:
    """Lets copies land, and evicts every adapter from the device."""
    manager = built.parts.scheduler.manager
    while manager.flying:
        built.engine.step()
    cells = inspect.cells(manager)
    while (node := cells.candidates.victim()) is not None:
        cells.evict(node)


def choose(built: Built, way: str, choosers: Mapping[str, Helps]) -> None:
    """Cold starts go that way from now on; `choosers` has those that pick a way for each request."""
    manager = built.parts.scheduler.manager
    choices: dict[str, Helps | None] = {"wait": None, "stream": None, "cpu": lambda *_: True, **choosers}
    manager.leases.gate.helps, inspect.cells(manager).streams = choices[way], way != "wait"


class _Starts:
    """Cold starts on one engine over one link."""

    def __init__(self, built: Built):
        self._built, self._engine, self._registry = built, built.engine, built.parts.registry
        self._manager = built.parts.scheduler.manager
        self._manager.policy.lower = 0.0  # an idle link prefetches nothing
        self._count = 0
        filed = self._manager.leases.gate.helps
        assert isinstance(filed, Chooser)
        costs = cold_start.measure(built.runner.rehearse, built.runner.largest)
        rehearsed = Chooser(costs, self._manager.policy.meter, built.runner.pool.groups, filed._places)
        self._choosers = {"auto": rehearsed, "auto, file": filed}
        for name in [info.name for info in self._engine.adapters.all()]:  # the meter learns the link
            self._serve("wait", [name], 2)

    def sample(self, way: str, case: Case) -> Sample:
        """Mean seconds to the first token, and what was predicted when a single request came."""
        timings, predicted = self._serve(way, [f"r{case.rank}-{i}" for i in range(case.requests)], case.tokens)
        kinds = [timing.cold_start for timing in timings]
        found = {kind: kinds.count(kind) for kind in set(kinds)}
        ttft_s = sum(timing.ttft for timing in timings) / len(timings)
        return {"ttft_s": ttft_s, "kinds": found, **(predicted if case.requests == 1 else {})}

    def _serve(self, way: str, names: list[str], tokens: int) -> tuple[list[Timing], Sample]:
        engine = self._engine
        empty(self._built)
        choose(self._built, way, self._choosers)
        predicted = self._predicted(way, names[0], tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        like = Request("", tuple(range(3, 3 + tokens)), sampling, bypass_prefix_cache=True)
        for name in names:
            self._count += 1
            engine.submit(replace(like, id=f"cold-{self._count}", adapter=name))
        timings: list[Timing] = []
        while len(timings) < len(names):
            timings += [event.timing for event in engine.step() if event.timing is not None]
        return timings, predicted

    def _predicted(self, way: str, name: str, tokens: int) -> Sample:
        """Seconds to the first token, by either costs."""
        adapter, found = self._registry.get(name).node, {}
        for side, key in (("auto", "rehearsed_s"), ("auto, file", "file_s")):
            chooser = self._choosers[side]
            cold = chooser.cold(adapter, self._manager.forecast.arrival_s(adapter), tokens)
            told = cold_start.predict(cold, chooser.costs)
            if way in told or way == side:
                found[key] = told[way] if way in told else min(told.values())
        return found
