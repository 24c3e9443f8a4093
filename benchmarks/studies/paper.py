"""FASTLIBRA's evaluation (its section 6), side by side with ours, in the simulator.

    {chatbot W1, translation W2, agents W3} x {7B, 13B, 34B} x {20, 50, 100 adapters}      Figures 11 to 13, 15
    W1, 7B, {1,000, 2,000 adapters} x {distinct, uniform, skewed-0.1, skewed-0.3}          Figure 16

As the paper does it, each case is run at rates from 0 to the peak of `fastlibra`, and a policy's
TTFT and TPOT are means over these; the peak is the highest rate with a mean TTFT below 500 ms.
Because such a mean is made by whatever is past its own saturation, all points are kept and drawn,
and every policy's own peak is looked for. The rates are not equally spaced: few where nothing
happens, more towards the peak; a mean is one over all rates between, by straight lines.

A case is one process and one journal of finished runs, so that an interrupted benchmark goes on.
The scheduler, cache and policies are the product's own; `jlora.sim` says what is modelled.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.records import Records
from benchmarks.runner import Options
from benchmarks.studies.peaks import Bracket, find_best, find_peak, rounded
from jlora import machine
from jlora.loadgen.rounds import Sample
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, settled, simulate
from jlora.sim.trace import Trace
from jlora.sim.workloads import SOURCES, Load, play, ranks
from jlora.sim.workloads.popularity import parse as parse_popularity

CHIP = "npu"
CARDS = {"7B": ("llama-2-7b", 1), "13B": ("llama-2-13b", 2), "34B": ("llama-34b", 4)}  # section 6.1
SCENES = {"W1": "chatbot", "W2": "translation", "W3": "agents"}
LONGER = {"W1": 3.0}  # times: an answer of the chatbot takes ten seconds near the peak, others one
OWN_PACE = {"W1": 1.0, "W2": 1.0, "W3": 10.0}  # requests/s at which a user's gaps are the workload's own
GUESS = {  # requests/s: at which a case's requests are drawn, and where its first peak is looked for
    "W1": {"7B": 5.5, "13B": 9.0, "34B": 14.0},
    "W2": {"7B": 80.0, "13B": 80.0, "34B": 75.0},
    "W3": {"7B": 50.0, "13B": 50.0, "34B": 55.0},
}

REFERENCE = "fastlibra"
POLICIES = ("jlora", "fastlibra", "vllm", "vllm-fair:0.2", "slora")
ABLATIONS = ("fastlibra-wom", "fastlibra-wos", "fastlibra-wol")
STATIC = "vllm-fair"
SPLITS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)  # of the pool, for adapters: of which the best is taken
FIRST = slice(1, 4)  # of these: tried in any case (see `find_best`)
LIMIT_S = 0.5  # of mean TTFT, at the peak
LEVELS = (0.25, 0.5, 0.7, 0.85, 0.95, 1.0)  # rates of a case, in peaks of the reference
ABLATED = (0.5, 0.85, 1.0)  # of which ablations are run at these
CLOSE = 1.03  # times: between what is below the limit and what is not

# Of a run, what is kept.
KEPT = (
    "requests", "unfinished", "refused", "preemptions", "ttft_s", "ttft_p99_s", "tpot_s", "queue_s", "adapter_s",
    "kv_s", "swap_s", "prefill_s", "cached", "adapter_hits", "kv_device_hits", "kv_host_hits", "bytes_in", "bytes_out",
    "recomputed_tokens", "invalid_kv", "tokens", "batch", "busy",
)  # fmt: skip
SHOWN = ("adapters", "history_kv", "running_kv")  # and these as means over time
YOUNG = 100_000  # objects between two looks of the garbage collector: a simulation makes no cycles before its end


def retimed(trace: Trace, clock: Callable[[float], float]) -> Trace:
    """The same turns at other times."""
    return replace(trace, turns=tuple(replace(turn, at=clock(turn.at)) for turn in trace.turns))


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
        levels: rates, in peaks of the reference; seconds: of traffic, at the rate at which it is drawn (in the
            chatbot three times as many).
        data: directory of the public traces; None draws the synthetic equivalents.
        work: where journals are kept.
        minutes: no run begins later than that after the start.
        close: how exactly a peak is found.
    """

    seconds: float
    levels: tuple[float, ...]
    work: Path
    minutes: float
    data: Path | None = None
    seed: int = 0
    processes: int = field(default_factory=machine.threads)
    close: float = CLOSE

    def settings(self) -> dict[str, Any]:
        """What makes two runs comparable."""
        levels = list(self.levels)
        return {"seconds": self.seconds, "levels": levels, "seed": self.seed, "data": bool(self.data), "chip": CHIP}


