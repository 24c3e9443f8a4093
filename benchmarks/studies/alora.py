"""R6: pipelines of the base and adapters over one conversation, with activated LoRAs and with LoRAs.

    x                      a context of so many tokens
    base(x) -> y
    check 1(x y) -> r      a first adapter reads along
    base(x y r) -> z
    check 1..n(x y r z)    all of them, at the same time
    base(x y r z r1..rn)

Each check is one set of weights in two files: with an invocation, so that it acts from there on and
all before it is the base's KV, and without one, so that it is a plain LoRA with KV of its own.
Prompts and output lengths are the same, both sides run in one engine in turn, each from an
empty cache, and what they answer must be the same in every round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.jobs import Job
from benchmarks.peers.ours import InProcess
from benchmarks.runner import Options
from jlora import config as configuration
from jlora.config import Config
from jlora.loadgen.checkpoints import write_adapter, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.model.spec import ModelSpec

SPEC = ModelSpec(
    vocab=2048, width=256, mlp=704, layers=6, heads=8, kv_heads=4, head_dim=32, max_len=8192, name="random-5m"
)
QUICK_SPEC = replace(SPEC, vocab=256, width=64, mlp=96, layers=2, heads=4, kv_heads=2, head_dim=16, max_len=512)
SHARED, ALONE = "activated", "lora"  # the two sides
BLOCK_TOKENS = 16
ADAPTER_BLOCKS = 40  # at most, of an adapter's two files
RESERVED = 32  # token ids kept out of texts: invocations are made of them


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: tokens of context, adapters in the second round of checks, pipelines at once."""

    context: int
    adapters: int
    sessions: int = 1

    @property
    def name(self) -> str:
        at_once = f", {self.sessions} at once" if self.sessions > 1 else ""
        return f"{self.context} tokens, {self.adapters} adapters{at_once}"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is run.

    Attributes:
        base_tokens, check_tokens: of every answer of the base and of an adapter.
        rank: of every adapter, on q, k, v and o.
    """

    spec: ModelSpec
    cells: tuple[Cell, ...]
    work: Path
    base_tokens: int = 64
    check_tokens: int = 16
    rank: int = 16
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adapters(self) -> int:
        """How many adapters the cells need."""
        return max(cell.adapters for cell in self.cells)


CELLS = (
    *(Cell(context, 5) for context in (512, 1024, 2048, 4096)),
    Cell(2048, 1),
    Cell(2048, 10),
    Cell(1024, 5, sessions=4),
)
# The pool has room for everything and nothing is copied: both sides at their best.
SETTINGS = {
    "engine.max_seqs": 16,
    "engine.max_step_tokens": 512,
    "engine.layers": "scan",
    "cache.block_tokens": BLOCK_TOKENS,
    "cache.monitor_s": 60,
}
QUICK_SETTINGS = {**SETTINGS, "engine.max_seqs": 4, "engine.max_step_tokens": 32}


@dataclass(slots=True)
class Step:
    """One request of a pipeline; times are seconds. `end_to_end` is from submit to the last token."""

    model: str | None
    tokens: list[int]
    prompt: int
    cached: int
    queue: float
    prefill: float
    ttft: float
    end_to_end: float


def run(options: Options) -> None:
    """Measures all cells, both sides in turn."""
    setup = Setup(SPEC, CELLS, options.folder("alora"), settings=SETTINGS)
    if options.quick:
        cells = (Cell(96, 2), Cell(64, 1, sessions=2))
        setup = Setup(QUICK_SPEC, cells, setup.work, 8, 4, 4, QUICK_SETTINGS)
    settings = {**{k: getattr(setup, k) for k in ("base_tokens", "check_tokens", "rank")}, "model": asdict(setup.spec)}
    records = options.records("alora-float32", settings)
    budget = replace(options.budget(5), minutes=options.minutes / len(setup.cells))
    with InProcess(_configure(setup)) as engine:
        bench = Bench(setup, engine)
        for cell in setup.cells:
            sides = [Side(side, lambda s=side, c=cell: bench.sample(c, s)) for side in (SHARED, ALONE)]
            for side in sides:
                side.run()  # not counted: the first touch of programs and memory
            records.measure(cell.name, sides, budget)


class Bench:
    """The engine that both sides share, and the pipelines through it."""

    def __init__(self, setup: Setup, engine: InProcess):
        self.setup = setup
        self._engine = engine
        self._answers: dict[tuple[str, str], list[list[int]]] = {}  # of a side's first run in a cell

    def sample(self, cell: Cell, side: str) -> Sample:
        """One run of the cell's pipelines from an empty cache."""
        replica = self._engine.replica
        while replica.state().result().cache.in_flight:
            time.sleep(0.001)
        replica.flush_cache().result()
        before = replica.state().result().cache
        began = time.perf_counter()
        with ThreadPoolExecutor(cell.sessions) as pool:
            done = list(pool.map(lambda i: self._pipeline(cell, side, i), range(cell.sessions)))
        seconds = time.perf_counter() - began
        steps = [step for pipeline in done for step in pipeline]
        state = replica.state().result()
        answers = [step.tokens for step in steps]
        first = self._answers.setdefault((cell.name, side), answers)
        checks = [step for step in steps if step.model is not None]
        base = [[step for step in pipeline if step.model is None] for pipeline in done]
        return {
            **asdict(cell),
            "seconds": seconds,
            "cold_ttft_s": statistics.fmean(pipeline[0].ttft for pipeline in base),
            "hit_ttft_s": statistics.fmean(pipeline[1].ttft for pipeline in base),
            "kv_blocks": state.cache.hbm.history_kv,
            "base_hit_tokens": state.cache.kv_base_hit_tokens - before.kv_base_hit_tokens,
            "different": sum(a != b for a, b in zip(answers, first, strict=True)),
            "compiles": state.stats.compiles_after_warmup,
            **{f"check_{key}": value for key, value in means(checks).items()},
            **{f"base_{key}": value for key, value in means([s for pipeline in base for s in pipeline]).items()},
        }

    def _pipeline(self, cell: Cell, side: str, session: int) -> list[Step]:
        """One conversation through base and checks; every request's numbers, in order."""
        setup = self.setup
        rng = np.random.default_rng(session)
        talk = rng.integers(3, setup.spec.vocab - RESERVED, cell.context).tolist()
        steps: list[Step] = []

        def base() -> None:
            steps.extend(self._ask([Job(0, tuple(talk), setup.base_tokens, None)], session))
            talk.extend(steps[-1].tokens)

        def checks(which: Sequence[int]) -> None:
            prompts = [(*talk, *invocation(setup.spec, i)) for i in which]
            names = [_name(side, i) for i in which]
            pairs = enumerate(zip(prompts, names, strict=True))
            done = self._ask([Job(i, prompt, setup.check_tokens, name) for i, (prompt, name) in pairs], session)
            steps.extend(done)
            for step in done:
                talk.extend(step.tokens)

        base()
        checks([0])
        base()
        checks(range(cell.adapters))
        base()
        return steps

    def _ask(self, jobs: Sequence[Job], session: int) -> list[Step]:
        """Sends requests at the same time and waits for all."""
        run = self._engine.run(jobs, bypass=False, tenant=f"session-{session}")
        return [
            Step(
                job.adapter,
                run.tokens[job.id],
                run.usage[job.id].prompt_tokens,
                run.usage[job.id].cached_tokens,
                run.timing[job.id].queue,
                run.timing[job.id].prefill,
                run.timing[job.id].ttft,
                run.last[job.id],
            )
            for job in jobs
        ]


