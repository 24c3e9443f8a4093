"""FASTLIBRA's evaluation (its section 6), side by side with ours, in the simulator.

    {chatbot W1, translation W2, agents W3} x {7B, 13B, 34B} x {20, 50, 100 adapters}      Figures 11 to 13, 15
    W1, 7B, {1,000, 2,000 adapters} x {distinct, uniform, skewed-0.1, skewed-0.3}          Figure 16
    W1, 7B, {50, 100 adapters} at 2 requests/s, the adapters' share swept                  Figure 9
    W1, 13B, 100 adapters at 1.6 requests/s for half an hour                               Figure 14

As the paper does it, each case is run at ten rates from 0 to the peak of `fastlibra`, and a policy's
TTFT and TPOT are means over these; the peak is the highest rate with a mean TTFT below 500 ms.
Because such a mean is made by whatever is past its own saturation, all points are kept and drawn,
and rates beyond that peak are run until every policy has met its own.

A case is one process and one journal of finished runs, so that an interrupted benchmark goes on.
The scheduler, cache and policies are the product's own; `jlora.sim` says what is modelled.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jlora.bench.rounds import Journal, Sample
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, simulate
from jlora.sim.trace import Trace
from jlora.sim.workloads import SOURCES, Load, play, ranks
from jlora.sim.workloads.popularity import parse as parse_popularity

CHIP = "npu"
CARDS = {"7B": ("llama-2-7b", 1), "13B": ("llama-2-13b", 2), "34B": ("llama-34b", 4)}  # section 6.1
SCENES = {"W1": "chatbot", "W2": "translation", "W3": "agents"}
OWN_PACE = {"W1": 1.0, "W2": 1.0, "W3": 10.0}  # requests/s at which a user's gaps are the workload's own
GUESS = {"W1": 3.0, "W2": 30.0, "W3": 16.0}  # requests/s: where to look for the first peak

REFERENCE = "fastlibra"
POLICIES = ("jlora", "fastlibra", "vllm", "vllm-fair:0.2", "slora")
ABLATIONS = ("fastlibra-wom", "fastlibra-wos", "fastlibra-wol")
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)  # as Figure 9 sweeps them
LIMIT_S = 0.5  # of mean TTFT, at the peak
BEYOND = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0)  # times the reference's peak
CLOSE = 1.06  # times: between what is below the limit and what is not


@dataclass(frozen=True, slots=True)
class Case:
    """One group of bars of a figure. A 0 leaves a size or a speed to the hardware (see `Scenario`)."""

    workload: str
    model: str
    adapters: int
    popularity: str = ""
    hbm_share: float = 0.0
    link_gbps: float = 0.0
    adapter_load_s: float = 0.0
    hint_s: float = 0.0

    @property
    def name(self) -> str:
        """For files and tables."""
        parts = [self.workload, self.model, str(self.adapters), self.popularity.replace(":", "")]
        sizes = {"hbm": self.hbm_share, "link": self.link_gbps, "load": self.adapter_load_s, "hint": self.hint_s}
        return "-".join([*filter(None, parts), *(f"{key}{value:g}" for key, value in sizes.items() if value)])

    @property
    def scenario(self) -> Scenario:
        """What it runs on."""
        return Scenario(
            self.hardware,
            hbm_share=self.hbm_share,
            link_gbps=self.link_gbps,
            adapter_load_s=self.adapter_load_s,
            hint_s=self.hint_s,
        )

    @property
    def hardware(self) -> Hardware:
        """As many cards as the paper uses."""
        model, cards = CARDS[self.model]
        return Hardware(CHIPS[CHIP], cards, MODELS[model])


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        figures: numbers of the paper's.
        steps: rates from 0 to the peak; seconds: of traffic, of every run.
        data: directory of the public traces; None draws the synthetic equivalents.
        work: where journals are kept.
        minutes: no run begins later than that after the start.
        chat: the workload of Figures 9 and 14.
        past: rates beyond the reference's peak, as multiples of it; close: how exactly a peak is found.
    """

    figures: tuple[int, ...]
    cases: tuple[Case, ...]
    many: tuple[Case, ...]
    seconds: float
    steps: int
    work: Path
    minutes: float
    data: Path | None = None
    seed: int = 0
    processes: int = 2
    chat: str = "W1"
    past: tuple[float, ...] = BEYOND
    close: float = CLOSE

    def settings(self) -> dict[str, Any]:
        """What makes two runs comparable."""
        return {"seconds": self.seconds, "steps": self.steps, "seed": self.seed, "data": bool(self.data), "chip": CHIP}