CASES = tuple(Case(w, m, n) for n in (100, 20, 50) for m in CARDS for w in SCENES)
LAWS = ("distinct", "uniform", "skewed:0.1", "skewed:0.3")
MANY = tuple(Case("W1", "7B", n, law) for n in (1000, 2000) for law in LAWS)


def run(options: Options) -> None:
    """Runs what is not in the journals yet; then the records hold everything."""
    cases = (*(c for c in CASES if c.adapters == 100), *MANY, *(c for c in CASES if c.adapters != 100))
    plan = Plan(30.0, LEVELS, options.folder("paper"), options.minutes, options.data)
    if options.quick:
        cases = (Case("W3", "7B", 20), Case("W3", "7B", 40, "skewed:0.1"))
        plan = replace(plan, seconds=1.0, levels=(0.5, 1.0), close=1.5)
    plan = replace(plan, seconds=options.seconds or plan.seconds)
    run_all(plan, [Curves(plan, case) for case in cases], options, "paper-simulated")


def run_all(plan: Plan, jobs: Sequence[Study], options: Options, name: str) -> None:
    """Studies in their order, in as many processes as the plan has; then a record for every run."""
    deadline = time.time() + 60 * plan.minutes
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(plan.processes, spawn, initializer=gc.set_threshold, initargs=(YOUNG,)) as pool,
        tqdm(total=len(jobs), desc="simulating", unit="case") as bar,
    ):
        for done in as_completed(pool.submit(job.run, deadline) for job in jobs):
            bar.set_postfix_str(done.result())
            bar.update()
    (options.out / f"{name}.jsonl").unlink(missing_ok=True)  # the journals hold every run
    records = options.records(name, plan.settings())
    for job in jobs:
        job.record(records)


class Study:
    """Runs of one case, in a journal. `kind` says in which figure they belong."""

    kind = ""
    STRIDE = 1.3  # times: between the first guesses of a peak

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
        """The case's requests at exactly this rate, and its adapters' ranks.

        As in section 6.2 all times are scaled and the pattern stays: every rate has the same requests. Their
        history has been computed by time 0.
        """
        trace, dealt = self.drawn
        proper = [turn.at for turn in trace.turns if turn.at >= 0]
        factor = len(proper) / rate / max(proper[-1], 1e-9)
        return settled(retimed(trace, lambda at: factor * at), self.case.hardware.step_model()), dealt

    @cached_property
    def drawn(self) -> tuple[Trace, list[int]]:
        """The case's requests, and its adapters' ranks."""
        case, plan = self.case, self.plan
        source, spec = SOURCES[case.workload](plan.data), case.hardware.spec
        law = parse_popularity(case.popularity, plan.data) if case.popularity else None
        load = Load(self.base, self.seconds, case.adapters, vocab=spec.vocab, max_len=spec.max_len, seed=plan.seed)
        gap_s = source.gap_s * OWN_PACE.get(case.workload, 1.0) / self.base
        load = replace(load, gap_s=gap_s, popularity=law)
        return play(source, load), ranks(load)

    @property
    def base(self) -> float:
        """The rate at which they are drawn."""
        return GUESS[self.case.workload][self.case.model]

    @property
    def seconds(self) -> float:
        """Of traffic, at that rate."""
        return self.plan.seconds * LONGER.get(self.case.workload, 1.0)

    def peak(self, runs: Runs, policy: str) -> float:
        """A policy's peak, looked for from the rate at which the requests are drawn."""
        guess, over = self.base, partial(runs.over, policy=policy)
        sides = (0.0, guess) if over(guess) else (guess, math.inf)
        return find_peak(over, Bracket(*sides, max(self.STRIDE, self.plan.close)), self.plan.close)

    def keep(self, result: Mapping[str, Any]) -> Sample:
        """What of a run is kept."""
        series = result["series"]
        made = {**result["summary"], **result["cache"], **result["device"]}
        return {key: made[key] for key in KEPT} | {k: rounded(sum(series[k]) / max(len(series[k]), 1)) for k in SHOWN}

    def anchors_of(self, runs: Runs) -> dict[str, Any]:
        """What the study's means are over: rates, the best share. Raises TimeoutError if runs are missing."""
        return {}

    def record(self, records: Records) -> None:
        """Adds all runs made so far, and the anchors if nothing is missing."""
        runs, study = Runs(self, 0.0), {"kind": self.kind, **asdict(self.case)}
        for (rate, policy), sample in runs.known.items():
            records.add(self.case.name, policy, 0, {**study, "rate": rate, **sample})
        with contextlib.suppress(TimeoutError):
            records.add(self.case.name, "anchors", 0, {**study, **self.anchors_of(runs)})


