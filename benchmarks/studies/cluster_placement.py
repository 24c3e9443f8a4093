"""`jlora bench cluster-placement`: LoRAServe's Figures 17 to 22 in reduced form, simulated.

Four servers (A100s with Llama-2-7B and padded kernels) and 100 adapters of ranks 8 to 128. The paper's own trace is
private; lengths are drawn around 512 tokens of prompt and 128 of answer, and arrivals are Poisson's.

    random, contiguous   placed once ("S-LoRA Random" and "Contiguous")
    toppings             CaraServe's router with every adapter on every host, as LoRAServe ran it; "any rank": the same,
                         but blind to ranks
    loraserve            Algorithm 1, fetch before the switch; loraserve, late: fetch with the first request (the paper)
    loraserve, jlora     the placement brings adapters, jlora's policy routes
    jlora                jlora's policy alone: an adapter comes with its first request
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.runner import Options
from benchmarks.studies.traffic import turns_of, work_of
from jlora.config import EngineConfig
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.placing import Place
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import TABLE, Service, simulate_service

CARD = Hardware(CHIPS["a100"], 1, MODELS["llama-2-7b"])
SCENARIO = Scenario(CARD, host_gb=1000.0, engine=EngineConfig(max_seqs=128, max_step_tokens=1024, max_queue=1 << 20))
RANKS = (8, 16, 32, 64, 128)
SLO_S = 0.05  # per token
FETCH_GBPS = 1.0
EVERYWHERE = ("toppings", "toppings, any rank")  # sides whose hosts all have all adapters
# Side -> (placement, route, adapters come before the switch).
SIDES: Mapping[str, tuple[Place, str, bool]] = {
    "random": ("random", TABLE, True),
    "contiguous": ("contiguous", TABLE, True),
    "toppings": ("", "caraserve", True),
    "toppings, any rank": ("", "most-idle", True),
    "loraserve, late": ("loraserve", TABLE, False),
    "loraserve": ("loraserve", TABLE, True),
    "loraserve, jlora": ("loraserve", "jlora", True),
    "jlora": ("", "jlora", True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One load.

    Attributes:
        skew: how requests spread over ranks: "uniform", "shifting" or "exponential".
        step_s: a time step of the placement; the paper's is a minute, in traces of an hour.
    """

    name: str
    skew: str
    rate: float
    servers: int = 4
    adapters: int = 100
    seconds: float = 16.0
    step_s: float = 2.0


CASES = (
    Case("17, 18: uniform", "uniform", 40.0),
    Case("19: shifting skew", "shifting", 40.0),
    Case("20: exponential", "exponential", 40.0),
    Case("21: 25 adapters", "uniform", 40.0, adapters=25),
    Case("22: 8 servers", "shifting", 80.0, servers=8, seconds=12.0),
    Case("19: shifting, 300 s", "shifting", 40.0, adapters=25, seconds=300.0, step_s=15.0),
)
QUICK = (Case("17, 18: uniform", "uniform", 8.0, servers=2, adapters=10, seconds=2.0),)


def traffic(case: Case, seconds: float, seed: int = 1) -> tuple[Work, tuple[int, ...], float]:
    """The requests, the ranks, and tokens of a mean answer."""
    rng = np.random.default_rng(seed)
    count = round(case.rate * seconds)
    times = np.cumsum(rng.exponential(1 / case.rate, count))
    ranks = tuple(RANKS[i % len(RANKS)] for i in range(case.adapters))
    prompts, outputs = (np.clip(mean * rng.lognormal(-0.18, 0.6, count), 4, 1900).astype(int) for mean in (512, 128))

    def adapters() -> Iterator[int]:
        for at in times:
            rank = int(rng.choice(len(RANKS), p=shares(case.skew, at / seconds)))
            yield rank + len(RANKS) * int(rng.integers(case.adapters // len(RANKS)))

    turns = turns_of(rng, zip(times, prompts, outputs, adapters(), strict=True))
    return work_of(case.name, turns, ranks, CARD), ranks, float(outputs.mean())


def shares(skew: str, part: float) -> list[float]:
    """Of each rank in the requests after this part of the run. Shifting: half of them from rank 128 to rank 8."""
    if skew == "uniform":
        return [1 / len(RANKS)] * len(RANKS)
    if skew == "exponential":
        halves = [0.5**i for i in range(len(RANKS))]
        return [half / sum(halves) for half in halves]
    moved = min(max(part, 0.0), 1.0)
    return [0.125 + 0.375 * moved, 0.125, 0.125, 0.125, 0.5 - 0.375 * moved]


def run(options: Options) -> None:
    """Every case under every side."""
    records = options.records("cluster-placement-simulated", {"seconds": options.seconds, "slo_s": SLO_S})
    for case in QUICK if options.quick else CASES:
        work, ranks, outputs = traffic(case, options.seconds or case.seconds)
        for side in SIDES:
            if not records.has(cell=case.name, side=side):
                records.add(case.name, side, 0, measured(case, side, (work, ranks, outputs)))


def measured(case: Case, side: str, load: tuple[Work, tuple[int, ...], float]) -> dict[str, Any]:
    """One run."""
    work, ranks, outputs = load
    place, route, ahead = SIDES[side]
    fetch_gbps = 0.0 if side in EVERYWHERE else FETCH_GBPS
    service = Service(
        case.servers, ranks, "padded", fetch_gbps=fetch_gbps, slo_s=SLO_S, outputs=outputs, place=place,
        place_s=case.step_s, ahead=ahead,
    )  # fmt: skip
    result = simulate_service(SCENARIO, service, work, "jlora", route)
    summary, told = result["summary"], result["service"]
    if side in EVERYWHERE:
        told |= {"adapters_most": case.adapters}
    return {
        **{key: summary[key] for key in ("requests", "unfinished", "ttft_s", "ttft_p99_s", "tpot_s")},
        **{key: told[key] for key in ("attainment", "goodput", "imbalance", "adapters_most", "bytes_fetched")},
    }