CASES = tuple(Case(w, m, n) for n in (100, 20, 50) for m in CARDS for w in SCENES)
LAWS = ("distinct", "uniform", "skewed:0.1", "skewed:0.3")
MANY = tuple(Case("W1", "7B", n, law) for n in (1000, 2000) for law in LAWS)
FIGURES = (9, 11, 12, 13, 14, 15, 16)


def full(work: Path, data: Path | None) -> Plan:
    """Every case, 5 minutes of traffic a run."""
    return Plan(FIGURES, CASES, MANY, 300.0, 10, work, 60.0, data)


def quick(work: Path, data: Path | None) -> Plan:
    """Few short cases: whether it works at all."""
    many = (Case("W3", "7B", 40, "skewed:0.1"),)
    return Plan(FIGURES, (Case("W3", "7B", 20),), many, 5.0, 2, work, 5.0, data, chat="W3", past=(1.1,), close=1.5)


def run(plan: Plan) -> dict[str, Any]:
    """Runs what is asked for and not in the journals yet; everything the journals hold, as plain values."""
    return run_all(plan, list(_jobs(plan)))


def run_all(plan: Plan, jobs: Sequence[Study]) -> dict[str, Any]:
    """Studies, in their order, in as many processes as the plan has."""
    deadline = time.time() + 60 * plan.minutes
    with (
        ProcessPoolExecutor(plan.processes, multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(jobs), desc="paper", unit="case") as bar,
    ):
        for done in as_completed(pool.submit(job.run, deadline) for job in jobs):
            bar.set_postfix_str(done.result())
            bar.update()
    return {"settings": plan.settings(), "studies": [job.result() for job in jobs]}


class Study:
    """Runs of one case, in a journal. `kind` says in which figure they belong."""

    kind = ""

    def __init__(self, plan: Plan, case: Case):
        self.plan = plan
        self.case = case

    @property
    def name(self) -> str:
        """Of the journal."""
        return f"{self.kind}-{self.case.name}"

    def run(self, deadline: float) -> str:
        """Makes what is missing, in a process of its own, as far as the time goes; the study's name."""
        runs = Runs(self, deadline)
        try:
            self.fill(runs)
        except TimeoutError:
            return f"{self.name}: cut"
        return self.name

    def fill(self, runs: Runs) -> None:
        """Makes all runs. Raises TimeoutError."""
        raise NotImplementedError

    def traffic(self, rate: float) -> tuple[Trace, list[int]]:
        """A trace of exactly this rate, and its adapters' ranks.

        All times of the workload are scaled, its pattern stays (section 6.2).
        """
        case, plan = self.case, self.plan
        source = SOURCES[case.workload](plan.data)
        spec = case.hardware.spec
        law = parse_popularity(case.popularity, plan.data) if case.popularity else None
        load = Load(rate, self.seconds, case.adapters, vocab=spec.vocab, max_len=spec.max_len, seed=plan.seed)
        load = replace(load, gap_s=source.gap_s * OWN_PACE.get(case.workload, 1.0) / rate, popularity=law)
        trace = play(source, load)
        proper = [turn.at for turn in trace.turns if turn.at >= 0]
        factor = len(proper) / rate / max(proper[-1], 1e-9)
        return retimed(trace, lambda at: factor * at), ranks(load)

    @property
    def seconds(self) -> float:
        """Length of a trace, before it is scaled to its exact rate."""
        return self.plan.seconds

    def keep(self, result: Mapping[str, Any]) -> Sample:
        """What of a run is kept."""
        series = result["series"]
        means = {k: sum(series[k]) / max(len(series[k]), 1) for k in ("adapters", "history_kv", "running_kv")}
        return {**result["summary"], **result["cache"], **result["device"], **means}

    def result(self) -> dict[str, Any]:
        """All runs made so far."""
        runs = Runs(self, 0.0).known
        listed = [{"rate": rate, "policy": policy, **sample} for (rate, policy), sample in runs.items()]
        return {"kind": self.kind, "case": {**asdict(self.case), "name": self.case.name}, "runs": listed}