class Runs:
    """The finished runs of a study by (rate, policy); makes those that are missing.

    Raises (from `at`):
        TimeoutError: the deadline has passed.
    """

    TRACES = 8  # kept

    def __init__(self, study: Study, deadline: float):
        plan = study.plan
        self._study = study
        self.deadline = deadline
        self._records = Records(plan.work / f"{study.name}.jsonl", {**plan.settings(), "case": asdict(study.case)})
        self._works: dict[float, Work] = {}
        self.known: dict[tuple[float, str], Sample] = {
            (line["rate"], line["side"]): {key: line[key] for key in line if key not in ("cell", "side", "round")}
            for line in self._records.lines
        }
        self._commit = machine.commit()

    def at(self, rate: float, policy: str) -> Sample:
        """One run: means and counts of `jlora.sim.scenario.simulate`."""
        rate = rounded(rate)
        if (rate, policy) not in self.known:
            if time.time() > self.deadline:
                raise TimeoutError
            result = simulate(self._study.case.scenario, self._played(rate), policy)
            self.known[rate, policy] = self._study.keep(result)
            made = {"rate": rate, "commit": self._commit, **self.known[rate, policy]}
            self._records.add(self._study.case.name, policy, 0, made)
        return self.known[rate, policy]

    def over(self, rate: float, policy: str) -> bool:
        """Whether a run is past the policy's peak."""
        return self.at(rate, policy)["ttft_s"] >= LIMIT_S

    def _played(self, rate: float) -> Work:
        """The trace of a rate, the same for all policies; the latest few are kept."""
        if rate not in self._works:
            if len(self._works) == self.TRACES:
                del self._works[next(iter(self._works))]
            self._works[rate] = Work.of(*self._study.traffic(rate), self._study.case.hardware)
        return self._works[rate]


def static(share: float) -> str:
    """The fixed split that has this share for adapters."""
    return f"{STATIC}:{share:g}"


def slowness(runs: Runs, rates: Sequence[float], share: float) -> float:
    """Of a fixed split: the product of its mean TTFTs at these rates. Raises TimeoutError."""
    return math.prod(runs.at(rate, static(share))["ttft_s"] for rate in rates)


class Curves(Study):
    """Figures 11 to 13 and 15, and 16: TTFT and TPOT over the rate, peaks, hits, for all policies."""

    kind = "curves"
    reference = REFERENCE  # whose peak the rates go up to
    near: tuple[float, ...] = (0.7, 0.95)  # of the peak: where the best share is looked for

    def fill(self, runs: Runs) -> None:
        """Finds the reference's peak and the best share, runs all policies at their rates, and finds their peaks."""
        peak, best = self.anchors(runs)
        policies = list(dict.fromkeys((*self.policies, best)))
        for rate in self.rates(peak):
            for policy in policies:
                if rate in self.rates_of(policy, peak):
                    runs.at(rate, policy)
        past = sorted(rate for rate, policy in runs.known if policy == self.reference and rate > peak)
        for policy in policies:
            tried = [*self.rates_of(policy, peak), *past[:1]]
            over = next((rate for rate in tried if runs.over(rate, policy)), math.inf)
            under = max((rate for rate in tried if rate < over), default=0.0)
            stride = self.plan.close**2 if under else self.STRIDE
            find_peak(partial(runs.over, policy=policy), Bracket(under, over, stride), self.plan.close)

    def anchors(self, runs: Runs) -> tuple[float, str]:
        """The reference's peak, and vllm-fair at the share that is best near it."""
        peak = self.peak(runs, self.reference)
        rates = [rounded(level * peak) for level in self.near]
        cost = partial(slowness, runs, rates)
        return peak, static(find_best(cost, SPLITS, FIRST))

    def rates(self, peak: float) -> list[float]:
        """Up to the peak of the reference."""
        return [rounded(level * peak) for level in self.plan.levels]

    def rates_of(self, policy: str, peak: float) -> list[float]:
        """Those that a policy is run at."""
        few = [rounded(level * peak) for level in self.plan.levels if level in ABLATED]
        return few if policy in ABLATIONS else self.rates(peak)

    def anchors_of(self, runs: Runs) -> dict[str, Any]:
        """The rates that means are over, and the name of the best share."""
        peak, best = self.anchors(runs)
        few = {policy: self.rates_of(policy, peak) for policy in ABLATIONS}
        return {"rates": self.rates(peak), "few": few, "best": best}

    @property
    def policies(self) -> tuple[str, ...]:
        """Ablations are part of Figure 15, which has the paper's own popularity."""
        return (*POLICIES, *(() if self.case.popularity else ABLATIONS))
