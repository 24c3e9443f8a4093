"""R3 on the real engine: every cache policy on the same workloads, memory and link.

    {W1 chat, W3 agents} x device of 25, 50, 75 % of the working set x link as of 2 and 10 GB/s

A small random Llama on this machine stands for Llama-2-7B on the paper's NPU. Three ratios are kept:

    adapter / context / pool    in blocks as in the paper: lengths, ranks and block are divided alike
    pool / working set          the cell's own percentage
    transfer / recompute        the link is slowed until copying a token's KV takes as many times as
                                long as computing it, as 0.5 MiB over the paper's link against 110 us

The trace is played faster, as fast as this machine can bear, and so is the policies' time: their
windows and the monitor's period are divided by the same factor. Every policy has an engine of its
own; a run begins with a flushed prefix cache and the trace's own history. Each round plays `jlora`
twice: the second run shows what chance alone does to a ratio.

On a CPU with two cores, run it with NPROC=1: XLA then computes on one, as a device does, and the
scheduler and the copies have the other.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.local import EngineTarget
from benchmarks.runner import Options
from jlora import config as configuration
from jlora.config import POLICIES, CacheConfig
from jlora.engine.build import build
from jlora.engine.engine import Engine
from jlora.layout import PoolLayout
from jlora.loadgen.checkpoints import SMALL, write_adapter, write_model
from jlora.loadgen.player import Call, Pace, Player, answers, differing
from jlora.loadgen.rounds import Sample, Side
from jlora.model.spec import ModelSpec
from jlora.sim import outcome
from jlora.sim.trace import Facts, Trace, facts
from jlora.sim.workloads import SOURCES, Load, play, ranks
from jlora.types import Request, SamplingParams

# Llama-2-7B on the paper's NPU: bytes of a token's KV, seconds to compute one.
PAPER_TOKEN_BYTES = 2**19
PAPER_TOKEN_S = 110e-6
PAPER_BLOCK_TOKENS = 32
PAPER_STEP_TOKENS = 1024
AT_ONCE = 1e6  # a trace played so much faster is due all at once
HOST_SHARE = 2.0  # host tier over working set: in the paper, 240 GB for 120 GB of open dialogs
LOAD = 0.3  # requests per second of the replay over what the machine can serve without misses
OURS, AGAIN = "jlora", "jlora, again"
SHARES = {"W1": 0.2, "W3": 0.3}  # `cache.share` of vllm-fair

LOADS = {
    "W1": Load(rate=1.36, seconds=88, gap_s=56, adapters=50, shrink=8, vocab=SMALL.vocab, max_len=SMALL.max_len),
    "W3": Load(rate=8, seconds=32, gap_s=8, adapters=52, shrink=4, vocab=SMALL.vocab, max_len=SMALL.max_len),
}
QUICK_LOADS = {"W1": replace(LOADS["W1"], rate=0.2, seconds=60, adapters=4)}
QUICK_SPEC = replace(SMALL, width=32, mlp=64, layers=1, heads=2, kv_heads=2, head_dim=16)
QUICK_SETTINGS = {"engine.max_seqs": 4, "engine.max_step_tokens": 32}  # few shapes to compile


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: a workload, the device's size as a share of its working set, the paper's link."""

    workload: str
    share: float
    gbps: float

    @property
    def name(self) -> str:
        """Of the cell."""
        return f"{self.workload} {self.share:.0%} {self.gbps:g} GB/s"


CELLS = tuple(Cell(name, share, gbps) for name in LOADS for share in (0.25, 0.5, 0.75) for gbps in (2.0, 10.0))
QUICK_CELLS = (Cell("W1", 1.0, 10.0),)  # so small a working set must hold one long request


def run(options: Options) -> None:
    """Measures all cells, one after the other."""
    loads, cells = (QUICK_LOADS, QUICK_CELLS) if options.quick else (LOADS, CELLS)
    policies = (OURS, "vllm") if options.quick else POLICIES
    settings = {"loads": {name: asdict(load) for name, load in loads.items()}, "data": bool(options.data)}
    records = options.records("policies-float32", settings)
    budget = replace(options.budget(5, quick=1), minutes=options.minutes / len(cells))
    for name, load in loads.items():
        workload = Workload(options, name, load)
        records.add(name, "workload", 0, workload.describe())
        for cell in (cell for cell in cells if cell.workload == name):
            with ExitStack() as stack:
                engines = {
                    side: stack.enter_context(closing(workload.engine(workload.settings(cell, policy))))
                    for side, policy in (*((p, p) for p in policies), (AGAIN, OURS))
                }
                sides = [Side(side, lambda e=engine, w=workload: w.sample(e)) for side, engine in engines.items()]
                records.measure(cell.name, sides, budget)


