"""R3 on the real engine: every cache policy on the same workloads, memory and link.

    {W1 chat, W3 agents} x device of 25, 50, 75 % of the working set x link as of 2 and 10 GB/s

A small random Llama on this machine stands for Llama-2-7B on the paper's NPU. Three ratios are kept:

    adapter / context / pool    in blocks as in the paper: lengths, ranks and block are divided alike
    pool / working set          the cell's own percentage
    transfer / recompute        the link is slowed until copying a token's KV takes as many times as
                                long as computing it, as 0.5 MiB over the paper's link against 110 us

and the trace is played faster, as fast as this machine can bear: what a policy knows of time runs
with the trace. The device's side (weights, programs, pool array) is built once per workload; every
run has a new cache and scheduler over it, so that no run sees what another left.

Each round plays one policy a second time, as a side of its own: what that run says of
the first is what chance alone does to a ratio of this round.

On a CPU, run it with NPROC=1 if there are two cores: XLA then computes on one, as a device does,
and the scheduler and the copies have the other. A model this small loses nothing by it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import policy_page, rounds
from benchmarks.replay import Replay, differing
from benchmarks.rounds import Budget, Journal, Sample, Side
from jlora import config as configuration
from jlora import machine
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.manager import CacheManager
from jlora.cache.pool import HostPool
from jlora.cache.swapper import Swapper
from jlora.config import POLICIES, Config
from jlora.engine import build
from jlora.engine.engine import Engine, Shape
from jlora.engine.loading import NewAdapter
from jlora.engine.ports import Parts
from jlora.engine.scheduler import Scheduler
from jlora.layout import PoolLayout
from jlora.loadgen import checkpoints as workload
from jlora.loadgen.checkpoints import SMALL, Plan
from jlora.model import checkpoint
from jlora.model.spec import ModelSpec
from jlora.ports import System
from jlora.sim.trace import Facts, Trace, facts
from jlora.sim.workloads import SOURCES, Load, play, ranks
from jlora.types import Request, SamplingParams

# Llama-2-7B on the paper's NPU: bytes of a token's KV, seconds to compute one.
PAPER_TOKEN_BYTES = 2**19
PAPER_TOKEN_S = 110e-6
PAPER_BLOCK_TOKENS = 32
PAPER_STEP_TOKENS = 1024
AT_ONCE = 1e6  # a trace played so much faster is due all at once
STRIDE = 4  # sides that the next round's order is turned by: no two of few rounds begin alike
HOST_SHARE = 2.0  # host tier over working set: in the paper, 240 GB for 120 GB of open dialogs


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: a workload, the device's size as a share of its working set, the paper's link."""

    workload: str
    share: float
    gbps: float

    @property
    def name(self) -> str:
        return f"{self.workload} {self.share:.0%} {self.gbps:g} GB/s"


@dataclass(frozen=True, slots=True)
class Setup:
    """How the comparison is run.

    Attributes:
        loads: by workload; `rate` is in the trace's own time.
        load: requests per second of the replay over what the machine can serve without misses.
        fair: `cache.share` of vllm-fair, by workload.
        data: directory of the public traces; None draws the synthetic equivalents.
    """

    loads: Mapping[str, Load]
    cells: tuple[Cell, ...]
    policies: tuple[str, ...]
    fair: Mapping[str, float]
    budget: Budget
    work: Path
    data: Path | None = None
    load: float = 0.3
    spec: ModelSpec = SMALL
    settings: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """What makes two runs comparable."""
        return {
            "model": {**asdict(self.spec), "parameters": self.spec.parameters},
            "loads": {name: asdict(load) for name, load in self.loads.items()},
            "fair": dict(self.fair),
            "load": self.load,
            "data": "public traces" if self.data else "synthetic",
            "settings": dict(self.settings),
            "threads": machine.threads(),
            "device_threads": int(os.environ.get("NPROC", machine.threads())),
            "versions": machine.versions(),
        }


