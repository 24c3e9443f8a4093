"""`jlora bench cluster-migration`: dLoRA's Figures 11, 12 and 15, simulated (Wu et al. 2024, section 7.4 and 7.5).

Eight replicas of Llama-2-7B on A100s (the paper's A800 computes alike) and adapters of rank 8. Lengths follow
ShareGPT's means with a long tail, arrivals come in bursts, and adapters follow Zipf's law.

    rr               dLoRA's preload; requests go to the adapter's replicas in turn
    dispatch         the preload, and the least estimated pending time (dLoRA's "proactive dispatch")
    dlora            the same, and moves
    dlora, online    the same, but the preload begins with equal demand, and follows the measured one every second
    jlora            jlora's routing; jlora, moves: the same with moves
    apart            each adapter on a replica of its own (the paper's vLLM with uniform allocation)

All adapters have one rank, so CaraServe's padded and unpadded kernels cost the same. Beside that one (`unpadded`) the
study plays a kernel that reads each adapter of a step once (`own`), as ours does.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import milp

from benchmarks.runner import Options
from benchmarks.studies.traffic import arrivals, turns_of, work_of, zipf
from jlora.cluster import migration
from jlora.cluster.balance import Terms
from jlora.config import EngineConfig
from jlora.errors import ConfigError
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.kernels import Kernel
from jlora.sim.placing import Place
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import TABLE, TURNS, Service, simulate_service
from jlora.sim.wires import Balance

CARD = Hardware(CHIPS["a100"], 1, MODELS["llama-2-7b"])
RANK = 8
BATCH = 32  # sequences of a replica at once
SCENARIO = Scenario(CARD, host_gb=1000.0, engine=EngineConfig(max_seqs=BATCH, max_step_tokens=1024, max_queue=1 << 20))
PROMPT, OUTPUT = 160, 210  # mean tokens
POPULARITY = 0.9  # exponent of Zipf's law
KNOWN_S, LEARNS_S = 1e6, 1.0  # a time step of the placement: one for the whole run, by the trace's own demand
# Side -> (placement, route, whether requests move, seconds of a time step).
SIDES: Mapping[str, tuple[Place, str, bool, float]] = {
    "rr": ("dlora", TURNS, False, KNOWN_S),
    "dispatch": ("dlora", "dlora", False, KNOWN_S),
    "dlora": ("dlora", "dlora", True, KNOWN_S),
    "dlora, online": ("dlora", "dlora", True, LEARNS_S),
    "jlora": ("", "jlora", False, KNOWN_S),
    "jlora, moves": ("", "jlora", True, KNOWN_S),
    "apart": ("contiguous", TABLE, False, KNOWN_S),
}
SHARED = tuple(side for side in SIDES if side != "apart")  # by more adapters than replicas


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `longer`: all lengths over the usual; `burst`: coefficient of variation of the gaps."""

    name: str
    rate: float
    adapters: int = 32
    longer: float = 1.0
    burst: float = 4.0
    seconds: float = 8.0
    replicas: int = 8
    kernel: Kernel = "own"
    sides: tuple[str, ...] = SHARED


CASES = (
    Case("11a: 100 requests/s", 100.0),
    Case("11a: 120 requests/s", 120.0),
    Case("11b: lengths x 2", 55.0, longer=2.0),
    Case("11b: lengths x 4", 28.0, longer=4.0),
    Case("12: 8 adapters", 100.0, adapters=8, sides=tuple(SIDES)),
    Case("12: 128 adapters", 100.0, adapters=128),
)
QUICK = (Case("11a: 20 requests/s", 20.0, seconds=0.5, replicas=2, sides=tuple(SIDES)),)
KERNELS: tuple[Kernel, ...] = ("own", "unpadded")
SEEDS = (1, 2)  # nothing was tuned on the second one
# A live router gives the solver 0.2 s. Here nodes bound it, or results would depend on the machine.
BALANCE = Balance(Terms(queue_s=0.2, limit_s=math.inf, nodes=10), every_s=0.5)
LIMITED = 1  # the status of a solution whose search a limit has ended


