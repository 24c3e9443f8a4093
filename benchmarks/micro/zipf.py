"""Whether answers stay exact when most adapters are on the disk: Zipf traffic over a catalogue larger than memory.

One engine has all adapters registered and a host tier for a few. Another holds one adapter at a time and answers a
sample of the same requests alone. Greedy tokens must be equal, and log-probabilities within 1e-4.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.micro.answers import TIMEOUT_S, Answer, ask, blocks_of
from benchmarks.runner import Options
from jlora import config as configuration
from jlora.engine.local import LocalReplica
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_adapter, write_model
from jlora.model.spec import ModelSpec
from jlora.types import Request, SamplingParams

RANKS = (8, 16, 32, 64)
EXPONENT = 1.0
WAVE = 64  # requests at once
OUTPUT = 8  # tokens
TARGETS = ("q",)
TOLERANCE = 1e-4  # of a log-probability
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


def run(options: Options) -> None:
    """Plays once, then asks the reference."""
    size = QUICK if options.quick else FULL
    folder = options.folder("zipf")
    write(folder, size)
    model = {"model.path": str(folder / "model"), "model.name": size.spec.name, "model.dtype": options.dtype}
    settings = {**SETTINGS, **model, **options.settings}
    facts = {name: getattr(size, name) for name in ("adapters", "held", "requests", "sample")}
    facts |= {"model": size.spec.name, "ranks": list(RANKS), "exponent": EXPONENT}
    records = options.records("zipf-counts", facts)
    requests = draw(size)
    blocks = int(size.held * mean_blocks(size.spec))
    many = {"adapters.dir": str(folder / "adapters"), "adapters.lazy": True, "cache.host_blocks": blocks}
    answers, met = play({**settings, **many}, requests, size.minutes)
    checked = np.random.default_rng(1).choice(len(answers), size.sample, replace=False).tolist()
    wanted = alone({**settings, "cache.host_blocks": blocks}, folder / "adapters", [requests[i] for i in checked])
    found = [answers[i] for i in checked]
    records.add("answers", "catalogue", 0, {**met, **compare(found, wanted)})


def write(folder: Path, size: Size) -> None:
    """The model, and the catalogue in `adapters`; what is there stays."""
    write_model(folder / "model", size.spec, 0)
    for i in tqdm(range(size.adapters), desc="adapters"):
        # Thousands must fit on a disk.
        write_adapter(folder / "adapters" / _name(i), size.spec, RANKS[i % len(RANKS)], i, TARGETS, "bfloat16")


def mean_blocks(spec: ModelSpec) -> float:
    """Blocks of an adapter of the catalogue."""
    return sum(blocks_of(spec, rank, TARGETS) for rank in RANKS) / len(RANKS)


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
            answers += ask_all(replica, requests[len(answers) : len(answers) + WAVE])
        replica.check_integrity().result(TIMEOUT_S)
        state = replica.state().result(TIMEOUT_S)
        facts = {
            "requests": len(answers),
            "minutes": (time.monotonic() - began) / 60,
            "asked": len({request.adapter for request in requests[: len(answers)]}),
            "cold": sum(answer.timing is not None and answer.timing.adapter_cold_start > 0 for answer in answers),
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
            answers += ask_all(replica, [request])
            replica.unload_adapter(request.adapter).result(TIMEOUT_S)
        return answers
    finally:
        replica.close()


def ask_all(replica: LocalReplica, requests: Sequence[Request]) -> list[Answer]:
    """Their answers, when all have ended."""
    answers = [ask(replica, request) for request in requests]
    for answer in answers:
        answer.wait()
    return answers


def compare(found: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, Any]:
    """How many are equal, and the largest difference of a log-probability."""
    equal = [a.tokens == b.tokens and len(a.tokens) == OUTPUT for a, b in zip(found, wanted, strict=True)]
    pairs = [pair for a, b in zip(found, wanted, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    off = max((abs(a.logprob - b.logprob) for a, b in pairs if a.token_id == b.token_id), default=0.0)
    return {"checked": len(equal), "equal": sum(equal), "largest_difference": off, "within": bool(off <= TOLERANCE)}


def _name(i: int) -> str:
    return f"a{i:05}"
