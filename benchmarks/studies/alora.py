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

import queue
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rounds
from benchmarks.rounds import Budget, Journal, Sample, Side
from jlora import config as configuration
from jlora import machine
from jlora.config import Config
from jlora.engine.service import Service
from jlora.loadgen import checkpoints as workload
from jlora.loadgen.checkpoints import Plan
from jlora.model.spec import ModelSpec
from jlora.types import Request, SamplingParams, TokenEvent

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
    budget: Budget
    work: Path
    base_tokens: int = 64
    check_tokens: int = 16
    rank: int = 16
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adapters(self) -> int:
        """How many adapters the cells need."""
        return max(cell.adapters for cell in self.cells)

    def describe(self) -> dict[str, Any]:
        """What makes two runs comparable."""
        return {
            "model": {**asdict(self.spec), "parameters": self.spec.parameters},
            "base_tokens": self.base_tokens,
            "check_tokens": self.check_tokens,
            "rank": self.rank,
            "adapted": list(workload.ADAPTED),
            "settings": dict(self.settings),
            "threads": machine.threads(),
            "versions": machine.versions(),
        }


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


def full(budget: Budget, work: Path) -> Setup:
    """All cells."""
    return Setup(SPEC, CELLS, budget, work, settings=SETTINGS)


def quick(budget: Budget, work: Path) -> Setup:
    """Two small cells: whether it works at all."""
    cells = (Cell(96, 2), Cell(64, 1, sessions=2))
    return Setup(QUICK_SPEC, cells, budget, work, base_tokens=8, check_tokens=4, rank=4, settings=QUICK_SETTINGS)


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


def run(setup: Setup) -> dict[str, Any]:
    """Measures all cells; returns settings, every round, medians and ratios."""
    bench = Bench(setup)
    try:
        return {"settings": setup.describe(), "cells": [bench.cell(cell) for cell in setup.cells]}
    finally:
        bench.close()


