"""`jlora bench cluster-routing`: CaraServe's Figures 19 and 20 and loads beyond them, simulated on A10s.

Figure 19 takes `--seconds` of traffic, 30 unless told, under every policy, and the paper's 300 under those of `LONG`.
It is played with one seed.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.runner import Options
from benchmarks.studies.traffic import arrivals, turns_of, work_of, zipf
from jlora.cluster.routing.routes import ROUTES
from jlora.config import EngineConfig
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.kernels import Kernel
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import Service, simulate_service

A10 = Hardware(CHIPS["a10"], 1, MODELS["llama-2-7b"], projections=("q", "k", "v"))  # section 7.1
RANKS = (8, 16, 32, 64)
POPULARITY = 1.1  # exponent of Zipf's law: a long tail, as in the Azure Functions trace
MOST = 1600  # tokens of the longest answer
# Every adapter is on every device at once, as in the paper's testbed ("cached"): routing alone makes the difference.
ENGINE = EngineConfig(max_seqs=256, max_step_tokens=1024, max_queue=1 << 20)
SCENARIO = Scenario(A10, hbm_gb=400.0, host_gb=1000.0, link_gbps=10000.0, engine=ENGINE)
SIDES = tuple(route for route in ROUTES if route not in ("least-loaded", "sticky"))
LONG = ("jlora", "most-idle", "caraserve")  # a run takes minutes
KERNELS: tuple[Kernel, ...] = ("padded", "unpadded")
SEEDS = (1, 2)  # policies were written while looking at the first one


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `longer`: answers over Alpaca's; `burst`: coefficient of variation of the gaps; `sides`: policies."""

    name: str
    replicas: int
    rate: float
    adapters: int
    seconds: float
    longer: float = 1.0
    burst: float = 1.0
    sides: tuple[str, ...] = SIDES


CASES = (
    Case("Figure 20", 8, 60.0, 40_000, 20.0),
    Case("Figure 20, answers x 3", 8, 60.0, 40_000, 40.0, longer=3.0),
    Case("Figure 20, answers x 2, bursts", 8, 60.0, 40_000, 40.0, longer=2.0, burst=4.0),
    Case("Figure 19", 60, 340.0, 40_000, 30.0),
    Case("Figure 19, 300 s", 60, 340.0, 40_000, 300.0, sides=LONG),
    Case("Figure 19, answers x 4", 60, 340.0, 40_000, 30.0, longer=4.0),
)
QUICK = (Case("Figure 20", 2, 20.0, 50, 0.5),)


def traffic(case: Case, seconds: float, seed: int) -> tuple[Work, tuple[int, ...], float]:
    """Requests with lengths like Alpaca's, about 45 tokens and 60 of answer; the ranks; tokens of a mean answer."""
    rng = np.random.default_rng(seed)
    count = round(case.rate * seconds)
    times = arrivals(rng, case.rate, count, case.burst)
    popular = rng.permutation(case.adapters)
    adapters = popular[rng.choice(case.adapters, count, p=zipf(case.adapters, POPULARITY))]
    prompts = np.clip(rng.lognormal(3.6, 0.6, count), 4, 400).astype(int)
    outputs = np.clip(case.longer * rng.lognormal(3.8, 0.8, count), 4, MOST).astype(int)
    turns = turns_of(rng, zip(times, prompts, outputs, adapters, strict=True))
    ranks = tuple(rng.choice(RANKS, case.adapters).tolist())
    return work_of(case.name, turns, ranks, A10), ranks, float(outputs.mean())


def slo_s() -> float:
    """1.5 times the time per token of a request alone, which is how PEFT serves it."""
    step = A10.step_model()
    return 1.5 * (step.fixed_s + step.weights_s)


def run(options: Options) -> None:
    """Plays every case with both kernels under every policy."""
    settings = {"slo_s": slo_s(), "seconds": options.seconds, "quick": options.quick}
    records = options.records("cluster-routing-simulated", settings)
    cases = QUICK if options.quick else CASES
    for (number, seed), case in itertools.product(enumerate(SEEDS), cases):
        if number and case.replicas > 8:
            continue
        seconds = options.seconds if options.seconds and case.replicas > 8 and case.sides == SIDES else case.seconds
        played = None
        for kernel, side in itertools.product(KERNELS, case.sides):
            if records.has(cell=case.name, kernel=kernel, side=side, round=number):
                continue
            work, ranks, outputs = played = played or traffic(case, seconds, seed)
            service = Service(case.replicas, ranks, kernel, slo_s=slo_s(), outputs=outputs, seed=seed)
            began = time.process_time()
            result = simulate_service(SCENARIO, service, work, "jlora", side)
            told, summary = result["service"], result["summary"]
            kept = {key: told[key] for key in ("attainment", "per_token_s", "per_token_p99_s", "goodput", "imbalance")}
            kept |= {key: summary[key] for key in ("requests", "unfinished", "ttft_s", "ttft_p99_s", "tpot_s")}
            kept |= {"replicas": case.replicas, "cpu_s": time.process_time() - began}
            records.add(case.name, side, number, {"kernel": kernel, **kept})