def means(steps: Sequence[Step]) -> dict[str, float]:
    """Over requests: mean times in seconds, and the share of prompt tokens that was cached."""
    return {
        "end_to_end_s": statistics.fmean(step.end_to_end for step in steps),
        "ttft_s": statistics.fmean(step.ttft for step in steps),
        "queue_s": statistics.fmean(step.queue for step in steps),
        "prefill_s": statistics.fmean(step.prefill for step in steps),
        "decode_s": statistics.fmean(step.end_to_end - step.ttft for step in steps),
        "hit_rate": sum(step.cached for step in steps) / sum(step.prompt for step in steps),
    }


def invocation(spec: ModelSpec, adapter: int) -> tuple[int, int]:
    """The two token ids that invoke an adapter; no text has them."""
    return spec.vocab - RESERVED + adapter, spec.vocab - 1


def _longest(setup: Setup, cell: Cell) -> int:
    """Tokens of a conversation at its end."""
    return cell.context + 3 * setup.base_tokens + (cell.adapters + 1) * (setup.check_tokens + 2)


def _name(side: str, adapter: int) -> str:
    return f"{side}-{adapter}"


def _configure(setup: Setup) -> Config:
    """Writes model and adapters, unless they are there; a pool that holds all KV of the plain LoRAs."""
    model = setup.work / "model"
    write_model(model, setup.spec, seed=0)
    paths = {}
    for i in range(setup.adapters):
        for side, tokens in ((SHARED, invocation(setup.spec, i)), (ALONE, None)):
            directory = setup.work / f"{_name(side, i)}-r{setup.rank}"
            write_adapter(directory, setup.spec, setup.rank, seed=1000 + i, alora_invocation_tokens=tokens)
            paths[f"adapters.paths.{_name(side, i)}"] = str(directory)
    tokens = max(_longest(setup, cell) * (cell.adapters + 2) * cell.sessions for cell in setup.cells)
    adapters = ADAPTER_BLOCKS * setup.adapters
    sizes = {"cache.hbm_blocks": tokens // BLOCK_TOKENS + adapters, "cache.host_blocks": adapters}
    names = {"model.path": str(model), "model.name": setup.spec.name, "model.dtype": "float32"}
    return configuration.load(None, {**names, **paths, **sizes, **setup.settings})
