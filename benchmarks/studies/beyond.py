"""R3 in the simulator: `jlora` against every fair baseline and against an evictor that knows the future.

    {W1 chat, W3 agents} x pool of {25, 50, 75 %} of the working set x link of {2, 10, 50 GB/s}
    {W1, W3} x 50 ms, 4.4 s more for every load of an adapter          a software path, a remote tier
    {W1, W3} x link of {2, 10 GB/s} x `Prefetch` given 1 s, 10 s ahead
    {W5 drift, W7 synthetic, W2 translation} x link of {2, 10, 50 GB/s}, 1,000 adapters on the whole card:
        single questions, whose KV nobody asks for again, so adapters alone are their working set

Llama-2-7B on the card of FASTLIBRA's evaluation. Each cell is run at four rates, as shares of the peak
of `jlora` in that cell: the highest rate with a mean TTFT below 500 ms. A load of 4.4 s is what
fetching an adapter from remote storage takes in the mean (GenTD26). In W5 other adapters are popular
every 30 s, ten times as often as in that trace, so that a short run sees it. The bound evicts with
knowledge of the trace and fetches nothing ahead (`jlora.sim.clairvoyant`). The static split is run with
as many shares as it takes to find its best.

All policies get the same requests, so ratios are far steadier than times. What is left of chance is
told by batch means: the ratio in each fifth of the requests, and the standard error of these. A cell is
one process and one journal of finished runs, so that an interrupted study goes on.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.records import Records
from benchmarks.runner import Options
from benchmarks.studies.peaks import Bracket, find_best, find_peak, rounded
from jlora import machine
from jlora.loadgen.rounds import Sample
from jlora.sim.clairvoyant import Clairvoyant
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, settled, simulate
from jlora.sim.trace import Trace
from jlora.sim.workloads import SOURCES, Load, play, ranks
from jlora.sim.workloads.popularity import parse as parse_popularity

OURS = "jlora"
POLICIES = (OURS, "lru", "fastlibra", Clairvoyant.name)
SPLITS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)  # of the pool, for adapters, in `vllm-fair`
FIRST = slice(2, 5)  # of these: tried in any case (see `find_best`)
LEVELS = (0.3, 0.7, 0.9, 1.1)  # of the peak
LIMIT_S = 0.5  # of mean TTFT, at the peak
STRIDE = 1.3  # times: between the first guesses of a peak
BATCHES = 5
CARD = Hardware(CHIPS["npu"], 1, MODELS["llama-2-7b"])
YOUNG = 100_000  # objects between two looks of the garbage collector: a simulation makes no cycles before its end
TRACES = 8  # kept by a process

BASE, OTHERS = {"W1": 5.5, "W2": 80.0, "W3": 50.0}, 2.0  # requests/s at which requests are drawn
PACE = {"W3": 10.0}  # requests/s at which a user's gaps are the workload's own (others: 1)
LENGTH = {"W1": 1.0, "W2": 0.25, "W3": 0.4, "W5": 1.0, "W7": 1.0}  # of `Plan.seconds`: some 300 requests

# Of a run, what is kept.
KEPT = (
    "requests", "unfinished", "refused", "preemptions", "ttft_s", "ttft_p99_s", "tpot_s", "queue_s", "adapter_s",
    "kv_s", "swap_s", "prefill_s", "cached", "adapter_hits", "kv_device_hits", "kv_host_hits", "bytes_in", "bytes_out",
    "recomputed_tokens", "invalid_kv", "tokens", "batch", "busy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One setting. A 0 leaves a size or a speed to the hardware (see `Scenario`)."""

    workload: str
    adapters: int
    popularity: str = ""
    hbm_share: float = 0.0
    link_gbps: float = 0.0
    adapter_load_s: float = 0.0
    hint_s: float = 0.0

    @property
    def name(self) -> str:
        """For files and tables."""
        parts = [self.workload, "7B", str(self.adapters), self.popularity.replace(":", "")]
        sizes = {"hbm": self.hbm_share, "link": self.link_gbps, "load": self.adapter_load_s, "hint": self.hint_s}
        return "-".join([*filter(None, parts), *(f"{key}{value:g}" for key, value in sizes.items() if value)])

    @property
    def scenario(self) -> Scenario:
        """What it runs on."""
        sizes = asdict(self)
        return Scenario(CARD, **{key: sizes[key] for key in ("hbm_share", "link_gbps", "adapter_load_s", "hint_s")})