class Bench:
    """The engine that both sides share, and the pipelines through it."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.service = Service.start(_configure(setup), progress=True)
        self._answers: dict[tuple[str, str], list[list[int]]] = {}  # of a side's first run in a cell

    def cell(self, cell: Cell) -> dict[str, Any]:
        """All rounds of one setting, side by side."""
        settings = {**self.setup.describe(), "cell": asdict(cell)}
        journal = Journal(self.setup.work / f"{cell.name.replace(', ', '-').replace(' ', '-')}.jsonl", settings)
        sides = [Side(side, lambda s=side: self.sample(cell, s)) for side in (SHARED, ALONE)]
        budget = replace(self.setup.budget, minutes=self.setup.budget.minutes / len(self.setup.cells))
        if len(journal.rounds) < budget.rounds:
            for side in sides:  # not counted: the first touch of programs and memory
                side.run()
        done = rounds.interleave(sides, journal, budget, cell.name)
        return {**asdict(cell), "rounds": list(done), **summary(done)}

    def sample(self, cell: Cell, side: str) -> Sample:
        """One run of the cell's pipelines from an empty cache."""
        while self.service.cache_state().in_flight:
            time.sleep(0.001)
        self.service.flush_cache()
        before = self.service.cache_state()
        began = time.perf_counter()
        with ThreadPoolExecutor(cell.sessions) as pool:
            done = list(pool.map(lambda i: self._pipeline(cell, side, i), range(cell.sessions)))
        seconds = time.perf_counter() - began
        steps = [step for pipeline in done for step in pipeline]
        state = self.service.cache_state()
        answers = [step.tokens for step in steps]
        first = self._answers.setdefault((cell.name, side), answers)
        checks = [step for step in steps if step.model is not None]
        base = [[step for step in pipeline if step.model is None] for pipeline in done]
        found = {
            "seconds": seconds,
            "cold_ttft_s": statistics.fmean(pipeline[0].ttft for pipeline in base),
            "hit_ttft_s": statistics.fmean(pipeline[1].ttft for pipeline in base),
            "kv_bytes": state.hbm.history_kv * self.service.layout.block_bytes,
            "base_hit_tokens": state.kv_base_hit_tokens - before.kv_base_hit_tokens,
            "different": sum(a != b for a, b in zip(answers, first, strict=True)),
            "compiles": self.service.stats().compiles_after_warmup,
            **{f"check_{key}": value for key, value in means(checks).items()},
            **{f"base_{key}": value for key, value in means([s for pipeline in base for s in pipeline]).items()},
        }
        return {key: float(f"{value:.6g}") for key, value in found.items()}

    def close(self) -> None:
        """Ends the engine."""
        self.service.stop()

    # -- inside ---------------------------------------------------------------------------------

    def _pipeline(self, cell: Cell, side: str, session: int) -> list[Step]:
        """One conversation through base and checks; every request's numbers, in order."""
        setup = self.setup
        rng = np.random.default_rng(session)
        talk = rng.integers(3, setup.spec.vocab - RESERVED, cell.context).tolist()
        steps: list[Step] = []

        def base() -> None:
            steps.extend(self._ask([(None, tuple(talk))], setup.base_tokens, session))
            talk.extend(steps[-1].tokens)

        def checks(which: Sequence[int]) -> None:
            asked = [(_name(side, i), (*talk, *invocation(setup.spec, i))) for i in which]
            done = self._ask(asked, setup.check_tokens, session)
            steps.extend(done)
            for step in done:
                talk.extend(step.tokens)

        base()
        checks([0])
        base()
        checks(range(cell.adapters))
        base()
        return steps

    def _ask(self, asked: Sequence[tuple[str | None, tuple[int, ...]]], max_tokens: int, session: int) -> list[Step]:
        """Sends requests at the same time and waits for all."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        inbox: queue.SimpleQueue[tuple[float, list[TokenEvent]]] = queue.SimpleQueue()
        began = time.perf_counter()
        for i, (model, prompt) in enumerate(asked):
            request = Request(f"{session}-{i}", prompt, sampling, model, tenant=f"session-{session}")
            self.service.submit(request, lambda events: inbox.put((time.perf_counter(), events)))
        tokens: list[list[int]] = [[] for _ in asked]
        last: dict[int, tuple[float, TokenEvent]] = {}
        while len(last) < len(asked):
            at, events = inbox.get(timeout=600)
            for event in events:
                i = int(event.request_id.rpartition("-")[2])
                tokens[i] += [event.token_id] if event.token_id is not None else []
                if event.finish_reason is not None:
                    last[i] = at, event
        return [_step(model, tokens[i], last[i][0] - began, last[i][1]) for i, (model, _) in enumerate(asked)]


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


def summary(done: Sequence[Mapping[str, Sample]]) -> dict[str, Any]:
    """Medians of both sides; ratios inside a round, and each side against itself a round later."""
    medians = {side: {key: statistics.median(r[side][key] for r in done) for key in done[0][side]} for side in done[0]}
    ratios = {}
    for key in ("seconds", "check_end_to_end_s", "check_ttft_s", "check_queue_s", "check_prefill_s", "check_decode_s"):
        if all(r[SHARED][key] > 0 for r in done):
            ratios[key] = asdict(rounds.speed_ratio(done, SHARED, ALONE, key))
    controls = {side: rounds.control(done, side) for side in (SHARED, ALONE)}
    return {"median": medians, "ratios": ratios, "controls": controls}


def invocation(spec: ModelSpec, adapter: int) -> tuple[int, int]:
    """The two token ids that invoke an adapter; no text has them."""
    return spec.vocab - RESERVED + adapter, spec.vocab - 1


def _longest(setup: Setup, cell: Cell) -> int:
    """Tokens of a conversation at its end."""
    return cell.context + 3 * setup.base_tokens + (cell.adapters + 1) * (setup.check_tokens + 2)


def _name(side: str, adapter: int) -> str:
    return f"{side}-{adapter}"


def _step(model: str | None, tokens: list[int], seconds: float, end: TokenEvent) -> Step:
    usage, timing = end.usage, end.timing
    if usage is None or timing is None:
        raise RuntimeError("a request ended without its numbers: the engine has stopped")
    return Step(
        model, tokens, usage.prompt_tokens, usage.cached_tokens, timing.queue, timing.prefill, timing.ttft, seconds
    )


def _configure(setup: Setup) -> Config:
    """Writes model and adapters, unless they are there; a pool that holds all KV of the plain LoRAs."""
    plan = Plan(setup.spec, 0, (1, 1), (1, 1), adapters=0, rank=setup.rank)
    model = workload.prepare(plan, setup.work / "model").model
    paths = {}
    for i in range(setup.adapters):
        for side, tokens in ((SHARED, invocation(setup.spec, i)), (ALONE, None)):
            directory = setup.work / f"{_name(side, i)}-r{setup.rank}"
            if not (directory / "adapter_model.safetensors").exists():
                workload.write_adapter(directory, plan, seed=1000 + i, invocation=tokens)
            paths[f"adapters.paths.{_name(side, i)}"] = str(directory)
    tokens = max(_longest(setup, cell) * (cell.adapters + 2) * cell.sessions for cell in setup.cells)
    adapters = ADAPTER_BLOCKS * setup.adapters
    sizes = {"cache.hbm_blocks": tokens // BLOCK_TOKENS + adapters, "cache.host_blocks": adapters}
    names = {"model.path": str(model), "model.name": setup.spec.name, "model.dtype": "float32"}
    return configuration.load(None, {**names, **paths, **sizes, **setup.settings})
