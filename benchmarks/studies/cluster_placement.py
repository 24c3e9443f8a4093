"""`jlora bench cluster-placement`: LoRAServe's Figures 17 to 22 in short runs, simulated.

Four servers (A100s with Llama-2-7B), more in Figure 21, and adapters of ranks 8 to 128. The paper's production trace
is private. In its place stands Azure's conversation trace of 2023 with `--data`: its lengths, its gaps at another mean
rate, and drawn adapters. Elsewhere lengths are drawn around 512 tokens of prompt and 128 of answer.

    random, contiguous   placed once ("S-LoRA Random" and "Contiguous")
    toppings             CaraServe's router with every adapter on every host, as LoRAServe ran it; "any rank": the same,
                         but blind to ranks
    loraserve            Algorithm 1, fetch before the switch; loraserve, late: fetch with the first request (the paper)
    loraserve, jlora     the placement brings adapters, jlora's policy routes
    jlora                jlora's policy alone: an adapter comes with its first request
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Options
from benchmarks.studies.traffic import arrivals, turns_of, work_of, zipf
from jlora.config import EngineConfig
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.kernels import Kernel
from jlora.sim.placing import Place
from jlora.sim.scenario import Scenario, Work
from jlora.sim.service import TABLE, Service, simulate_service
from jlora.sim.workloads.files import Lengths, azure

CARD = Hardware(CHIPS["a100"], 1, MODELS["llama-2-7b"])
SCENARIO = Scenario(CARD, host_gb=1000.0, engine=EngineConfig(max_seqs=128, max_step_tokens=1024, max_queue=1 << 20))
RANKS = (8, 16, 32, 64, 128)
SLO_S = 0.05  # per token
FETCH_GBPS = 1.0
LOOK_S = 0.1  # of the controller at where adapters are: time steps are shorter than the paper's, so this is too
KERNELS: tuple[Kernel, ...] = ("padded", "unpadded")
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
FEW = ("random", "contiguous", "toppings", "toppings, any rank", "loraserve", "jlora")
MOST = 1900  # tokens of a prompt or an answer
PARTS = 10  # of a run, whose TTFT is told


@dataclass(frozen=True, slots=True)
class Case:
    """One load.

    Attributes:
        figure: the paper's.
        skew: how requests spread over ranks: "uniform", "shifting", "exponential", or a power's exponent.
        popular: exponent of Zipf's law over the adapters of a rank.
        even: requests come at equal distances, instead of Poisson's.
        recorded: gaps and lengths are those of Azure's trace.
        step_s: a time step of the placement; the paper's is a minute, in traces of an hour.
    """

    figure: str
    skew: str
    rate: float
    servers: int = 4
    adapters: int = 25
    popular: float = 0.0
    even: bool = False
    recorded: bool = False
    seconds: float = 30.0
    step_s: float = 2.0
    sides: tuple[str, ...] = FEW
    seed: int = 1

    @property
    def name(self) -> str:
        """What differs between the cases of a figure."""
        come = "Azure 2023" if self.recorded else "even" if self.even else "Poisson"
        return f"{self.skew}, {come}, {self.adapters} adapters, {self.servers} servers, {self.rate:g}/s"


# Figures 19 and 20 are TTFT and TBT of the same runs; 18 shows the servers of one of 17's.
PRODUCTION = tuple(
    Case("17", "uniform", rate, adapters=count, popular=1.0, seconds=24.0)
    for count in (50, 100, 200)
    for rate in (30.0, 40.0, 50.0, 60.0, 70.0, 80.0)
)
# Nothing was tuned on these: neither on the lengths nor on the gaps.
RECORDED = tuple(
    Case("17, recorded", "uniform", rate, adapters=100, popular=1.0, recorded=True, seconds=24.0)
    for rate in (8.0, 12.0, 16.0, 24.0)
)
PUBLIC = tuple(
    Case("19", skew, rate, even=even)
    for even in (False, True)
    for skew in ("uniform", "shifting", "exponential")
    for rate in (24.0, 32.0, 40.0)
)
SCALE = tuple(
    Case("21", "uniform", rate * n, servers=n, adapters=25 * n // 4, seconds=20.0)
    for n in (4, 8, 12)
    for rate in (10.0, 15.0, 17.5)
)
SKEWS = tuple(Case("22", power, 36.0, adapters=100) for power in ("1/3", "1", "2", "3"))
MIDDLE = tuple(case for case in PUBLIC if case.rate == 32.0 and not case.even)
LONG = Case("19, longer", "shifting", 40.0, seconds=120.0, step_s=8.0)
CASES = (
    *PRODUCTION,
    *RECORDED,
    *(replace(case, sides=tuple(SIDES)) if case in MIDDLE else case for case in PUBLIC),
    *SCALE,
    *SKEWS,
    LONG,
    *(replace(case, seed=2) for case in (*MIDDLE, *SKEWS)),  # a seed that nobody has looked at
)
QUICK = (Case("19", "shifting", 8.0, servers=2, adapters=10, seconds=2.0, sides=tuple(SIDES)),)


def traffic(case: Case, seconds: float, data: Path | None = None) -> tuple[Work, tuple[int, ...], float]:
    """The requests, the ranks, and tokens of a mean answer. `data`: directory of the public traces."""
    rng = np.random.default_rng(case.seed)
    count = round(case.rate * seconds)
    ranks = tuple(RANKS[i % len(RANKS)] for i in range(case.adapters))
    if case.recorded:
        assert data is not None
        times, prompts, outputs = recorded(azure(data), count, case.rate)
    else:
        times = (np.arange(count) + 1) / case.rate if case.even else arrivals(rng, case.rate, count)
        prompts, outputs = (np.clip(m * rng.lognormal(-0.18, 0.6, count), 4, MOST).astype(int) for m in (512, 128))
    of_rank = [list(range(first, case.adapters, len(RANKS))) for first in range(len(RANKS))]

    def adapters() -> Iterator[int]:
        for at in times:
            found = of_rank[int(rng.choice(len(RANKS), p=shares(case.skew, at / seconds)))]
            yield found[int(rng.choice(len(found), p=zipf(len(found), case.popular)))]

    turns = turns_of(rng, zip(times, prompts, outputs, adapters(), strict=True))
    return work_of(case.name, turns, ranks, CARD), ranks, float(outputs.mean())


def recorded(trace: Lengths, count: int, rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first requests of a trace, at another mean rate: seconds, tokens of prompts and of answers."""
    times = trace.times[:count] - trace.times[0]
    prompts, outputs = np.clip(trace.prompts[:count], 4, 3000), np.clip(trace.outputs[:count], 4, 1000)
    return times * (count / rate / times[-1]), prompts, outputs


