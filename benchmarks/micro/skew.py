"""dLoRA's Figure 10 on this engine: merged and unmerged inference by skew (Wu et al. 2024, section 7.3).

Eight adapters of one rank. The most asked-for one gets a share of the requests, the others share the rest. Every side
plays the same requests, which come by a Poisson process. The figure of a request is its latency over its output
tokens; the mean divides the sums, as in section 7.1.

    off     nothing is ever merged
    auto    engine.merge = auto
    merged  something is always merged: dLoRA's merged-only inference, with its credits against starvation

A side is a policy, new for each run: what `auto` has decided in one must not help it in the next. The times of the
steps that it has seen stay. A new policy has no budget for a merge of what alone is asked for (`engine/merging.py`),
so runs in which one adapter has all requests are longer. One replica plays the sides in turn, because two replicas in a
process differ by more than the sides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.micro.answers import TIMEOUT_S, send
from benchmarks.records import STEADY
from benchmarks.runner import Options
from benchmarks.studies.merging import MergedOnly
from jlora import config as configuration
from jlora.cache.tree import AdapterNode
from jlora.engine.local import LocalReplica
from jlora.engine.merging import AdapterCost, Merging, Times
from jlora.loadgen.checkpoints import LLAMA_100M, TINY, write_adapter, write_model
from jlora.loadgen.rounds import Sample, Side
from jlora.model.spec import ModelSpec
from jlora.types import EngineStats, Request, SamplingParams

ADAPTERS = 8
HOT = (0.125, 0.5, 0.7, 0.9, 1.0)  # the most asked-for adapter's share of the requests
LONGER = 4  # times as many requests if it has all of them
LOAD = 0.8  # of what `off` serves when all requests come at once
STARVE_S = 0.5  # `engine.merge_starve_s`: a run takes seconds
SETTINGS = {
    "engine.max_seqs": 32, "engine.max_step_tokens": 64, "cache.hbm_blocks": 1024, "cache.host_blocks": 1024,
    "engine.cold_start": "wait", "engine.merge_starve_s": STARVE_S,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Requests of a run, and the tokens of each prompt and answer.

    alone: requests for one adapter whose steps are enough to measure what merging it loses.
    """

    spec: ModelSpec
    ranks: tuple[int, ...]
    hot: tuple[float, ...]
    requests: int
    prompt: int
    output: int
    alone: int


FULL = Size(LLAMA_100M, (8, 64), HOT, 72, 32, 32, 64)
QUICK = Size(TINY, (4,), HOT[1::3], 12, 4, 8, 64)


@dataclass(frozen=True, slots=True)
class Asked:
    """When a request comes, for which adapter."""

    at: float
    adapter: int


class Never(Merging):
    """Merges nothing."""

    def choose(self, now: float, merged: AdapterNode | None, switch_s: float) -> AdapterNode | None:
        return None


class Timed(Merging):
    """`auto`, and the processor's seconds of its decisions."""

    decided_s = 0.0

    def choose(self, now: float, merged: AdapterNode | None, switch_s: float) -> AdapterNode | None:
        """See `Merging.choose`."""
        began = time.thread_time()
        found = super().choose(now, merged, switch_s)
        self.decided_s += time.thread_time() - began
        return found


def run(options: Options) -> None:
    """Every rank and skew, as many rounds as asked for (5)."""
    size = QUICK if options.quick else FULL
    folder = options.folder("skew")
    write_model(folder / "model", size.spec, 0)
    for rank in size.ranks:
        for i in range(ADAPTERS):
            write_adapter(folder / _name(rank, i), size.spec, rank, i)
    facts = {"adapters": ADAPTERS, "requests": size.requests, "load": LOAD, "starve_s": STARVE_S}
    facts |= {"prompt": size.prompt, "output": size.output, "steady": STEADY, "longer": LONGER}
    records = options.records(f"skew-{options.dtype}", facts)
    model = {"model.path": str(folder / "model"), "model.dtype": options.dtype}
    for rank in size.ranks:
        with _started({**SETTINGS, **model, **options.settings, **_paths(folder, rank)}, size, rank) as player:
            rate = LOAD * player.capacity()
            for hot in (hot for hot in size.hot if not options.only or f"{hot:g}" in options.only):
                requests = size.requests * (LONGER if hot == 1 else 1)
                asked = draw(replace(size, requests=requests), hot, rate)
                sides = [Side(side, partial(player.play, side, asked)) for side in player.sides]
                records.measure(f"rank {rank}, {hot:g}", sides, options.budget(5), alternate=True)


def draw(size: Size, hot: float, rate: float = math.inf) -> list[Asked]:
    """The requests of a run: as many for the most asked-for adapter as its share says, in a random order.

    Args:
        rate: how many come in a second, by a Poisson process.
    """
    rng = np.random.default_rng(7)
    at = np.cumsum(rng.exponential(1 / rate, size.requests))
    often = round(hot * size.requests)
    adapters = [0] * often + [1 + i % (ADAPTERS - 1) for i in range(size.requests - often)]
    return [Asked(float(when), int(adapter)) for when, adapter in zip(at, rng.permutation(adapters), strict=True)]


