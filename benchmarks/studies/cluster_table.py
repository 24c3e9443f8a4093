"""`jlora bench cluster-table`: routing policies on kinds of traffic to 4, 16 and 60 replicas, simulated.

Replicas are A10s with Llama-2-7B whose pools hold a part of the adapters, and hosts that fetch an adapter with its
first request (`FETCH_GBPS`). Both kernels of CaraServe's models are played.

    loraserve           Algorithm 1 places adapters and its table routes; the new place has an adapter before the switch
    loraserve, jlora    the placement brings adapters, jlora's policy routes
    all three           the same, and dLoRA's balance moves requests
    dlora, all          dLoRA whole: its preload by the trace's own demand, its routing, its moves

With `--data` there is a seventh kind: adapters and clock of GenTD26 and lengths of Azure's conversations, as recorded.

The first `WARM_S` of every run are played and not counted: caches fill, and a placement learns the demand. In cells of
`KILLS` a replica is killed in the middle, and comes back with nothing `DOWN_S` later.

The order of the cells is that of `PLANS`, so an interrupted run has all policies of the first ones. More replicas are
played for less time, with fewer policies.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner import Options
from benchmarks.services import KILLED
from jlora.cluster.routing.routes import ROUTES
from jlora.config import EngineConfig
from jlora.errors import ConfigError
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.kernels import Kernel
from jlora.sim.losses import Loss
from jlora.sim.placing import Place
from jlora.sim.scenario import Scenario, Work, settled
from jlora.sim.service import TABLE, Service, simulate_service
from jlora.sim.wires import Balance
from jlora.sim.workloads import SOURCES
from jlora.sim.workloads.kinds import KINDS, Kind
from jlora.sim.workloads.mixes import deal

A10 = Hardware(CHIPS["a10"], 1, MODELS["llama-2-7b"])
SCENARIO = Scenario(A10, host_gb=24.0, engine=EngineConfig(max_seqs=64, max_step_tokens=1024, max_queue=1 << 20))
RANKS = (8, 16, 32, 64)
FETCH_GBPS = 1.0
SLO_S = 0.05  # per token of a whole answer: 1.9 times a request's alone
PLACE_S = 2.0
KERNELS: tuple[Kernel, ...] = ("padded", "unpadded")
# Side -> (placement, route, moves of requests).
SIDES: Mapping[str, tuple[Place, str, Balance | None]] = {
    **{route: ("", route, None) for route in ROUTES},
    "loraserve": ("loraserve", TABLE, None),
    "loraserve, jlora": ("loraserve", "jlora", None),
    "all three": ("loraserve", "jlora", Balance()),
    "dlora, all": ("dlora", "dlora", Balance()),
}
MOST = tuple(side for side in SIDES if side not in ("random", "first-fit"))
BEST = ("round-robin", "least-loaded", "sticky", "caraserve", "dlora", "jlora", "loraserve", "loraserve, jlora")
RECORDED = "recorded"
DOWN_S = 5.0
WARM_S = 8.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One size of the service. Traffic whose popularity shifts counts for `shifts` seconds if that is longer."""

    replicas: int
    seconds: float
    seed: int
    sides: tuple[str, ...] = tuple(SIDES)
    shifts: float = 12.0
    kinds: tuple[str, ...] = (*KINDS, RECORDED)
    kernels: tuple[Kernel, ...] = KERNELS
    killed: bool = False
    warm: float = WARM_S


def killed(replicas: int, seconds: float, seed: int) -> Plan:
    """A replica is killed in the middle."""
    sides, kinds = ("round-robin", "sticky", "jlora", "all three"), ("Zipf", "sessions")
    return Plan(replicas, seconds, seed, sides, kinds=kinds, kernels=("unpadded",), killed=True, warm=0.0)


# Nothing was tuned on these seeds.
PLANS = (
    Plan(4, 24.0, 8),
    Plan(16, 16.0, 9, MOST),
    Plan(60, 16.0, 10, BEST, kernels=("unpadded",)),
)
KILLS = (killed(4, 30.0, 11), killed(16, 20.0, 12), killed(60, 10.0, 13))
FEW = ("round-robin", "loraserve", "jlora", "dlora, all")
QUICK = (
    Plan(2, 0.5, 1, FEW, 0.5, warm=0.25),
    Plan(2, 0.5, 5, ("jlora", "all three"), 0.5, ("Zipf",), ("unpadded",), True, 0.0),
)


def kinds(data: Path | None) -> dict[str, Kind]:
    """Every kind of traffic; the recorded one only with the files of public traces."""
    recorded = {RECORDED: Kind(RECORDED, SOURCES["W4b"](data), 0.7)} if data else {}
    return {**KINDS, **recorded}


def run(options: Options) -> None:
    """Plays what the file has not got yet. Raises ConfigError for a side that is none."""
    if unknown := set(options.only) - SIDES.keys():
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: must be of {', '.join(SIDES)}")
    settings = {"slo_s": SLO_S, "fetch_gbps": FETCH_GBPS, "seconds": options.seconds, "quick": options.quick}
    records, known = options.records("cluster-table-simulated", settings), kinds(options.data)
    for plan in QUICK if options.quick else (*PLANS, *KILLS):
        for kind in (known[name] for name in plan.kinds if name in known):
            played, cell = None, kind.name + KILLED * plan.killed
            for kernel, side in itertools.product(plan.kernels, plan.sides):
                if records.has(cell=cell, replicas=plan.replicas, kernel=kernel, side=side):
                    continue
                if not options.only or side in options.only:
                    played = played or work_of(kind, plan, options.seconds)
                    records.add(cell, side, 0, measured(plan, kernel, side, played))


def work_of(kind: Kind, plan: Plan, seconds: float) -> tuple[Work, tuple[int, ...]]:
    """The traffic, and the adapters' ranks."""
    seconds = seconds or max(plan.seconds, plan.shifts if kind.name == "shifting skew" else 0.0)
    trace = settled(kind.trace(plan.replicas, plan.warm + seconds, plan.seed), SCENARIO.step_model)
    ranks = tuple(deal(RANKS, len(trace.adapters), plan.seed))
    return Work.of(trace, ranks, A10), ranks


def measured(plan: Plan, kernel: Kernel, side: str, played: tuple[Work, tuple[int, ...]]) -> dict[str, Any]:
    """One run."""
    work, ranks = played
    place, route, balance = SIDES[side]
    losses = (Loss(work.trace.turns[-1].at / 2, 1, DOWN_S),) if plan.killed else ()
    service = Service(
        plan.replicas, ranks, kernel, fetch_gbps=FETCH_GBPS, slo_s=SLO_S, seed=plan.seed, place=place,
        place_s=PLACE_S, balance=balance, losses=losses, warm_s=plan.warm,
    )  # fmt: skip
    began = time.process_time()
    result = simulate_service(SCENARIO, service, work, "jlora", route)
    summary, told, cache = result["summary"], result["service"], result["cache"]
    return {
        "kernel": kernel,
        "replicas": plan.replicas,
        "seed": plan.seed,
        **{key: summary[key] for key in ("requests", "unfinished", "ttft_s", "ttft_p99_s", "tpot_s", "cached")},
        **{key: told[key] for key in ("attainment", "per_token_s", "goodput", "imbalance", "bytes_fetched")},
        **{key: told[key] for key in ("adapters_most", "adapters_mean", "adapters_peak", "bytes_peak")},
        **{key: told[key] for key in ("moved", "lost", "resumed")},
        "bytes_in": cache["bytes_in"],
        "cpu_s": time.process_time() - began,
    }
