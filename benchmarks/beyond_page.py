"""The page of `jlora bench beyond`: ratios to `jlora`, where a fair baseline is ahead, the gap to the bound."""

from __future__ import annotations

import datetime
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import beyond_figure, report
from benchmarks.beyond import BOUND, LEVELS, OURS, best_share, by_rate
from benchmarks.paper import STATIC, static
from benchmarks.rounds import Sample
from jlora import machine

PAGE = "beyond.md"
MARK = "<!-- below: written by jlora bench beyond -->"
FAIR = ("lru", "fastlibra", STATIC)
NEAR = 0.9  # of the peak: where `jlora` and the bound are compared in detail
AHEAD = 0.98  # of the TTFT of `jlora`: what is less is listed


@dataclass(frozen=True, slots=True)
class Point:
    """One policy against `jlora` in one cell at one level."""

    cell: str
    level: float
    rate: float
    policy: str
    ours: Sample
    theirs: Sample

    def ratio(self, key: str = "ttft_s") -> float:
        """Theirs over ours; 1 if ours is 0."""
        return self.theirs[key] / self.ours[key] if self.ours[key] else 1.0

    @property
    def error(self) -> float:
        """Standard error of the TTFT's ratio, by batch means; NaN with fewer than two batches."""
        ratios = [a / b for a, b in zip(self.theirs["batches_s"], self.ours["batches_s"], strict=False) if b]
        return statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan


def write(out: Path, result: Mapping[str, Any]) -> None:
    """Writes the page into `out`; what stands above the mark on the page stays."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    text = path.read_text().partition(MARK)[0] if path.exists() else "# Beyond the paper\n\n"
    whole = [study for study in result["studies"] if study["rates"]]
    cells = {study["case"]["name"]: study for study in whole if study["kind"] == "cell"}
    hints = {study["case"]["name"]: study for study in whole if study["kind"] == "hint"}
    m, s = machine.describe(), result["settings"]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    origin = (
        f"`{report.command()}`, {day}, {m['processor']}, {m['cores']} cores; python {sys.version.split()[0]}. "
        f"Simulated: Llama-2-7B on the paper's card, {s['seconds']:g} s of traffic per run or its part by workload "
        f"({'public traces' if s['data'] else 'synthetic'}, seed {s['seed']}); code at {report.commits(whole)}.\n"
    )
    figure = beyond_figure.draw(out, cells) if cells else []
    parts = [*_sections(cells, hints), *(f"![{name}]({name})\n" for name in figure)]
    path.write_text("\n".join([f"{text}{MARK}\n", origin, *parts]))


def points(cells: Mapping[str, Mapping[str, Any]]) -> Iterator[Point]:
    """Every policy against `jlora`; of the static shares a cell's best, under the plain name."""
    for name, study in cells.items():
        runs = by_rate(study)
        best = static(best_share(runs, study["rates"]))
        for level, rate in zip(LEVELS, study["rates"], strict=True):
            for policy in (*FAIR, BOUND):
                chosen = best if policy == STATIC else policy
                yield Point(name, level, rate, policy, runs[rate, OURS], runs[rate, chosen])