class Player:
    """One replica that plays every side."""

    def __init__(self, replica: LocalReplica, size: Size, rank: int):
        switching = replica._engine._switching
        assert switching is not None
        self._replica, self._switching, self._size, self._rank = replica, switching, size, rank
        self._pace_s = 0.0
        seqs, times = SETTINGS["engine.max_seqs"], switching.policy.times
        self.sides = {
            "off": lambda: Never(seqs, STARVE_S, Times(AdapterCost())),
            "auto": lambda: Timed(seqs, STARVE_S, times),
            "merged": lambda: MergedOnly(seqs, STARVE_S, Times(AdapterCost())),
        }

    def capacity(self) -> float:
        """Requests that `off` serves in a second when all of a run come at once, as many for each adapter."""
        return self._size.requests / self._played("off", draw(self._size, 1 / ADAPTERS))["seconds"]

    def play(self, side: str, asked: Sequence[Asked]) -> Sample:
        """One run, between two measurements of how fast the machine is."""
        before_s = self._pace_s or self._pace()
        sample = self._played(side, asked)
        self._pace_s = self._pace()
        return {**sample, "pace_s": [before_s, self._pace_s]}

    def _pace(self) -> float:
        """Seconds of a step without merging, while as many requests as have slots run."""
        found = self._played("off", draw(self._size, 1 / ADAPTERS)[: SETTINGS["engine.max_seqs"]])
        return found["seconds"] / found["steps"]

    def _played(self, side: str, asked: Sequence[Asked]) -> Sample:
        """One run, begun and ended with no request and no switch under way."""
        replica, size = self._replica, self._size
        before = self._turn_to(side)
        answers, began = [], time.monotonic()
        for i, each in enumerate(asked):
            time.sleep(max(0.0, began + each.at - time.monotonic()))
            answers.append(send(replica, _request(size, f"skew-{i}", _name(self._rank, each.adapter), i)))
        timings = [answer.end() for answer in answers]
        seconds, policy = time.monotonic() - began, self._switching.policy
        decided_s = policy.decided_s if isinstance(policy, Timed) else 0.0
        after = self._settled()
        latencies = [timing.ttft + timing.tpot * (size.output - 1) for timing in timings]
        waits = [timing.queue for timing, each in zip(timings, asked, strict=True) if each.adapter]
        last, steps = asked[-1].at, after.steps - before.steps
        return {
            "seconds": seconds,
            "mean_s": sum(latencies) / (size.output * len(latencies)),
            "p90_s": float(np.percentile(latencies, 90)) / size.output,
            "others_queue_s": max(waits, default=0.0),
            "rate": len(asked) / last if last else 0.0,
            "switches": after.merge.switches - before.merge.switches,
            "steps": steps,
            "decide_s": decided_s / steps,
        }

    def _turn_to(self, side: str) -> EngineStats:
        """Has the replica decide as `side` does, which has decided nothing yet."""
        self._replica.between_steps(lambda: setattr(self._switching, "policy", self.sides[side]())).result(TIMEOUT_S)
        return self._settled()

    def _settled(self) -> EngineStats:
        """The counters, once no switch is under way: it would disturb the side that runs next."""
        until, calm = time.monotonic() + TIMEOUT_S, 0
        while True:  # a switch may be about to begin
            stats = self._replica.state().result(TIMEOUT_S).stats
            calm = calm + 1 if stats.merge.share in (0.0, 1.0) else 0
            if calm == 3:
                return stats
            assert time.monotonic() < until, "a switch does not end"
            time.sleep(0.1)  # an idle engine looks as often


@contextmanager
def _started(settings: dict[str, Any], size: Size, rank: int) -> Iterator[Player]:
    """A replica whose programs are compiled and whose adapters have been used."""
    replica = LocalReplica.start(configuration.load(None, {**settings, "engine.merge": "auto"}))
    try:
        replica.warm().result(TIMEOUT_S)
        player = Player(replica, size, rank)
        for adapter in range(ADAPTERS):  # what merging an adapter loses is measured once, before it is first merged
            player._played("merged", [Asked(0.0, adapter)] * size.alone)
        for side in player.sides:  # the first runs on a new replica are slower
            player._played(side, draw(size, 1 / ADAPTERS))
        yield player
    finally:
        replica.close()


def _request(size: Size, name: str, adapter: str, seed: int) -> Request:
    prompt = np.random.default_rng(seed).integers(3, size.spec.vocab, size.prompt)
    sampling = SamplingParams(temperature=0.0, max_tokens=size.output, ignore_eos=True)
    return Request(name, tuple(prompt.tolist()), sampling, adapter, bypass_prefix_cache=True)


def _paths(folder: Path, rank: int) -> dict[str, str]:
    names = [_name(rank, i) for i in range(ADAPTERS)]
    return {f"adapters.paths.{name}": str(folder / name) for name in names}


def _name(rank: int, index: int) -> str:
    return f"r{rank}-{index}"