class Workload:
    """One workload's trace, its files, and what this machine does with it.

    Attributes:
        token_s: seconds to compute a prompt token; capacity: requests per second without misses.
    """

    def __init__(self, options: Options, name: str, load: Load):
        self.load, self._name = load, name
        self.trace: Trace = play(SOURCES[name](options.data), load)
        self._spec = QUICK_SPEC if options.quick else SMALL
        self._block_tokens = PAPER_BLOCK_TOKENS // load.shrink
        self._common = {**(QUICK_SETTINGS if options.quick else {"engine.max_seqs": 32}), **options.settings}
        self._write(options.folder("policies"))
        self._answers: dict[str, int] = {}  # of the first run: all others must give the same
        layout = PoolLayout.of(self._spec, 1, self._block_tokens)
        self._block_bytes = layout.block_bytes
        sizes = [4 * -(-rank // layout.units["q"].per_block) for rank in ranks(load)]
        self.facts: Facts = facts(self.trace, self._block_tokens, sizes)
        self.token_s, self.capacity = self._calibrate()

    @property
    def accelerated(self) -> float:
        """Seconds of the trace per second."""
        return LOAD * self.capacity / self.facts.rate

    def describe(self) -> dict[str, Any]:
        """The workload's facts, the scale, and what this machine does."""
        speed = {"token_us": self.token_s * 1e6, "capacity": self.capacity, "accelerated": self.accelerated}
        return {"trace": self.trace.name, "block_bytes": self._block_bytes, **speed, **self.facts.describe()}

    def settings(self, cell: Cell, policy: str) -> dict[str, Any]:
        """A policy's configuration in a cell, in the trace's time."""
        ratio = PAPER_TOKEN_BYTES / (cell.gbps * 1e9) / PAPER_TOKEN_S
        link = self._block_bytes / self._block_tokens / (ratio * self.token_s) / 1e9
        plain = CacheConfig()
        return {
            "cache.policy": policy,
            "cache.share": SHARES[cell.workload],
            "cache.hbm_blocks": int(cell.share * self.facts.working_set),
            "cache.link_gbps": link,
            "cache.tau_s": plain.tau_s / self.accelerated,
            "cache.monitor_s": plain.monitor_s / self.accelerated,
        }

    def engine(self, settings: Mapping[str, Any]) -> Engine:
        """An engine with all adapters."""
        return build(configuration.load(None, {**self._config, **settings}), progress=False).engine

    def sample(self, engine: Engine) -> Sample:
        """One pass of the trace at the accelerated pace."""
        calls, cache, seconds = asyncio.run(self._play(engine, self.accelerated))
        found = answers(calls)
        different = differing(found, self._answers)
        self._answers = {**found, **self._answers}
        good = [call for call in calls if call.ok]
        ttft = [call.ttft for call in good]
        timings = [call.timing for call in good]
        return {
            "requests": len(calls),
            "unfinished": len(calls) - len(good),
            "ttft_s": statistics.fmean(ttft),
            **{f"ttft_p{q}_s": float(np.percentile(ttft, q)) for q in (50, 99)},
            "tpot_s": statistics.fmean(call.tpot for call in good if len(call.tokens) > 1),
            "queue_s": statistics.fmean(t.queue for t in timings),
            "adapter_s": statistics.fmean(t.adapter_cold_start for t in timings),
            "kv_s": statistics.fmean(t.kv_cold_start for t in timings),
            "swap_s": statistics.fmean(map(outcome.swap_s, timings)),
            "tokens_per_s": sum(len(call.tokens) for call in good) / seconds,
            "different": different,
            **cache,
        }

    async def _play(self, engine: Engine, speed: float) -> tuple[list[Call], dict[str, float], float]:
        """The calls, what the cache did meanwhile, and the seconds it took."""
        engine.flush_cache()
        async with EngineTarget(engine) as target:
            player = Player(target, self.trace, self.trace.adapters, Pace(speed))
            await player.history()
            await target.settled()
            before, began = engine.cache_state(), time.perf_counter()
            calls = await player.play()
            seconds = time.perf_counter() - began
            await target.settled()
        engine.check_integrity()
        return calls, outcome.cache(before, engine.cache_state()), seconds

    def _write(self, work: Path) -> None:
        """Model and adapters, unless they are there; the configuration that all policies share."""
        write_model(work / "model", self._spec, seed=0)
        paths = {}
        for i, rank in enumerate(ranks(self.load)):
            path = work / f"{self._name}-adapters" / f"a{i}-{rank}"
            if not (path / "adapter_model.safetensors").exists():
                write_adapter(path, self._spec, rank, seed=1000 + i)
            paths[f"adapters.paths.a{i}"] = str(path)
        self._config = {
            "model.path": str(work / "model"),
            "model.name": self._spec.name,
            "model.dtype": "float32",
            "cache.block_tokens": self._block_tokens,
            "engine.max_step_tokens": PAPER_STEP_TOKENS // self.load.shrink,
            **paths,
            **self._common,
        }

    def _calibrate(self) -> tuple[float, float]:
        """Seconds of a prompt token and requests per second, with room for everything; the better of two tries."""
        blocks = 2 * self.facts.working_set
        seconds, capacity = [], []
        with closing(self.engine({"cache.policy": "lru", "cache.hbm_blocks": blocks})) as engine:
            for _ in range(2):
                seconds.append(_token_s(engine, self._spec, self.trace.adapters))
                calls, _, spent = asyncio.run(self._play(engine, AT_ONCE))
                capacity.append(len(calls) / spent)
        self._config["cache.host_blocks"] = int(HOST_SHARE * self.facts.working_set) + self.facts.adapter_blocks
        return min(seconds), max(capacity)


def _token_s(engine: Engine, spec: ModelSpec, adapters: tuple[str, ...]) -> float:
    """Seconds to compute a prompt token, in full steps of prompts as long as the context allows."""
    rng = np.random.default_rng(0)
    length, count = spec.max_len - 1, 8
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    for i in range(count):
        prompt = tuple(rng.integers(3, spec.vocab, length).tolist())
        engine.submit(Request(f"p{i}", prompt, sampling, adapters[i % 2], bypass_prefix_cache=True))
    while engine.busy:
        engine.step()
    return (time.perf_counter() - began) / (count * length)