def _sections(cells: Mapping[str, Mapping[str, Any]], hints: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tables there are runs for."""
    found = list(points(cells))
    parts = [_overall(found), _ahead(found), _every(cells, found), _bound(found)] if found else []
    return [*parts, _hints(cells, hints)] if hints else parts


def _overall(found: Sequence[Point]) -> str:
    rows = []
    for policy in (*FAIR, BOUND):
        mine = [point for point in found if point.policy == policy]
        ahead = [point for point in mine if point.ratio() < AHEAD]
        sure = [point for point in ahead if point.ratio() + 2 * point.error < 1]
        ratios = [_mean(mine, key) for key in ("ttft_s", "tpot_s")]
        lowest = min(point.ratio() for point in mine)
        counts = [str(len(chosen)) for chosen in (ahead, sure, mine)]
        rows.append([policy, *(f"{ratio:.2f}" for ratio in ratios), f"{lowest:.2f}", *counts])
    head = ["policy", "TTFT", "TPOT", "lowest TTFT", f"below {AHEAD:g}", "of them by 2 errors", "points"]
    return (
        f"## Overall\n\nAs multiples of `{OURS}`, geometric means over all cells and rates; `{STATIC}` at the share "
        "that is best in each cell.\n\n" + report.table(head, rows)
    )


def _ahead(found: Sequence[Point]) -> str:
    rows = [
        [
            point.cell, f"{point.level:g}", point.policy, f"{point.ratio():.2f} ± {point.error:.2f}",
            f"{point.ratio('tpot_s'):.2f}",
            *(f"{run['adapter_hits']:.2f}, {run['kv_device_hits']:.2f}" for run in (point.ours, point.theirs)),
        ]
        for point in sorted(found, key=Point.ratio)
        if point.policy != BOUND and point.ratio() < AHEAD
    ]  # fmt: skip
    head = ["cell", "of the peak", "policy", "TTFT", "TPOT", f"hits of `{OURS}`: adapters, KV", "theirs"]
    text = report.table(head, rows) if rows else "Nowhere.\n"
    return f"## Where a fair baseline is ahead by more than {1 - AHEAD:.0%}\n\n{text}"


def _every(cells: Mapping[str, Mapping[str, Any]], found: Sequence[Point]) -> str:
    rows = []
    for name, study in cells.items():
        mine = [point for point in found if point.cell == name]
        ours = [point.ours for point in mine if point.policy == BOUND]
        cell = [name, ", ".join(f"{rate:g}" for rate in study["rates"])]
        cell.append(", ".join(f"{1e3 * run['ttft_s']:.0f}" for run in ours))
        for policy in (*FAIR, BOUND):
            cell.append(", ".join(f"{point.ratio():.2f}" for point in mine if point.policy == policy))
        rows.append([*cell, f"{best_share(by_rate(study), study['rates']):g}"])
    head = ["cell", "requests/s", f"`{OURS}` TTFT ms", *FAIR, BOUND, "best share"]
    levels = ", ".join(f"{level:g}" for level in LEVELS)
    return f"## Every cell\n\nTTFT at {levels} of the peak, as multiples of `{OURS}`.\n\n" + report.table(head, rows)


def _bound(found: Sequence[Point]) -> str:
    """What the bound does otherwise, at the highest level."""
    rows = []
    for point in (p for p in found if p.policy == BOUND and p.level == NEAR):
        for name, run in ((OURS, point.ours), (BOUND, point.theirs)):
            shares = [f"{run[key]:.2f}" for key in ("adapter_hits", "kv_device_hits", "kv_host_hits")]
            sizes = [f"{run['bytes_in'] / 1e9:.0f}", f"{run['recomputed_tokens']:.0f}", f"{1e3 * run['swap_s']:.0f}"]
            rows.append([point.cell, name, *shares, *sizes])
    head = ["cell", "policy", "adapter hits", "KV device", "KV host", "GB in", "recomputed tokens", "swap-in ms"]
    return f"## `{OURS}` and the bound at {NEAR:g} of the peak\n\n" + report.table(head, rows)


def _hints(cells: Mapping[str, Mapping[str, Any]], hints: Mapping[str, Mapping[str, Any]]) -> str:
    """TTFT and swap-in without and with hints."""
    rows = []
    for name, study in hints.items():
        plain = cells.get(name.partition("-hint")[0])
        if plain is None:
            continue
        before = by_rate(plain)
        after = {run["rate"]: run for run in study["runs"]}
        for level, rate in zip(LEVELS, study["rates"], strict=True):
            runs = before[rate, OURS], after[rate], before[rate, BOUND]
            times = [f"{1e3 * run['ttft_s']:.0f}" for run in runs]
            rows.append([name, f"{level:g}", f"{rate:g}", *times, *(f"{1e3 * run['swap_s']:.0f}" for run in runs)])
    head = ["cell", "of the peak", "/s", "TTFT ms", "with hints", BOUND, "swap-in ms", "with hints", BOUND]
    return "## `Prefetch` before the next turn\n\n" + report.table(head, rows)


def _mean(found: Sequence[Point], key: str) -> float:
    return math.exp(statistics.fmean(math.log(point.ratio(key)) for point in found))
