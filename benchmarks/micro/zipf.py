"""Whether answers stay exact when most adapters are on the disk: Zipf traffic over a catalogue larger than memory.

One engine has all adapters registered and a host tier for a few. Another holds one adapter at a time and answers a
sample of the same requests alone. Greedy tokens must be equal, and log-probabilities within 1e-4.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Options
from jlora import config as configuration
from jlora.engine.local import LocalReplica
from jlora.loadgen.checkpoints import TINY, write_adapter, write_model
from jlora.types import Request, SamplingParams, TokenEvent, TokenLogprob

RANKS = (8, 16, 32, 64)
EXPONENT = 1.0
WAVE = 64  # requests at once
OUTPUT = 8  # tokens
MEAN_BLOCKS = 15  # of an adapter on q, k, v and o
TOLERANCE = 1e-4  # of a log-probability
TIMEOUT_S = 600
SETTINGS = {
    "engine.max_seqs": 16, "engine.max_step_tokens": 128, "cache.hbm_blocks": 1024, "engine.cold_start": "stream",
    "model.max_model_len": 64, "model.name": TINY.name,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Registered adapters, adapters that the host tier holds at most, requests, and how many are checked."""

    adapters: int
    held: int
    requests: int
    sample: int


FULL, QUICK = Size(10_000, 200, 6_000, 500), Size(24, 4, 48, 12)


@dataclass(slots=True)
class Answer:
    """A sink of one request; `seconds` it waited for its adapter."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    waited_s: float = 0.0
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.token_id is not None and event.logprob is not None:
                self.tokens.append(event.token_id)
                self.logprobs.append(event.logprob)
            if event.finish_reason is not None or event.error is not None:
                self.waited_s = event.timing.adapter_cold_start if event.timing else 0.0
                self.error = event.error
                self.ended.set()


def run(options: Options) -> None:
    """Plays once, then asks the reference."""
    size = QUICK if options.quick else FULL
    folder = options.folder("zipf")
    write_model(folder / "model", TINY, 0)
    for i in range(size.adapters):
        write_adapter(folder / "adapters" / _name(i), TINY, RANKS[i % len(RANKS)], i)
    settings = {**SETTINGS, "model.path": str(folder / "model"), "model.dtype": options.dtype, **options.settings}
    records = options.records("zipf-counts", {**vars_of(size), "ranks": list(RANKS), "exponent": EXPONENT})
    requests = draw(size)
    blocks = size.held * MEAN_BLOCKS
    many = {"adapters.dir": str(folder / "adapters"), "adapters.lazy": True, "cache.host_blocks": blocks}
    answers, facts = play({**settings, **many}, requests)
    checked = np.random.default_rng(1).choice(len(requests), size.sample, replace=False).tolist()
    wanted = alone({**settings, "cache.host_blocks": blocks}, folder / "adapters", [requests[i] for i in checked])
    found = [answers[i] for i in checked]
    records.add("answers", "catalogue", 0, {**facts, **compare(found, wanted)})


def draw(size: Size) -> list[Request]:
    """The requests: adapters by Zipf's law over a shuffled order, prompts of their own."""
    rng = np.random.default_rng(0)
    order = rng.permutation(size.adapters)
    weights = np.arange(1, size.adapters + 1) ** -EXPONENT
    picked = order[rng.choice(size.adapters, size.requests, p=weights / weights.sum())]
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=1)
    prompts = [tuple(rng.integers(3, TINY.vocab, int(rng.integers(4, 33))).tolist()) for _ in picked]
    return [Request(f"{i}", prompts[i], sampling, _name(int(at))) for i, at in enumerate(picked)]


def play(settings: dict[str, Any], requests: Sequence[Request]) -> tuple[list[Answer], dict[str, Any]]:
    """All requests, so many at once; their answers, and what they met."""
    replica = LocalReplica.start(configuration.load(None, settings))
    try:
        replica.warm().result(TIMEOUT_S)
        answers = []
        for begin in range(0, len(requests), WAVE):
            answers += ask(replica, requests[begin : begin + WAVE])
        replica.check_integrity().result(TIMEOUT_S)
        state = replica.state().result(TIMEOUT_S)
        facts = {
            "requests": len(answers),
            "asked": len({request.adapter for request in requests}),
            "cold": sum(answer.waited_s > 0 for answer in answers),
            "dropped": state.cache.adapters_dropped,
            "failed": sum(answer.error is not None for answer in answers),
        }
        return answers, facts
    finally:
        replica.close()


def alone(settings: dict[str, Any], directory: Path, requests: Sequence[Request]) -> list[Answer]:
    """The same requests one after the other, with one adapter loaded at a time."""
    replica = LocalReplica.start(configuration.load(None, settings))
    try:
        replica.warm().result(TIMEOUT_S)
        answers = []
        for request in requests:
            assert request.adapter is not None
            replica.load_adapter(request.adapter, str(directory / request.adapter)).result(TIMEOUT_S)
            answers += ask(replica, [request])
            replica.unload_adapter(request.adapter).result(TIMEOUT_S)
        return answers
    finally:
        replica.close()


def ask(replica: LocalReplica, requests: Sequence[Request]) -> list[Answer]:
    """Their answers, when all have ended."""
    answers = [Answer() for _ in requests]
    for request, answer in zip(requests, answers, strict=True):
        replica.submit(request, answer).result(TIMEOUT_S)
    for answer in answers:
        assert answer.ended.wait(TIMEOUT_S), "no answer"
    return answers


def compare(found: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, Any]:
    """How many are equal, and the largest difference of a log-probability."""
    equal = [a.tokens == b.tokens and len(a.tokens) == OUTPUT for a, b in zip(found, wanted, strict=True)]
    pairs = [pair for a, b in zip(found, wanted, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    off = max((abs(a.logprob - b.logprob) for a, b in pairs if a.token_id == b.token_id), default=0.0)
    return {"checked": len(equal), "equal": sum(equal), "largest_difference": off, "within": bool(off <= TOLERANCE)}


def vars_of(size: Size) -> dict[str, int]:
    """Plain values."""
    return {"adapters": size.adapters, "held": size.held, "requests": size.requests, "sample": size.sample}


def _name(i: int) -> str:
    return f"a{i:05}"