def shares(skew: str, part: float) -> list[float]:
    """Of each rank in the requests after this part of the run. Shifting: half of them from rank 128 to rank 8."""
    if skew == "shifting":
        moved = min(max(part, 0.0), 1.0)
        return [0.125 + 0.375 * moved, 0.125, 0.125, 0.125, 0.5 - 0.375 * moved]
    if skew in ("uniform", "exponential"):
        weights = [(1.0 if skew == "uniform" else 0.5) ** i for i in range(len(RANKS))]
    else:
        over, _, under = skew.partition("/")
        weights = [(i + 1) ** -(float(over) / float(under or 1)) for i in range(len(RANKS))]
    return [weight / sum(weights) for weight in weights]


def run(options: Options) -> None:
    """Every case with both kernels under its sides."""
    records = options.records("cluster-placement-simulated", {"seconds": options.seconds, "slo_s": SLO_S})
    cases = [case for case in CASES if options.data or not case.recorded]
    for case in QUICK if options.quick else cases:
        played = None
        for kernel in KERNELS:
            for side in case.sides:
                cell = f"{case.figure}: {case.name}"
                if not records.has(cell=cell, kernel=kernel, side=side, seed=case.seed):
                    played = played or traffic(case, options.seconds or case.seconds, options.data)
                    records.add(cell, side, 0, measured(case, kernel, side, played))


def measured(case: Case, kernel: Kernel, side: str, load: tuple[Work, tuple[int, ...], float]) -> dict[str, Any]:
    """One run."""
    work, ranks, outputs = load
    place, route, ahead = SIDES[side]
    fetch_gbps = 0.0 if side in EVERYWHERE else FETCH_GBPS
    service = Service(
        case.servers, ranks, kernel, fetch_gbps=fetch_gbps, slo_s=SLO_S, outputs=outputs, seed=case.seed,
        place=place, place_s=case.step_s, look_s=LOOK_S, ahead=ahead,
    )  # fmt: skip
    began = time.process_time()
    result = simulate_service(SCENARIO, service, work, "jlora", route)
    summary, told = result["summary"], result["service"]
    if side in EVERYWHERE:
        held = sum(work.sizes) * CARD.layout.block_bytes
        told |= {"adapters_most": case.adapters, "adapters_peak": case.adapters, "bytes_peak": held}
        told["servers"] = [server | {"adapters": case.adapters} for server in told["servers"]]
    waits = waited(result["requests"]["columns"], result["requests"]["rows"], result["device"]["seconds"])
    return {
        **{key: getattr(case, key) for key in ("figure", "skew", "rate", "servers", "adapters", "even", "seed")},
        "kernel": kernel,
        **{key: summary[key] for key in ("requests", "unfinished", "ttft_s", "ttft_p99_s", "tpot_s")},
        **{key: told[key] for key in ("attainment", "goodput", "imbalance", "adapters_most", "bytes_fetched")},
        **{key: told[key] for key in ("adapters_peak", "bytes_peak")},
        "by_server": told["servers"],
        "ttft_p95_s": float(np.percentile(waits, 95)),
        "ttft_parts_s": [float(np.mean(part)) for part in np.array_split(waits, PARTS) if len(part)],
        "cpu_s": time.process_time() - began,
    }


def waited(columns: Sequence[str], rows: Sequence[Sequence[Any]], end: float) -> list[float]:
    """Seconds until the first token, in the order of arrival; of those without one, until the end."""
    sent, ttft = (columns.index(name) for name in ("sent_s", "ttft_s"))
    ordered = sorted(rows, key=lambda row: row[sent])
    return [end - row[sent] if row[ttft] is None else row[ttft] for row in ordered]