class Runs:
    """The finished runs of a study by (rate, policy); makes those that are missing.

    Raises (from `at`):
        TimeoutError: the deadline has passed.
    """

    def __init__(self, study: Study, deadline: float):
        plan = study.plan
        self._study = study
        self.deadline = deadline
        self._journal = Journal(plan.work / f"{study.name}.jsonl", {**plan.settings(), "case": asdict(study.case)})
        self._work: tuple[float, Work] | None = None
        kept: list[dict[str, Any]] = self._journal.rounds
        self.known: dict[tuple[float, str], Sample] = {(r["rate"], r["policy"]): r["run"] for r in kept}

    def at(self, rate: float, policy: str) -> Sample:
        """One run: means and counts of `jlora.sim.scenario.simulate`."""
        rate = rounded(rate)
        if (rate, policy) not in self.known:
            if time.time() > self.deadline:
                raise TimeoutError
            result = simulate(self._study.case.scenario, self._played(rate), policy)
            self.known[rate, policy] = self._study.keep(result)
            finished: dict[str, Any] = {"rate": rate, "policy": policy, "run": self.known[rate, policy]}
            self._journal.add(finished)
        return self.known[rate, policy]

    def _played(self, rate: float) -> Work:
        """The trace of a rate, the same for all policies."""
        if self._work is None or self._work[0] != rate:
            self._work = rate, Work.of(*self._study.traffic(rate), self._study.case.hardware)
        return self._work[1]


class Curves(Study):
    """Figures 11 to 13 and 15, and 16: TTFT and TPOT over the rate, peaks, hits, for all policies."""

    kind = "curves"
    reference = REFERENCE  # whose peak the rates go up to

    def fill(self, runs: Runs) -> None:
        """Finds the reference's peak and the best share, then all policies at all rates and past them."""
        peak, best = self.anchors(runs)
        policies = list(dict.fromkeys((*self.policies, best)))
        for rate in self.rates(peak):
            for policy in policies:
                runs.at(rate, policy)
        left, before = policies, peak
        for factor in self.plan.past:
            left = [policy for policy in left if runs.at(before, policy)["ttft_s"] < LIMIT_S]
            before = factor * peak
            for policy in left:
                runs.at(before, policy)

    def anchors(self, runs: Runs) -> tuple[float, str]:
        """The reference's peak, and vllm-fair at the share that is best near it."""
        peak = find_peak(runs, self.reference, GUESS.get(self.case.workload, 2.0), self.plan.close)
        fair = [f"vllm-fair:{share:g}" for share in SHARES]
        return peak, min(fair, key=lambda policy: runs.at(0.9 * peak, policy)["ttft_s"])

    def rates(self, peak: float) -> list[float]:
        """The paper's: equal steps up to the peak of the reference."""
        return [rounded(peak * step / self.plan.steps) for step in range(1, self.plan.steps + 1)]

    def result(self) -> dict[str, Any]:
        """With the rates that means are over (none before they are known), and the name of the best share."""
        try:
            peak, best = self.anchors(Runs(self, 0.0))
        except TimeoutError:
            return {**super().result(), "rates": [], "best": ""}
        return {**super().result(), "rates": self.rates(peak), "best": best}

    @property
    def policies(self) -> tuple[str, ...]:
        """Those of the figures asked for."""
        return (*POLICIES, *(ABLATIONS if 15 in self.plan.figures and not self.case.popularity else ()))