POOLS, LINKS = (0.25, 0.5, 0.75), (10.0, 2.0, 50.0)
CASES = (
    *(Case(w, 100, hbm_share=s, link_gbps=g) for g, w, s in product(LINKS, ("W3", "W1"), POOLS)),
    *(Case(w, 100, hbm_share=0.5, adapter_load_s=load) for load, w in product((0.05, 4.4), ("W3", "W1"))),
    *(Case(w, 1000, {"W5": "drift:30"}.get(w, ""), link_gbps=g) for g, w in product(LINKS, ("W5", "W7", "W2"))),
)
HINTED = tuple(
    Case(w, 100, hbm_share=0.5, link_gbps=g, hint_s=hint)
    for w, g, hint in product(("W3", "W1"), (10.0, 2.0), (1.0, 10.0))
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How cells are run.

    Attributes:
        seconds: of traffic, at the rate at which it is drawn.
        work: where journals are kept; data: directory of the public traces, None draws the synthetic equivalents.
        close: how exactly a peak is found.
    """

    seconds: float
    work: Path
    data: Path | None
    close: float = 1.2

    def settings(self) -> dict[str, Any]:
        """What makes two runs comparable."""
        return {"seconds": self.seconds, "levels": list(LEVELS), "data": bool(self.data), "chip": CARD.chip.name}


def run(options: Options) -> None:
    """Runs what is not in the journals yet, each cell in a process; then the records hold everything."""
    cases, hinted, plan = CASES, HINTED, Plan(100.0, options.folder("beyond"), options.data)
    if options.quick:
        cases = (Case("W3", 20, hbm_share=0.5, link_gbps=2.0),)
        hinted = (replace(cases[0], hint_s=1.0),)
        plan = replace(plan, seconds=12.0, close=1.5)
    plan = replace(plan, seconds=options.seconds or plan.seconds)
    cells = [*(Cell(plan, case) for case in cases), *(Hint(plan, case) for case in hinted)]
    deadline, spawn = time.time() + 60 * options.minutes, multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(machine.threads(), spawn, initializer=gc.set_threshold, initargs=(YOUNG,)) as pool,
        tqdm(total=len(cells), desc="simulating", unit="cell") as bar,
    ):
        for done in as_completed(pool.submit(cell.run, deadline) for cell in cells):
            bar.set_postfix_str(done.result())
            bar.update()
    (options.out / "beyond-simulated.jsonl").unlink(missing_ok=True)  # the journals hold every run
    records = options.records("beyond-simulated", plan.settings())
    for cell in cells:
        cell.record(records)


class Cell:
    """One case: all policies at the same rates."""

    kind = "cell"

    def __init__(self, plan: Plan, case: Case):
        self.plan = plan
        self.case = case

    @property
    def name(self) -> str:
        """Of the journal."""
        return f"{self.kind}-{self.case.name}"

    def run(self, deadline: float) -> str:
        """Makes what is missing, as far as the time goes; the cell's name."""
        try:
            self.fill(Runs(self, deadline))
        except TimeoutError:
            return f"{self.name}: cut"
        return self.name

    def fill(self, runs: Runs) -> list[float]:
        """Runs every policy at every rate, then looks for the best share; the rates. Raises TimeoutError."""
        rates = self.rates(runs)
        for rate, policy in product(rates, POLICIES):
            runs.at(rate, policy)
        find_best(lambda share: math.prod(runs.at(r, f"vllm-fair:{share:g}")["ttft_s"] for r in rates), SPLITS, FIRST)
        return rates

    def rates(self, runs: Runs) -> list[float]:
        """The levels of the peak of `jlora`, looked for from the rate at which the requests are drawn."""
        guess, close = self.base, self.plan.close

        def over(rate: float) -> bool:
            return runs.at(rate, OURS)["ttft_s"] >= LIMIT_S

        sides = (0.0, guess) if over(guess) else (guess, math.inf)
        peak = find_peak(over, Bracket(*sides, max(STRIDE, close)), close)
        return [rounded(level * peak) for level in LEVELS]

    def traffic(self, rate: float) -> tuple[Trace, list[int]]:
        """The case's requests at exactly this rate, and its adapters' ranks.

        All times are scaled and the pattern stays: every rate has the same requests. Their history has been
        computed by time 0.
        """
        trace, dealt = self.drawn
        proper = [turn.at for turn in trace.turns if turn.at >= 0]
        factor = len(proper) / rate / max(proper[-1], 1e-9)
        turns = tuple(replace(turn, at=factor * turn.at) for turn in trace.turns)
        return settled(replace(trace, turns=turns), CARD.step_model()), dealt

    @cached_property
    def drawn(self) -> tuple[Trace, list[int]]:
        """The case's requests, and its adapters' ranks."""
        case, plan, spec = self.case, self.plan, CARD.spec
        source = SOURCES[case.workload](plan.data)
        law = parse_popularity(case.popularity, plan.data) if case.popularity else None
        seconds = plan.seconds * LENGTH[case.workload]
        load = Load(self.base, seconds, case.adapters, vocab=spec.vocab, max_len=spec.max_len)
        load = replace(load, gap_s=source.gap_s * PACE.get(case.workload, 1.0) / self.base, popularity=law)
        return play(source, load), ranks(load)

    @property
    def base(self) -> float:
        """The rate at which they are drawn."""
        return BASE.get(self.case.workload, OTHERS)

    def record(self, records: Records) -> None:
        """Adds all runs made so far, and the rates if nothing is missing."""
        runs, cell = Runs(self, 0.0), {"kind": self.kind, **asdict(self.case)}
        for (rate, policy), sample in runs.known.items():
            records.add(self.case.name, policy, 0, {**cell, "rate": rate, **sample})
        with contextlib.suppress(TimeoutError):
            records.add(self.case.name, "anchors", 0, {**cell, "rates": self.fill(runs)})


class Hint(Cell):
    """What a hint gains `jlora` at the rates of the cell without hints."""

    kind = "hint"

    def fill(self, runs: Runs) -> list[float]:
        plain = Cell(self.plan, replace(self.case, hint_s=0.0))
        rates = plain.rates(Runs(plain, runs.deadline))
        for rate in rates:
            runs.at(rate, OURS)
        return rates


class Runs:
    """The finished runs of a cell by (rate, policy)."""

    def __init__(self, cell: Cell, deadline: float):
        self.deadline = deadline
        self._cell = cell
        settings = {**cell.plan.settings(), "case": asdict(cell.case)}
        self._records = Records(cell.plan.work / f"{cell.name}.jsonl", settings)
        self._works: dict[float, Work] = {}
        self.known: dict[tuple[float, str], Sample] = {
            (line["rate"], line["side"]): {key: line[key] for key in line if key not in ("cell", "side", "round")}
            for line in self._records.lines
        }

    def at(self, rate: float, policy: str) -> Sample:
        """One run, made if it is missing. Raises TimeoutError after the deadline."""
        rate = rounded(rate)
        if (rate, policy) not in self.known:
            if time.time() > self.deadline:
                raise TimeoutError
            result = simulate(self._cell.case.scenario, self._played(rate), policy)
            made = {**result["summary"], **result["cache"], **result["device"]}
            sample = {key: made[key] for key in KEPT} | {"batches_s": batch_means(result["requests"])}
            self.known[rate, policy] = {"rate": rate, "commit": machine.commit(), **sample}
            self._records.add(self._cell.case.name, policy, 0, self.known[rate, policy])
        return self.known[rate, policy]

    def _played(self, rate: float) -> Work:
        """The trace of a rate, the same for all policies; the latest few are kept."""
        if rate not in self._works:
            if len(self._works) == TRACES:
                del self._works[next(iter(self._works))]
            self._works[rate] = Work.of(*self._cell.traffic(rate), CARD)
        return self._works[rate]


def batch_means(requests: Mapping[str, Any]) -> list[float]:
    """Mean TTFT in seconds of equally many requests each, in the order in which they were sent."""
    sent, ttft = (requests["columns"].index(name) for name in ("sent_s", "ttft_s"))
    values = [row[ttft] for row in sorted(requests["rows"], key=lambda row: row[sent]) if row[ttft] is not None]
    size = max(-(-len(values) // BATCHES), 1)
    return [statistics.fmean(values[at : at + size]) for at in range(0, len(values), size)]
