"""Poisson traffic whose requests find no adapter on the device, beside the same with every adapter there.

CaraServe's Figures 10, 13 and 14 (https://arxiv.org/abs/2401.11240) on the real engine, over an emulated link.
One engine for each link plays the same requests by every side in turn, stepped here from one thread. `cached`:
every adapter is on the device. `blocking`: the engine takes no step until the copies under way have landed, as
systems that load on demand. The others are `engine.cold_start`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.micro.answers import blocks_of
from benchmarks.micro.cold import choose, empty
from benchmarks.runner import Options
from benchmarks.studies.traffic import zipf
from jlora import config as configuration
from jlora.cache.readiness import Helps
from jlora.engine.build import Built, build, compile_rest
from jlora.layout import smallest_block_tokens
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_adapter, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.model.spec import ModelSpec
from jlora.types import Request, SamplingParams, Timing

SIDES = ("cached", "blocking", "wait", "stream", "cpu", "auto")
TARGETS = ("q", "k", "v")  # as in the paper
LONGEST = 96, 48  # tokens of a prompt and of an answer
SEQS = 8
EXPONENT = 1.1
SETTINGS = {
    "engine.max_seqs": SEQS, "engine.max_step_tokens": 128, "engine.cold_start": "auto", "cache.monitor_s": 60,
    "model.max_model_len": sum(LONGEST),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests at `rate` per second, each for another adapter; `skewed`: for one drawn by Zipf's law."""

    name: str
    gbps: float
    rank: int
    rate: float
    requests: int
    skewed: bool = False


# On two cores a copy of rank 64 over 0.2 GB/s takes about as long as a step, as in the paper.
CASES = (
    Case("Figure 10", 0.2, 64, 1.5, 40),
    Case("Figure 13, rank 32", 0.2, 32, 1.5, 40),
    Case("Figure 13, a lower rate", 0.2, 64, 1.0, 40),
    Case("Figure 14, skewed", 0.2, 64, 1.5, 40, skewed=True),
    Case("Figure 10, slow link", 0.05, 64, 1.5, 40),
)
QUICK = (Case("Figure 10", 2e-4, 4, 20.0, 6), Case("Figure 14, skewed", 2e-4, 4, 20.0, 6, skewed=True))


def run(options: Options) -> None:
    """Every case, as many rounds as asked for (3)."""
    cases, spec = (QUICK, replace(TINY, max_len=sum(LONGEST))) if options.quick else (CASES, LLAMA_100M)
    folder = options.folder("arrivals")
    write_model(folder / "model", spec, 0)
    model = {"model.path": str(folder / "model"), "model.name": spec.name, "model.dtype": options.dtype}
    facts = {"cases": {case.name: [case.gbps, case.rank, case.rate, case.requests] for case in cases}}
    records = options.records(f"arrivals-{options.dtype}", facts)
    for gbps, rank in sorted({(case.gbps, case.rank) for case in cases}):
        some = [case for case in cases if (case.gbps, case.rank) == (gbps, rank)]
        count = max(case.requests for case in some)
        settings = {**SETTINGS, **model, "cache.link_gbps": gbps, **_pool(spec, rank, count), **options.settings}
        settings |= {f"adapters.paths.{_name(i)}": str(_adapter(folder, spec, rank, i)) for i in range(count)}
        built = compile_rest(build(configuration.load(None, settings)), progress=True)
        try:
            players = _Players(built, count)
            for case in some:
                sides = [Side(side, partial(players.play, side, traffic(case, spec.vocab))) for side in SIDES]
                records.measure(case.name, sides, options.budget(3))
        finally:
            built.engine.close()


def traffic(case: Case, vocab: int) -> list[tuple[float, Request]]:
    """Requests with the seconds at which they come; lengths like Alpaca's, the answers a third as long."""
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(1 / case.rate, case.requests))
    found = []
    for i, at in enumerate(times):
        prompt, output = (
            int(np.clip(rng.lognormal(*law), 4, most))
            for law, most in zip(((3.6, 0.6), (2.7, 0.8)), LONGEST, strict=True)
        )
        adapter = int(rng.choice(case.requests, p=zipf(case.requests, EXPONENT))) if case.skewed else i
        tokens = tuple(rng.integers(3, vocab, prompt).tolist())
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        found.append((float(at), Request("", tokens, sampling, _name(adapter), bypass_prefix_cache=True)))
    return found


class _Players:
    """One engine that plays traffic by every side."""

    def __init__(self, built: Built, adapters: int):
        self._built, self._names = built, [_name(i) for i in range(adapters)]
        auto = built.parts.scheduler.manager.leases.gate.helps
        assert auto is not None
        self._choosers: dict[str, Helps] = {"auto": auto}
        built.parts.scheduler.manager.policy.lower = 0.0  # an idle link prefetches nothing
        self._fill()  # the meter learns the link

    def play(self, side: str, requests: list[tuple[float, Request]]) -> Sample:
        """Mean seconds to the first token, from when a request was due, and per later token."""
        if side == "cached":
            self._fill()
        else:
            empty(self._built)
        choose(self._built, "wait" if side in ("cached", "blocking") else side, self._choosers)
        timings = serve(self._built, requests, blocks=side == "blocking")
        kinds = [timing.cold_start or "none" for timing in timings]
        ttft, tpot = [timing.ttft for timing in timings], [timing.tpot for timing in timings if timing.tpot]
        found = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        p90_s = float(np.quantile(ttft, 0.9))
        return {"ttft_s": statistics.mean(ttft), "ttft_p90_s": p90_s, "tpot_s": statistics.mean(tpot), "kinds": found}

    def _fill(self) -> None:
        """Brings every adapter to the device."""
        choose(self._built, "wait", self._choosers)
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        like = Request("", (3, 4, 5, 6), sampling, bypass_prefix_cache=True)
        for name in self._names:
            serve(self._built, [(0.0, replace(like, adapter=name))])


def serve(built: Built, requests: Sequence[tuple[float, Request]], blocks: bool = False) -> list[Timing]:
    """Plays requests at their seconds, to the end of the last. `blocks`: copies stop the engine."""
    engine, clock = built.engine, built.parts.clock
    began, timings, coming = clock(), list[Timing](), 0
    while coming < len(requests) or engine.busy:
        while coming < len(requests) and began + requests[coming][0] <= clock():
            at, request = requests[coming]
            engine.submit(replace(request, id=f"{coming}"), began + at)
            coming += 1
        if not engine.busy:
            time.sleep(max(0.0, began + requests[coming][0] - clock()))
            continue
        timings += [event.timing for event in engine.step() if event.timing is not None]
        while blocks and engine.copying:
            engine.rest()
            engine.tend()
    return timings


def _pool(spec: ModelSpec, rank: int, adapters: int) -> dict[str, Any]:
    """Room for every adapter in both tiers, and on the device for the KV of a full batch beside them."""
    blocks = adapters * blocks_of(spec, rank, TARGETS)
    room = (SEQS + 1) * -(-sum(LONGEST) // smallest_block_tokens(spec, 16))
    return {"cache.hbm_blocks": int(1.2 * (blocks + room)), "cache.host_blocks": int(1.2 * blocks)}


def _adapter(folder: Path, spec: ModelSpec, rank: int, i: int) -> Path:
    path = folder / f"rank{rank}" / _name(i)
    write_adapter(path, spec, rank, i, TARGETS, "bfloat16")
    return path


def _name(i: int) -> str:
    return f"a{i:03}"