class Ratios(Study):
    """Figure 9: vLLM's TTFT over the share of the pool that adapters have, at 2 requests/s."""

    kind = "ratios"
    RATE = 2.0

    def fill(self, runs: Runs) -> None:
        """A run per share, and one pool for comparison."""
        for share in SHARES:
            runs.at(self.RATE, f"vllm-fair:{share:g}")
        for policy in ("jlora", REFERENCE):
            runs.at(self.RATE, policy)


class OverTime(Study):
    """Figure 14: what the device holds over half an hour whose rate rises and falls."""

    kind = "time"
    RATE = 1.6
    LONGER = 6  # times as long as other runs: half an hour
    ENDS, LEVELS = (4 / 18, 9 / 18, 13 / 18, 1.0), (0.5, 1.0, 1.7, 0.8)  # quiet, rising, a peak, quiet again
    POLICIES = ("vllm", "slora", REFERENCE, "jlora")

    def fill(self, runs: Runs) -> None:
        """A run per policy."""
        for policy in self.POLICIES:
            runs.at(self.RATE, policy)

    @property
    def seconds(self) -> float:
        """Half an hour."""
        return self.LONGER * self.plan.seconds

    def traffic(self, rate: float) -> tuple[Trace, list[int]]:
        """The same requests on a clock that runs unevenly: a stand-in for the phases of the paper's trace."""
        trace, dealt = super().traffic(rate)
        last = trace.turns[-1].at
        asked = np.cumsum(np.diff((0.0, *self.ENDS)) * self.LEVELS)
        even = np.concatenate(([0.0], asked / asked[-1])) * last
        ends = np.asarray((0.0, *self.ENDS)) * last
        return retimed(trace, lambda at: at if at < 0 else float(np.interp(at, even, ends))), dealt

    def keep(self, result: Mapping[str, Any]) -> Sample:
        """The device over time too, and TTFT by when it was asked."""
        columns = result["requests"]["columns"]
        sent, ttft = columns.index("sent_s"), columns.index("ttft_s")
        waits = [[row[sent], row[ttft]] for row in result["requests"]["rows"]]
        return {**super().keep(result), "series": result["series"], "waits": waits}


def retimed(trace: Trace, clock: Callable[[float], float]) -> Trace:
    """The same turns at other times."""
    return replace(trace, turns=tuple(replace(turn, at=clock(turn.at)) for turn in trace.turns))


def rounded(rate: float) -> float:
    """Rates are told apart by four digits."""
    return float(f"{rate:.4g}")


def find_peak(runs: Runs, policy: str, guess: float, close: float) -> float:
    """The highest rate at which the policy's mean TTFT is below the limit, to a factor of `close`."""
    low, high = 0.0, float("inf")
    rate = guess
    while (not low or high / low > close) and guess / 100 < rate < 100 * guess:
        if runs.at(rate, policy)["ttft_s"] < LIMIT_S:
            low = rate
        else:
            high = rate
        rate = (low * high) ** 0.5 if low and high < float("inf") else rate * (1.5 if low else 1 / 1.5)
    return low or rate


def _jobs(plan: Plan) -> Iterator[Study]:
    if set(plan.figures) & {11, 12, 13, 15}:
        yield from (Curves(plan, case) for case in plan.cases)
    if 16 in plan.figures:
        yield from (Curves(plan, case) for case in plan.many)
    if 9 in plan.figures:
        yield from (Ratios(plan, Case(plan.chat, "7B", adapters)) for adapters in (50, 100))
    if 14 in plan.figures:
        yield OverTime(plan, Case(plan.chat, "13B", 100))
