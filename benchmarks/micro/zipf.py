"""Whether answers stay exact when most adapters are on the disk: Zipf traffic over a catalogue larger than memory.

One engine has all adapters registered and a host tier for a few. Another holds one adapter at a time and answers a
sample of the same requests alone. Greedy tokens must be equal, and log-probabilities within 1e-4.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from benchmarks.runner import Options
from jlora import config as configuration
from jlora.engine.local import LocalReplica
from jlora.layout import PoolLayout, smallest_block_tokens
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, save_adapter, write_model
from jlora.model.spec import ModelSpec
from jlora.types import Request, SamplingParams, TokenEvent, TokenLogprob

RANKS = (8, 16, 32, 64)
EXPONENT = 1.0
WAVE = 64  # requests at once
OUTPUT = 8  # tokens
TARGETS = ("q",)
TOLERANCE = 1e-4  # of a log-probability
TIMEOUT_S = 600
SETTINGS = {
    "engine.max_seqs": 16, "engine.max_step_tokens": 128, "cache.hbm_blocks": 1024, "engine.cold_start": "stream",
    "model.max_model_len": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Registered adapters, adapters that the host tier holds at most, requests, and how many are checked.

    Requests end when there are no more, or after so many minutes.
    """

    spec: ModelSpec
    adapters: int
    held: int
    requests: int
    minutes: float
    sample: int


FULL = Size(LLAMA_100M, 10_000, 200, 50_000, 10.0, 500)
QUICK = Size(TINY, 24, 4, 48, 10.0, 12)


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
    write_model(folder / "model", size.spec, 0)
    for i in tqdm(range(size.adapters), desc="adapters"):
        _write(folder / "adapters" / _name(i), size.spec, RANKS[i % len(RANKS)], i)
    model = {"model.path": str(folder / "model"), "model.name": size.spec.name, "model.dtype": options.dtype}
    settings = {**SETTINGS, **model, **options.settings}
    records = options.records("zipf-counts", {**vars_of(size), "ranks": list(RANKS), "exponent": EXPONENT})
    requests = draw(size)
    blocks = size.held * sum(_blocks(size.spec, rank) for rank in RANKS) // len(RANKS)
    many = {"adapters.dir": str(folder / "adapters"), "adapters.lazy": True, "cache.host_blocks": blocks}
    answers, facts = play({**settings, **many}, requests, size.minutes)
    checked = np.random.default_rng(1).choice(len(answers), size.sample, replace=False).tolist()
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
    prompts = [tuple(rng.integers(3, size.spec.vocab, int(rng.integers(4, 33))).tolist()) for _ in picked]
    return [Request(f"{i}", prompts[i], sampling, _name(int(at))) for i, at in enumerate(picked)]


def play(settings: dict[str, Any], requests: Sequence[Request], minutes: float) -> tuple[list[Answer], dict[str, Any]]:
    """The requests, so many at once, until the minutes are over; their answers, and what they met."""
    replica = LocalReplica.start(configuration.load(None, settings))
    try:
        replica.warm().result(TIMEOUT_S)
        answers, began = [], time.monotonic()
        while len(answers) < len(requests) and time.monotonic() < began + 60 * minutes:
            answers += ask(replica, requests[len(answers) : len(answers) + WAVE])
        replica.check_integrity().result(TIMEOUT_S)
        state = replica.state().result(TIMEOUT_S)
        facts = {
            "requests": len(answers),
            "minutes": (time.monotonic() - began) / 60,
            "asked": len({request.adapter for request in requests[: len(answers)]}),
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


def vars_of(size: Size) -> dict[str, int | str]:
    """Plain values."""
    return {
        "model": size.spec.name,
        "adapters": size.adapters,
        "held": size.held,
        "requests": size.requests,
        "sample": size.sample,
    }


def _write(directory: Path, spec: ModelSpec, rank: int, seed: int) -> None:
    """A random adapter in bfloat16 on q alone: thousands must fit on a disk."""
    if (directory / "adapter_model.safetensors").exists():
        return
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, int], scale: float) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(ml_dtypes.bfloat16)

    def pair(width_in: int, width_out: int) -> tuple[np.ndarray, np.ndarray]:
        return normal((rank, width_in), width_in**-0.5), normal((width_out, rank), 0.3)

    layers = [{name: pair(*spec.projection_shapes[name]) for name in TARGETS} for _ in range(spec.layers)]
    save_adapter(directory, layers, rank, base_model_name_or_path=spec.name)


def _blocks(spec: ModelSpec, rank: int) -> int:
    layout = PoolLayout.of(spec, 2, smallest_block_tokens(spec, 16))
    return sum(-(-rank // layout.units[name].per_block) for name in TARGETS)


def _name(i: int) -> str:
    return f"a{i:05}"
