"""`jlora bench cluster-load`: R8, routing policies by load, with steps measured on an H100, simulated.

Replicas serve Llama-3-8B. Their steps take what `docs/results/step-llama-3-8b-h100.json` says, which the device check
fitted to 9 steps of the product's own kernels. A replica's share of the adapters is `ADAPTERS`: with 4 replicas a host
holds all of them in the end, with 16 about half, with 60 an eighth.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.runner import Options
from jlora.config import EngineConfig
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, settled
from jlora.sim.service import Service, simulate_service
from jlora.sim.workloads.kinds import KINDS, Kind
from jlora.sim.workloads.mixes import deal
from jlora.step_model import StepModel

STEPS = Path(__file__).parents[2] / "docs" / "results" / "step-llama-3-8b-h100.json"
H100 = Hardware(CHIPS["h100"], 1, MODELS["llama-3-8b"])
ENGINE = EngineConfig(max_seqs=128, max_step_tokens=2048, max_queue=1 << 20)
RANKS = (8, 16, 32, 64)
ADAPTERS = 240
FETCH_GBPS = 1.0
HOST_GB = 100.0
WARM_S = 8.0
SLO_S = 0.012  # per token of a whole answer: 1.9 times a request's alone
SIDES = (
    "round-robin", "random", "most-idle", "first-fit", "least-loaded", "sticky", "caraserve", "dlora", "jlora",
)  # fmt: skip
FEW = ("round-robin", "least-loaded", "sticky", "dlora", "jlora")


@dataclass(frozen=True, slots=True)
class Plan:
    """One size of the service, and its loads: requests per second of a replica."""

    replicas: int
    rates: tuple[float, ...]
    seconds: float
    seed: int
    sides: tuple[str, ...] = SIDES
    kinds: tuple[str, ...] = ("Zipf", "sessions")
    warm: float = WARM_S


PLANS = (
    Plan(4, (10.0, 20.0, 40.0, 50.0), 16.0, 21),
    Plan(16, (10.0, 20.0, 40.0), 12.0, 22, FEW),
    Plan(60, (10.0, 20.0), 8.0, 23, FEW, ("Zipf",)),
)
QUICK = (Plan(2, (4.0,), 0.5, 21, ("round-robin", "jlora"), ("Zipf",), 0.25),)


def run(options: Options) -> None:
    """Every plan at every load."""
    settings = {"slo_s": SLO_S, "fetch_gbps": FETCH_GBPS, "host_gb": HOST_GB, "warm_s": WARM_S, "adapters": ADAPTERS}
    records = options.records("cluster-load-simulated", settings)
    scenario = Scenario(H100, host_gb=HOST_GB, engine=ENGINE, step=StepModel.fitted(STEPS, "llama-3-8b", 1))
    for plan in QUICK if options.quick else PLANS:
        for name, rate in itertools.product(plan.kinds, plan.rates):
            played = None
            for side in plan.sides:
                if not records.has(cell=name, replicas=plan.replicas, rate=rate, side=side):
                    kind = replace(KINDS[name], rate=rate, adapters=ADAPTERS)
                    played = played or work_of(scenario, kind, plan, options.seconds)
                    records.add(name, side, 0, {"rate": rate, **measured(scenario, plan, side, played)})


def work_of(scenario: Scenario, kind: Kind, plan: Plan, seconds: float) -> tuple[Work, tuple[int, ...]]:
    """The traffic, and the adapters' ranks."""
    trace = kind.trace(plan.replicas, plan.warm + (seconds or plan.seconds), plan.seed)
    ranks = tuple(deal(RANKS, len(trace.adapters), plan.seed))
    return Work.of(settled(trace, scenario.step_model), ranks, H100), ranks


def measured(scenario: Scenario, plan: Plan, side: str, played: tuple[Work, tuple[int, ...]]) -> Mapping[str, Any]:
    """One run."""
    work, ranks = played
    service = Service(plan.replicas, ranks, fetch_gbps=FETCH_GBPS, slo_s=SLO_S, seed=plan.seed, warm_s=plan.warm)
    began = time.process_time()
    result = simulate_service(scenario, service, work, "jlora", side)
    summary, told = result["summary"], result["service"]
    return {
        "replicas": plan.replicas,
        "seed": plan.seed,
        **{key: summary[key] for key in ("requests", "unfinished", "ttft_s", "ttft_p50_s", "ttft_p99_s", "tpot_s")},
        **{key: told[key] for key in ("attainment", "goodput", "imbalance", "bytes_fetched", "adapters_most")},
        **{f"missed_{key}": value for key, value in told["missed"].items()},
        "busy": sum(result["device"]["busy"]) / plan.replicas,
        "cpu_s": time.process_time() - began,
    }