def traffic(case: Case, seconds: float, seed: int) -> tuple[Work, float]:
    """The requests, and tokens of a mean answer."""
    rng = np.random.default_rng(seed)
    count = round(case.rate * seconds)
    times = arrivals(rng, case.rate, count, case.burst)
    adapters = rng.choice(case.adapters, count, p=zipf(case.adapters, POPULARITY))
    spread = 1.0  # of the logarithm; the mean of such lengths is exp(spread ** 2 / 2) times their median
    long = [mean * case.longer * rng.lognormal(-(spread**2) / 2, spread, count) for mean in (PROMPT, OUTPUT)]
    prompts, outputs = (np.clip(lengths, 4, 1500).astype(int) for lengths in long)
    turns = turns_of(rng, zip(times, prompts, outputs, adapters, strict=True))
    return work_of(case.name, turns, (RANK,) * case.adapters, CARD), float(outputs.mean())


def run(options: Options) -> None:
    """Every case and side, or those asked for, with both kernels and two seeds. Raises ConfigError."""
    if unknown := set(options.only) - SIDES.keys():
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: must be of {', '.join(SIDES)}")
    records = options.records("cluster-migration-simulated", {"seconds": options.seconds, "batch": BATCH})
    for (number, seed), case in itertools.product(enumerate(SEEDS), QUICK if options.quick else CASES):
        work, outputs = traffic(case, options.seconds or case.seconds, seed)
        sides = [side for side in case.sides if not options.only or side in options.only]
        for kernel, side in itertools.product(KERNELS, sides):
            if not records.has(cell=case.name, kernel=kernel, side=side, round=number):
                records.add(case.name, side, number, measured(replace(case, kernel=kernel), side, work, outputs))


@dataclass(slots=True)
class Solver:
    """Counts the solver's answers. `seconds`: of the processor, for each; `limited`: answers that its bound has ended.

    In place of `scipy.optimize.milp`, for the time of a run.
    """

    seconds: list[float] = field(default_factory=list)
    limited: int = 0

    def __call__(self, *program: Any, **options: Any) -> Any:
        began = time.process_time()
        answer = milp(*program, **options)
        self.seconds.append(time.process_time() - began)
        self.limited += answer.status == LIMITED
        return answer


def measured(case: Case, side: str, work: Work, outputs: float) -> dict[str, Any]:
    """One run; `solve_s` is the processor's time on this machine, which no result depends on."""
    place, route, moves, every_s = SIDES[side]
    service = Service(
        case.replicas, (RANK,) * case.adapters, case.kernel, outputs=outputs, place=place, place_s=every_s,
        foreseen=every_s == KNOWN_S, balance=BALANCE if moves else None,
    )  # fmt: skip
    migration.milp = solver = Solver()
    try:
        result = simulate_service(SCENARIO, service, work, "jlora", route)
    finally:
        migration.milp = milp
    summary, told = result["summary"], result["service"]
    rows = result["requests"]["rows"]
    columns = result["requests"]["columns"]
    sent, ttft, tpot, output = (columns.index(name) for name in ("sent_s", "ttft_s", "tpot_s", "output"))
    ended = [row for row in rows if row[output] is not None]
    latency = sum(row[ttft] + row[tpot] * (row[output] - 1) for row in ended) / max(1, sum(r[output] for r in ended))
    end = work.trace.turns[-1].at
    here = sum(by(end - row[sent] - row[ttft], row[tpot], row[output]) for row in ended)
    return {
        "kernel": case.kernel,
        "latency_s": latency,
        "throughput": here / end,
        **{key: summary[key] for key in ("requests", "unfinished", "ttft_s", "ttft_p99_s", "tpot_s", "queue_s")},
        **{key: told[key] for key in ("goodput", "imbalance", "moved", "plans", "greedy", "candidates_most")},
        "seconds": result["device"]["seconds"],
        "busy_s": sum(result["device"]["busy"]) * result["device"]["seconds"],
        "output_tokens": sum(row[output] for row in ended),
        "solves": len(solver.seconds),
        "limited": solver.limited,
        "solve_s": sum(solver.seconds),
        "solve_longest_s": max(solver.seconds, default=0.0),
    }


def by(since_s: float, tpot_s: float, tokens: int) -> int:
    """Tokens of an answer, of those that have ended, that had come so long after its first one."""
    return 0 if since_s < 0 else min(tokens, 1 + int(since_s / tpot_s)) if tpot_s else tokens
