"""Past the paper: `jlora` against every fair baseline and against who knows the future, in the simulator.

    {W1 chat, W3 agents} x pool of {25, 50, 75 %} of the working set x link of {2, 10, 50 GB/s}
    {W1, W3} x 50 ms, 4.4 s more for every load of an adapter          a software path, a remote tier
    {W1, W3} x link of {2, 10 GB/s} x `Prefetch` given 1 s, 10 s ahead
    {W5 drift, W7 synthetic, W2 translation} x link of {2, 10, 50 GB/s}, 1,000 adapters on the whole card:
        single questions, whose KV nobody asks for again, so adapters alone are their working set

Each cell is run at three rates, as shares of the peak of `jlora` in that cell. A load of 4.4 s is what
fetching an adapter from remote storage takes in the mean (GenTD26). In W5 other adapters are popular
every 30 s, ten times as often as in that trace, so that a short run sees it. The bound evicts with
knowledge of the trace and fetches nothing ahead (`jlora.sim.clairvoyant`).

All policies get the same requests, so ratios are far steadier than times. What is left of chance is
told by batch means: the ratio in each fifth of the requests, and the standard error of these.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.runner import Options
from benchmarks.studies.paper import GUESS, SPLITS, Case, Plan, Runs, Study, run_all, slowness
from benchmarks.studies.peaks import find_best, rounded
from jlora.loadgen.rounds import Sample
from jlora.sim.clairvoyant import Clairvoyant

OURS, BOUND = "jlora", Clairvoyant.name
FIRST = slice(2, 5)  # of the static shares: tried in any case (see `find_best`)
POLICIES = (OURS, "lru", "fastlibra", BOUND)
LEVELS = (0.3, 0.7, 0.9, 1.1)  # of the peak
BATCHES = 5
OTHERS = 2.0  # requests/s at which workloads that are not the paper's are drawn

LENGTH = {"W1": 1.0, "W2": 0.25, "W3": 0.4, "W5": 1.0, "W7": 1.0}  # of `Plan.seconds`: some 300 requests
DRIFT = {"W5": "drift:30"}
POOLS, LINKS = (0.25, 0.5, 0.75), (10.0, 2.0, 50.0)
LOADS_S = (0.05, 4.4)
HINTS_S = (1.0, 10.0)

CELLS = (
    *(Case(w, "7B", 100, hbm_share=s, link_gbps=g) for g, w, s in product(LINKS, ("W3", "W1"), POOLS)),
    *(Case(w, "7B", 100, hbm_share=0.5, adapter_load_s=load) for load, w in product(LOADS_S, ("W3", "W1"))),
    *(Case(w, "7B", 1000, DRIFT.get(w, ""), link_gbps=g) for g, w in product(LINKS, ("W5", "W7", "W2"))),
)
HINTED = tuple(
    Case(w, "7B", 100, hbm_share=0.5, link_gbps=g, hint_s=hint)
    for w, g, hint in product(("W3", "W1"), (10.0, 2.0), HINTS_S)
)


class Cell(Study):
    """One cell: all policies at the same rates, the static split with as many shares as it takes to find its best."""

    kind = "cell"

    @property
    def seconds(self) -> float:
        """By workload: as long as it takes to see about as many requests."""
        return self.plan.seconds * LENGTH[self.case.workload]

    @property
    def base(self) -> float:
        """The rate at which the requests are drawn: the paper's cases' where there is one."""
        return GUESS.get(self.case.workload, {}).get(self.case.model, OTHERS)

    def fill(self, runs: Runs) -> None:
        """Finds the peak, runs every policy at every rate, then looks for the best share."""
        rates = self.rates(runs)
        for rate, policy in product(rates, POLICIES):
            runs.at(rate, policy)
        find_best(partial(slowness, runs, rates), SPLITS, FIRST)

    def rates(self, runs: Runs) -> list[float]:
        """The levels of the peak of `jlora`."""
        peak = self.peak(runs, OURS)
        return [rounded(level * peak) for level in self.plan.levels]

    def keep(self, result: Mapping[str, Any]) -> Sample:
        """With the mean TTFT of every fifth of the requests."""
        return {**super().keep(result), "batches_s": batch_means(result["requests"])}

    def anchors_of(self, runs: Runs) -> dict[str, Any]:
        """The rates."""
        self.fill(runs)
        return {"rates": self.rates(runs)}


class Hint(Cell):
    """At the rates of the cell without hints: what the hint gains there."""

    kind = "hint"

    def fill(self, runs: Runs) -> None:
        """No other policy is given hints."""
        for rate in self.rates(runs):
            runs.at(rate, OURS)

    def rates(self, runs: Runs) -> list[float]:
        """Those of the cell without hints."""
        plain = Cell(self.plan, replace(self.case, hint_s=0.0))
        return plain.rates(Runs(plain, runs.deadline))


def batch_means(requests: Mapping[str, Any]) -> list[float]:
    """Mean TTFT in seconds of equally many requests each, in the order in which they were sent."""
    sent, ttft = (requests["columns"].index(name) for name in ("sent_s", "ttft_s"))
    values = [row[ttft] for row in sorted(requests["rows"], key=lambda row: row[sent]) if row[ttft] is not None]
    size = max(-(-len(values) // BATCHES), 1)
    return [statistics.fmean(values[at : at + size]) for at in range(0, len(values), size)]


def run(options: Options) -> None:
    """Runs what is not in the journals yet; then the records hold everything."""
    cells, hinted = CELLS, HINTED
    plan = Plan(100.0, LEVELS, options.folder("beyond"), options.minutes, options.data, close=1.2)
    if options.quick:
        cells = (Case("W3", "7B", 20, hbm_share=0.5, link_gbps=2.0),)
        hinted = (replace(cells[0], hint_s=1.0),)
        plan = replace(plan, seconds=12.0, close=1.5)
    plan = replace(plan, seconds=options.seconds or plan.seconds)
    studies: list[Study] = [Cell(plan, case) for case in cells]
    run_all(plan, [*studies, *(Hint(plan, case) for case in hinted)], options, "beyond-simulated")
