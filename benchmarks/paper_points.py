"""Of a run of `jlora bench paper`, what means hide: every point, and the KV that a fixed split makes useless."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks import report
from benchmarks.paper import STATIC
from benchmarks.paper_numbers import Table

BAR = 1.02  # of a baseline's mean TTFT: never to be above it (R3)


@dataclass(frozen=True, slots=True)
class Point:
    """One case at one rate: our TTFT over theirs; `level`: the rate over the last of the case."""

    ratio: float
    case: str
    level: float


def compare(table: Table, ours: str, theirs: str) -> list[Point]:
    """All points that both policies have been run at."""
    found = []
    for name, study in table.cases.items():
        mine, other = table.curve(name, ours), table.curve(name, theirs)
        if mine is None or other is None:
            continue
        a, b = dict(mine.points), dict(other.points)
        last = study["rates"][-1]
        found += [
            Point(a[rate]["ttft_s"] / b[rate]["ttft_s"], name, rate / last)
            for rate in mine.shared(other, study["rates"])
        ]
    return found


def points(tables: Mapping[str, Table], ours: str, baselines: Mapping[str, str]) -> str:
    """How often we are slower than each baseline, and where most; "" if nothing has been run."""
    rows = []
    for kind, table in tables.items():
        for theirs, label in baselines.items():
            found = compare(table, ours, theirs)
            if found:
                worst = max(found, key=lambda point: point.ratio)
                above = sum(point.ratio > BAR for point in found)
                at = f"{worst.case} at {worst.level:.2f}"
                rows.append([kind, label, str(len(found)), str(above), f"{worst.ratio:.3f}", at])
    if not rows:
        return ""
    head = ["cases", f"`{ours}` over", "points", f"above {BAR:g}", "highest", "in, at so much of the last rate"]
    return "## Point by point\n\nTTFT at every rate of every case.\n\n" + report.table(head, rows)


def invalid(table: Table) -> str:
    """KV on the device that cannot be used, by policy and share; "" if no policy has any."""
    shares: dict[str, list[tuple[float, str]]] = {}
    for name, study in table.cases.items():
        for run in study["runs"]:
            held = run["history_kv"] + run["running_kv"]
            shares.setdefault(run["policy"], []).append((run["invalid_kv"] / max(held, 1e-9), name))
    rows = []
    for policy in sorted(shares, key=_order):
        found = shares[policy]
        mean, (worst, case) = statistics.fmean(share for share, _ in found), max(found)
        if policy.startswith(STATIC) or worst > 0:
            rows.append([policy, str(len(found)), f"{mean:.1%}", f"{worst:.1%}", case if worst else ""])
    if not rows:
        return ""
    text = "## Invalid KV\n\nIts share of the KV on the device, over time; means over all runs that were made.\n\n"
    return text + report.table(["policy", "runs", "mean", "highest", "in"], rows)


def _order(policy: str) -> tuple[str, float]:
    """By name, fixed splits by share."""
    name, _, share = policy.partition(":")
    return name, float(share or 0)