LOADS = {
    "W1": Load(rate=1.36, seconds=88, gap_s=56, adapters=50, shrink=8, vocab=SMALL.vocab, max_len=SMALL.max_len),
    "W3": Load(rate=8, seconds=32, gap_s=8, adapters=52, shrink=4, vocab=SMALL.vocab, max_len=SMALL.max_len),
}
CELLS = tuple(Cell(name, share, gbps) for name in LOADS for share in (0.25, 0.5, 0.75) for gbps in (2.0, 10.0))
FAIR = {"W1": 0.2, "W3": 0.3}
QUICK_LOADS = {"W1": replace(LOADS["W1"], rate=0.2, seconds=60, adapters=4)}
QUICK_CELLS = (Cell("W1", 1.0, 10.0),)  # so small a working set must hold one long request
QUICK_POLICIES = ("jlora", "vllm")
QUICK_SPEC = replace(SMALL, width=32, mlp=64, layers=1, heads=2, kv_heads=2, head_dim=16)
QUICK_SETTINGS = {"engine.max_seqs": 4, "engine.max_step_tokens": 32}  # few shapes to compile


def full(budget: Budget, work: Path, data: Path | None) -> Setup:
    """All cells and policies."""
    return Setup(LOADS, CELLS, POLICIES, FAIR, budget, work, data)


def quick(budget: Budget, work: Path, data: Path | None) -> Setup:
    """One small cell, two policies: whether it works at all."""
    setup = Setup(QUICK_LOADS, QUICK_CELLS, QUICK_POLICIES, FAIR, budget, work, data)
    return replace(setup, spec=QUICK_SPEC, settings=QUICK_SETTINGS)


@dataclass(frozen=True, slots=True)
class Speed:
    """What this machine does: seconds to compute a prompt token, requests per second without misses."""

    token_s: float
    capacity: float


def run(setup: Setup) -> dict[str, Any]:
    """Measures all cells; returns settings, facts of the workloads, every round and the medians.

    Round after round over all cells, so that a run cut short has complete rounds.
    """
    benches: dict[str, Bench] = {}
    try:
        for name in dict.fromkeys(cell.workload for cell in setup.cells):
            benches[name] = Bench(setup, name)
            print(policy_page.facts_line(name, benches[name].describe()), flush=True)
        journals = {cell: benches[cell.workload].journal(cell) for cell in setup.cells}
        for count in range(1, setup.budget.rounds + 1):
            for cell, journal in journals.items():
                benches[cell.workload].measure(cell, journal, replace(setup.budget, rounds=count))
        return {
            "settings": setup.describe(),
            "workloads": {name: bench.describe() for name, bench in benches.items()},
            "cells": [benches[cell.workload].result(cell, journal.rounds) for cell, journal in journals.items()],
        }
    finally:
        for bench in benches.values():
            bench.close()


