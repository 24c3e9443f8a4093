"""Means, peaks and ratios of a run of `jlora bench paper`, as the paper makes them and as they should be read."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper import ABLATIONS, LIMIT_S, REFERENCE

CALM = 0.8  # of a policy's own peak and the other's: what lies below is not made by saturation


@dataclass(frozen=True)
class Curve:
    """One policy in one case: its runs by rate, ascending."""

    points: tuple[tuple[float, Mapping[str, float]], ...]

    @property
    def peak(self) -> float:
        """The rate at which mean TTFT crosses the limit, between two runs by interpolation.

        The last rate if no run is past the limit.
        """
        before: tuple[float, float] | None = None
        for rate, run in self.points:
            ttft = run["ttft_s"]
            if ttft >= LIMIT_S:
                if before is None:
                    return rate * LIMIT_S / ttft
                return before[0] + (rate - before[0]) * (LIMIT_S - before[1]) / (ttft - before[1])
            before = rate, ttft
        return self.points[-1][0]

    def mean(self, key: str, rates: Sequence[float]) -> float:
        """Of a value over all rates from 0 to the last of these: straight lines between, level before the first."""
        chosen = [(rate, run[key]) for rate, run in self.points if rate in rates]
        area = chosen[0][0] * chosen[0][1]
        for (low, before), (high, after) in itertools.pairwise(chosen):
            area += (high - low) * (before + after) / 2
        return area / chosen[-1][0]

    def shared(self, other: Curve, rates: Sequence[float]) -> list[float]:
        """Of these rates, those that both have been run at."""
        common = {rate for rate, _ in self.points} & {rate for rate, _ in other.points}
        return [rate for rate in rates if rate in common]


class Table:
    """All cases of one kind by name, those in which the reference has been run at all rates."""

    def __init__(self, studies: Sequence[Mapping[str, Any]], reference: str = REFERENCE):
        self.cases: dict[str, Mapping[str, Any]] = {}
        self._curves: dict[tuple[str, str], Curve] = {}
        for study in studies:
            found = _curves(study)
            if reference in found:
                self.cases[study["case"]["name"]] = study
                self._curves |= {(study["case"]["name"], policy): curve for policy, curve in found.items()}

    def curve(self, case: str, policy: str) -> Curve | None:
        """None if the policy has not been run at all rates; `best` is vllm-fair at its best share."""
        return self._curves.get((case, self.cases[case]["best"] if policy == "best" else policy))

    def mean(self, case: str, policy: str, key: str) -> float | None:
        """Over the rates up to the reference's peak: the paper's averaging."""
        curve = self.curve(case, policy)
        return None if curve is None else curve.mean(key, self.cases[case]["rates"])

    def ratios(self, ours: str, theirs: str, key: str, calm: bool = False) -> dict[str, float]:
        """Ours over theirs, by case.

        Args:
            calm: only over rates at which neither is near its peak.
        """
        found = {}
        for name, case in self.cases.items():
            mine, other = self.curve(name, ours), self.curve(name, theirs)
            if mine is None or other is None:
                continue
            most = CALM * min(mine.peak, other.peak) if calm else float("inf")
            rates = [rate for rate in mine.shared(other, case["rates"]) if rate <= most]
            if key == "peak":
                found[name] = mine.peak / other.peak
            elif rates and other.mean(key, rates) > 0:
                found[name] = mine.mean(key, rates) / other.mean(key, rates)
        return found

    def overall(self, policy: str, key: str, workload: str = "") -> float | None:
        """The mean over cases of a policy's mean."""
        values = [self.mean(name, policy, key) for name in self.cases if name.startswith(workload)]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None


def average(ratios: Mapping[str, float], workload: str = "") -> float | None:
    """The mean over cases."""
    values = [value for name, value in ratios.items() if name.startswith(workload)]
    return statistics.fmean(values) if values else None


def invalid_share(table: Table, policy: str = ABLATIONS[0]) -> float | None:
    """Share of the KV on the device that cannot be used, over all rates and cases."""
    parts = [table.overall(policy, key) for key in ("invalid_kv", "history_kv", "running_kv")]
    if any(part is None for part in parts):
        return None
    invalid, history, running = (part or 0.0 for part in parts)
    return invalid / max(history + running, 1e-9)


def _curves(study: Mapping[str, Any]) -> dict[str, Curve]:
    """By policy, where every rate that it was to be run at has been run."""
    runs: dict[str, dict[float, Mapping[str, float]]] = {}
    for run in study["runs"]:
        runs.setdefault(run["policy"], {})[run["rate"]] = run
    asked = {policy: study.get("few", {}).get(policy, study["rates"]) for policy in runs}
    whole = {policy: by for policy, by in runs.items() if asked[policy] and by.keys() >= set(asked[policy])}
    return {policy: Curve(tuple(sorted(by.items(), key=lambda item: item[0]))) for policy, by in whole.items()}