class Bench:
    """One workload's trace and adapters, and the device that plays it."""

    def __init__(self, setup: Setup, name: str):
        self.setup = setup
        self.load = setup.loads[name]
        self.trace: Trace = play(SOURCES[name](setup.data), self.load)
        self._block_tokens = PAPER_BLOCK_TOKENS // self.load.shrink
        self._config = self._configure(name)
        self._spec = checkpoint.read_spec(checkpoint.resolve(self._config.model.path), "float32", 0)
        layout = build.choose_layout(self._config, self._spec, 2**40)
        self._adapters = self._read(layout)
        sizes = [len(new.projections) for new in self._adapters]
        self.facts: Facts = facts(self.trace, self._block_tokens, sizes)
        # With room for all of it and as much again, so that any cell fits and nothing is missed.
        self._layout = replace(layout, blocks=2 * self.facts.working_set + 1)
        self._host_blocks = int(HOST_SHARE * self.facts.working_set) + sum(sizes)
        self._host = HostPool(self._layout, self._host_blocks)
        self._answers: dict[str, int] = {}  # of the first run: all others must give the same
        self._registry = AdapterRegistry()
        names = lambda uid: self._registry.by_uid(uid).projections  # noqa: E731  of the run that is on
        self._runner, self._pool = build.build_device(self._config, self._spec, self._layout, names, progress=True)
        build.warm_up(self._runner, progress=True)
        self.speed = self._calibrate(setup.work / f"{name}-speed.json")

    @property
    def accelerated(self) -> float:
        """Seconds of the trace per second."""
        return self.setup.load * self.speed.capacity / self.facts.rate

    def link(self, gbps: float) -> float:
        """The GB/s that stand for the paper's: transfer over recompute is the same."""
        ratio = PAPER_TOKEN_BYTES / (gbps * 1e9) / PAPER_TOKEN_S
        return self._layout.block_bytes / self._block_tokens / (ratio * self.speed.token_s) / 1e9

    def journal(self, cell: Cell) -> Journal:
        """The cell's finished rounds, if they were made under the same settings."""
        settings = {**self.setup.describe(), "cell": asdict(cell), "speed": asdict(self.speed)}
        return Journal(self.setup.work / f"{cell.name.replace(' ', '-').replace('/', '')}.jsonl", settings)

    def measure(self, cell: Cell, journal: Journal, budget: Budget) -> None:
        """All policies and the control in turn, as many rounds as the budget has; each begins with another side.

        A machine that slows down in the course of a round then favours nobody.
        """
        sides = [Side(p, lambda p=p: self._sample(cell, p)) for p in self.setup.policies]
        sides.append(Side(policy_page.AGAIN, lambda: self._sample(cell, policy_page.OURS)))
        first = STRIDE * budget.rounds % len(sides)
        sides = [*sides[first:], *sides[:first]]
        rounds.interleave(sides, journal, budget, f"{cell.name}, round {budget.rounds}")

    def result(self, cell: Cell, done: Sequence[Mapping[str, Sample]]) -> dict[str, Any]:
        """The cell's rounds and their medians."""
        medians = {p: {key: float(np.median([r[p][key] for r in done])) for key in done[0][p]} for p in done[0]}
        sizes = {"device_blocks": self._device_blocks(cell), "link_gbps": self.link(cell.gbps)}
        return {**asdict(cell), **sizes, "rounds": list(done), "median": medians}

    def describe(self) -> dict[str, Any]:
        """The workload's facts, the scale, and what this machine does."""
        token_bytes = self._layout.block_bytes / self._block_tokens
        return {
            "trace": self.trace.name,
            "facts": self.facts.describe(),
            "adapter_blocks": sorted({len(new.projections) for new in self._adapters}),
            "block_tokens": self._block_tokens,
            "block_bytes": self._layout.block_bytes,
            "token_bytes": token_bytes,
            "host_blocks": self._host_blocks,
            "token_us": self.speed.token_s * 1e6,
            "capacity": self.speed.capacity,
            "requests_per_s": self.setup.load * self.speed.capacity,
            "accelerated": self.accelerated,
            "compiles_after_warmup": self._runner.compiles_after_warmup,
            "links": {f"{g:g}": self.link(g) for g in sorted({cell.gbps for cell in self.setup.cells})},
        }

    def close(self) -> None:
        """Frees the device."""
        self._runner.close()

    # -- inside -----------------------------------------------------------------------------

    def _configure(self, name: str) -> Config:
        """Writes model and adapters, unless they are there; the configuration that all policies share."""
        setup, load = self.setup, self.load
        plan = Plan(setup.spec, 0, (1, 1), (1, 1), adapters=0)
        model = workload.prepare(plan, setup.work / "model").model
        directory = setup.work / f"{name}-adapters"
        for i, rank in enumerate(ranks(load)):
            if not (directory / f"a{i}-{rank}" / "adapter_model.safetensors").exists():
                workload.write_adapter(directory / f"a{i}-{rank}", replace(plan, rank=rank), seed=1000 + i)
        paths = {f"adapters.paths.a{i}": str(directory / f"a{i}-{rank}") for i, rank in enumerate(ranks(load))}
        return configuration.load(
            None,
            {
                "model.path": str(model),
                "model.name": setup.spec.name,
                "model.dtype": "float32",
                "cache.block_tokens": self._block_tokens,
                "engine.max_seqs": 32,
                "engine.max_step_tokens": PAPER_STEP_TOKENS // load.shrink,
                **paths,
                **setup.settings,
            },
        )

    def _read(self, layout: PoolLayout) -> list[NewAdapter]:
        paths, system = self._config.adapters.paths, System()
        most = self._config.adapters.max_rank
        reader = build.Reader(self._spec, layout, most, (self._spec.name,), system.files, system.clock)
        return [build.read_adapter(name, paths[name], reader) for name in self.trace.adapters]

    def _device_blocks(self, cell: Cell) -> int:
        return int(cell.share * self.facts.working_set)

    def _sample(self, cell: Cell, policy: str) -> Sample:
        settings = {"cache.policy": policy, "cache.share": self.setup.fair[cell.workload]}
        settings["cache.link_gbps"] = self.link(cell.gbps)
        with self._replica(settings, self._device_blocks(cell), self.accelerated) as (engine, manager):
            sample = Replay(engine, manager, self.trace, self.accelerated).run()
        answers = sample.pop("answers")
        sample["different"] = differing(answers, self._answers)
        self._answers = {**answers, **self._answers}
        return {key: float(f"{value:.6g}") for key, value in sample.items()}

    @contextmanager
    def _replica(
        self, settings: Mapping[str, Any], device_blocks: int, accelerated: float
    ) -> Iterator[tuple[Engine, CacheManager]]:
        """A new cache and scheduler over the device, with all adapters; policies live in the trace's time."""
        config = configuration.replace(self._config, settings)
        config = configuration.replace(config, {"cache.monitor_s": config.cache.monitor_s / accelerated})
        layout = replace(self._layout, blocks=device_blocks + 1)

        def clock() -> float:
            return accelerated * time.monotonic()

        manager = build.make_manager(config, layout, self._host_blocks, clock, streams=self._pool.groups > 1)
        scheduler = Scheduler(manager, config.engine, self._spec.eos_ids)
        swapper = Swapper(self._pool, self._host, config.cache.link_gbps)
        self._registry = AdapterRegistry()
        parts = Parts(scheduler, self._registry, self._runner, swapper, time.monotonic)
        engine = Engine(parts, Shape(self._spec.max_len, self._layout.block_bytes, config.engine.overlap))
        try:
            for new in self._adapters:
                engine.adapters.add(new)
            yield engine, manager
        finally:
            swapper.close()

    def _calibrate(self, path: Path) -> Speed:
        """Measures this machine once; the same numbers serve all cells, and a run that goes on."""
        head = self.setup.describe()
        known = json.loads(path.read_text()) if path.exists() else {}
        if known.get("of") != json.loads(json.dumps(head, default=str)):
            seconds, capacity = [], []
            for _ in range(2):
                with self._replica({"cache.policy": "lru"}, self._layout.blocks - 1, 1.0) as (engine, manager):
                    seconds.append(self._token_s(engine))
                    sample = Replay(engine, manager, self.trace, AT_ONCE, grace=float("inf")).run()
                    capacity.append(sample["requests"] / sample["seconds"])
            known = {"of": head, "token_s": min(seconds), "capacity": max(capacity)}
            path.write_text(json.dumps(known, default=str))
        return Speed(known["token_s"], known["capacity"])

    def _token_s(self, engine: Engine) -> float:
        """Seconds to compute a prompt token, in full steps of prompts as long as the context allows."""
        rng = np.random.default_rng(0)
        length, count = self._spec.max_len - 1, 8
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        began = time.perf_counter()
        for i in range(count):
            prompt = tuple(rng.integers(3, self._spec.vocab, length).tolist())
            engine.submit(Request(f"p{i}", prompt, sampling, self.trace.adapters[i % 2], bypass_prefix_cache=True))
        while engine.busy:
            engine.step()
        return (time.perf_counter() - began) / (count * length)
