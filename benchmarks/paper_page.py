"""docs/results/fastlibra.md: what the paper states, what `jlora bench paper` found, and how they compare."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import paper_details, paper_figures, paper_points, report
from benchmarks.paper import ABLATED, ABLATIONS, CLOSE, LONGER, POLICIES, REFERENCE, SCENES
from benchmarks.paper_numbers import CALM, Table, average, invalid_share
from jlora import machine

PAGE = "fastlibra.md"
MARK = "<!-- below: written by jlora bench paper -->"
OURS = "jlora"

STAND_INS = """| the paper | here |
|---|---|
| four NPUs of 256 TFLOPS and 64 GB, PCIe 4 | `jlora.sim.hardware`: those peaks; efficiencies, HBM bandwidth and the \
fixed part of a step are assumptions, stated there |
| Llama-7B, 13B, 34B on 1, 2, 4 cards | Llama-2 7B and 13B; Code Llama's shape for 34B (8 KV heads) |
| LMSYS-33k, adapter by model name | W1: Topical-Chat, Azure conv, one adapter per dialog, Zipf 0.9 |
| OPUS-100 with the Azure Functions trace | W2: Tatoeba, ServeGen's clients, one adapter per language |
| Taskmaster with the Azure Functions trace | W3: SGD and Taskmaster-4 with tool results, ServeGen's clients |
| vLLM with its cache offloaded | `vllm`: 20 % for adapters, LRU in each part, evicted KV is written out first; \
what is evicted comes back when asked for |
| | `vllm-fair`: the same, but nothing is written to evict, and what there is room for is fetched while the link is \
idle. All else is this library's mechanism in both: asynchronous and streamed copies, the guard that computes again |
| S-LoRA | `slora`: one pool, no history, an adapter leaves with its last request |
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio that the paper states: `ours` over `theirs`, the mean over cases.

    Attributes:
        paper: None where the paper has no such comparison.
        workload: of one scene only.
    """

    text: str
    paper: float | None
    theirs: str
    key: str
    workload: str = ""


CLAIMS = (
    Claim("TTFT / vLLM", 1 - 0.603, "vllm", "ttft_s"),
    Claim("TTFT / vLLM, translation", 1 - 0.689, "vllm", "ttft_s", "W2"),
    Claim("TTFT / vllm-fair at 20 %", None, "vllm-fair:0.2", "ttft_s"),
    Claim("TTFT / vllm-fair at its best share", None, "best", "ttft_s"),
    Claim("TTFT / S-LoRA", 1 - 0.501, "slora", "ttft_s"),
    Claim("TTFT / S-LoRA, agents", 1 - 0.811, "slora", "ttft_s", "W3"),
    Claim("TPOT / vLLM", 1 - 0.339, "vllm", "tpot_s"),
    Claim("TPOT / vllm-fair at its best share", None, "best", "tpot_s"),
    Claim("TPOT / S-LoRA", 1 - 0.286, "slora", "tpot_s"),
    Claim("peak / vLLM", 1.7, "vllm", "peak"),
    Claim("peak / vllm-fair at 20 %", None, "vllm-fair:0.2", "peak"),
    Claim("peak / vllm-fair at its best share", None, "best", "peak"),
    Claim("peak / S-LoRA", 1.6, "slora", "peak"),
)
# Figure 15: the ablation over the whole, TTFT, TPOT, peak.
WITHOUT = {
    "fastlibra-wom": (1.27, 1.18, 0.802),
    "fastlibra-wos": (1.24, 1.15, 0.828),
    "fastlibra-wol": (1.13, 1.11, 0.869),
}
# Whom ours are compared with, by policy.
BASELINES = {
    "vllm": "vLLM",
    "vllm-fair:0.2": "vllm-fair at 20 %",
    "best": "vllm-fair at its best share",
    "slora": "S-LoRA",
}
MANY = {"ttft_s": 1 - 0.554, "tpot_s": 1 - 0.162}  # Figure 16, over both baselines
USE = {"vllm": (1.2, 1.3), "slora": (2.6, 3.2)}  # Figure 13: device in use, hits; times the baseline's
INVALID = 0.486  # of the KV without dependencies, section 6.6


def write(out: Path, result: Mapping[str, Any]) -> None:
    """Writes the page and the figures into `out`; what stands above the mark on the page stays."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    text = path.read_text().partition(MARK)[0] if path.exists() else "# FASTLIBRA, side by side\n\n"
    studies = {kind: [s for s in result["studies"] if s["kind"] == kind] for kind in ("curves", "ratios", "time")}
    tables = {
        "grid": Table([s for s in studies["curves"] if not s["case"]["popularity"]]),
        "many": Table([s for s in studies["curves"] if s["case"]["popularity"]]),
    }
    figures = paper_figures.draw(out, tables, studies)
    parts = [origin(result), progress(tables, studies["curves"]), "## Stand-ins\n", STAND_INS]
    parts += sections(tables["grid"], tables["many"])
    parts += [
        paper_points.points(tables, OURS, {**BASELINES, REFERENCE: REFERENCE}),
        paper_points.invalid(tables["grid"]),
    ]
    parts += [paper_details.shares(studies["ratios"]), paper_details.phases(studies["time"])]
    parts.append(paper_details.overheads(out / paper_details.HOST))
    parts += [f"![{name}]({name})\n" for name in figures]
    path.write_text(f"{text}{MARK}\n\n" + "\n".join(part for part in parts if part))


def origin(result: Mapping[str, Any]) -> str:
    """Command, date, machine, and how the runs were made."""
    m, s = machine.describe(), result["settings"]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    data = "public traces" if s["data"] else "their synthetic equivalents"
    levels, few = (", ".join(f"{level:g}" for level in each) for each in (s["levels"], ABLATED))
    return (
        f"`{report.command()}`, {day}, {m['processor']}, {m['cores']} cores; python {sys.version.split()[0]}. "
        f"Simulated: as many requests per run as come in {s['seconds']:g} s near the peak ({LONGER['W1']:g} times as "
        f"many in the chatbot, whose answers are long), the same at every rate, "
        f"after a warm start ({data}, seed {s['seed']}). In every case all policies at {levels} times the peak of "
        f"`{REFERENCE}`, ablations at {few} times; then each one's own peak, to {CLOSE - 1:.0%}. "
        f"Code at {report.commits(result['studies'])}.\n"
    )


def progress(tables: Mapping[str, Table], curves: Sequence[Mapping[str, Any]]) -> str:
    """How many cases are complete."""
    counts = []
    for (kind, table), figures in zip(tables.items(), ("Figures 11 to 13", "Figure 16"), strict=True):
        asked = sum(bool(study["case"]["popularity"]) == (kind == "many") for study in curves)
        whole = sum(all(table.curve(name, policy) for policy in (*POLICIES, "best")) for name in table.cases)
        counts.append(f"{whole} of {asked} cases of {figures}")
    return f"Complete: {' and '.join(counts)}. An interrupted run goes on where it stopped.\n"


def sections(grid: Table, many: Table) -> list[str]:
    """The tables."""
    parts = []
    if grid.cases:
        parts += [claims(grid), scenes(grid), cases(grid, "Every case (Figure 11)"), hits(grid)]
        if any(grid.curve(name, ABLATIONS[0]) for name in grid.cases):
            parts.append(ablations(grid))
    if many.cases:
        parts += [thousands(many), cases(many, "Every case of Figure 16")]
    return parts


def claims(table: Table) -> str:
    """Paper, here, ratio; by the paper's averaging, and away from saturation."""
    rows = []
    for claim in CLAIMS:
        cells = [claim.text, _number(claim.paper)]
        for ours in (REFERENCE, OURS):
            here = average(table.ratios(ours, claim.theirs, claim.key), claim.workload)
            calm = average(table.ratios(ours, claim.theirs, claim.key, calm=True), claim.workload)
            cells += [_number(here), _number(None if claim.key == "peak" else calm)]
            if ours == REFERENCE:
                cells.append(_number(here / claim.paper if here and claim.paper else None))
        rows.append(cells)
    head = ["ratio", "paper", REFERENCE, f"below {CALM:g} of both peaks", "here / paper", OURS, f"below {CALM:g}"]
    return (
        f"## What the paper states, and what is here\n\nMeans over {len(table.cases)} cases of ratios of means over "
        f"rates. Below 1 is better in TTFT and TPOT, above 1 in peaks. An average over rates up to one's own peak is "
        f"made by the points past the other's saturation: the columns *below {CALM:g}* leave these out.\n\n"
    ) + report.table(head, rows)


def scenes(table: Table) -> str:
    """The same ratios scene by scene, and the cases where `jlora` stands worst."""
    rows, worst = [], []
    for theirs, label in BASELINES.items():
        for scene, title in SCENES.items():
            cells = [label, f"{scene} {title}"]
            for ours in (REFERENCE, OURS):
                for key, calm in (("ttft_s", False), ("ttft_s", True), ("tpot_s", False), ("peak", False)):
                    cells.append(_number(average(table.ratios(ours, theirs, key, calm), scene)))
            rows.append(cells)
        below = table.ratios(OURS, theirs, "ttft_s", calm=True)
        peaks = table.ratios(OURS, theirs, "peak")
        if below and peaks:
            slow, low = max(below, key=lambda name: below[name]), min(peaks, key=lambda name: peaks[name])
            worst.append(
                f"- over {label}: TTFT {below[slow]:.2f} below {CALM:g} of both peaks ({slow}); peak {peaks[low]:.2f} "
                f"({low})"
            )
    head = ["over", "scene"]
    for ours in (REFERENCE, OURS):
        head += [f"{ours}: TTFT", f"below {CALM:g}", "TPOT", "peak"]
    text = "## Scene by scene\n\n" + report.table(head, rows)
    return text + f"\nWhere `{OURS}` stands worst:\n\n" + "\n".join(worst) + "\n"


def cases(table: Table, title: str) -> str:
    """Means over rates and peaks, case by case."""
    policies = (*POLICIES, "best")
    rows = []
    for name, study in table.cases.items():
        curves = [table.curve(name, policy) for policy in policies]
        for label, show in (
            ("TTFT ms", lambda curve, rates: f"{1e3 * curve.mean('ttft_s', rates):.0f}"),
            ("TPOT ms", lambda curve, rates: f"{1e3 * curve.mean('tpot_s', rates):.1f}"),
            ("peak /s", lambda curve, rates: f"{curve.peak:.2f}"),
        ):
            cells = ["" if curve is None else show(curve, study["rates"]) for curve in curves]
            rows.append([name, label, *cells, study["best"].partition(":")[2]])
    return f"## {title}\n\n" + report.table(["case", "", *POLICIES, "vllm-fair, best share", "best share"], rows)


def hits(table: Table) -> str:
    """Figures 12 and 13 by scene."""
    columns = {
        "queue ms": ("queue_s", 1e3, 0),
        "LoRA cold ms": ("adapter_s", 1e3, 1),
        "KV cold ms": ("kv_s", 1e3, 1),
        "adapters": ("adapters", 1, 2),
        "history": ("history_kv", 1, 2),
        "running": ("running_kv", 1, 2),
        "adapter hits": ("adapter_hits", 1, 2),
        "KV device": ("kv_device_hits", 1, 2),
        "KV host": ("kv_host_hits", 1, 2),
    }
    rows = []
    for scene, title in SCENES.items():
        for policy in (*POLICIES, "best"):
            found = [table.overall(policy, key, scene) for key, _, _ in columns.values()]
            if None not in found:
                formats = columns.values()
                cells = [f"{(v or 0) * f:.{d}f}" for v, (_, f, d) in zip(found, formats, strict=True)]
                rows.append([f"{scene} {title}", "vllm-fair, best share" if policy == "best" else policy, *cells])
    text = "## What requests wait for, and what the device holds\n\nMeans over cases and rates (Figures 12 and 13).\n\n"
    return text + report.table(["scene", "policy", *columns], rows) + "\n" + _use(table)


def ablations(table: Table) -> str:
    """Figure 15, and invalid KV."""
    rows = []
    for policy, stated in WITHOUT.items():
        cells = [policy]
        for key, paper in zip(("ttft_s", "tpot_s", "peak"), stated, strict=True):
            here = average(table.ratios(policy, REFERENCE, key))
            cells += [_number(paper), _number(here), _number(here / paper if here else None)]
        rows.append(cells)
    head = ["over the whole"]
    for name in ("TTFT", "TPOT", "peak"):
        head += [f"{name} paper", "here", "here / paper"]
    invalid = invalid_share(table)
    note = f"Invalid KV without dependencies (`fastlibra-wom`): paper {INVALID:.1%}, here {invalid or 0:.1%}.\n"
    return "## Ablations (Figure 15)\n\n" + report.table(head, rows) + "\n" + note


def thousands(table: Table) -> str:
    """Figure 16 in one table."""
    rows = []
    for key, paper in MANY.items():
        ratios = [average(table.ratios(REFERENCE, theirs, key)) for theirs in ("vllm", "slora")]
        known = [ratio for ratio in ratios if ratio is not None]
        both = sum(known) / len(known) if known else None
        ours = [average(table.ratios(OURS, theirs, key)) for theirs in ("vllm", "slora", "best")]
        name = {"ttft_s": "TTFT", "tpot_s": "TPOT"}[key]
        cells = [_number(paper), *map(_number, ratios), _number(both), _number(both / paper if both else None)]
        rows.append([name, *cells, *map(_number, ours)])
    head = ["ratio", "paper, both", "fastlibra / vllm", "/ slora", "both", "here / paper"]
    return (
        "## 1,000 and 2,000 adapters (Figure 16)\n\n"
        + report.table([*head, "jlora / vllm", "/ slora", "/ vllm-fair, best share"], rows)
    )  # fmt: skip


def _use(table: Table) -> str:
    """Figure 13's ratios."""
    rows = []
    for theirs, (paper_use, paper_hits) in USE.items():
        ours, other = (_use_and_hits(table, policy) for policy in (REFERENCE, theirs))
        if ours and other:
            use, hit = (a / max(b, 1e-9) for a, b in zip(ours, other, strict=True))
            hit_cell = _number(hit) if hit < 100 else "no KV hits there"
            rows.append([theirs, _number(paper_use), _number(use), _number(paper_hits), hit_cell])
    return report.table([f"{REFERENCE} over", "device in use, paper", "here", "hits, paper", "here"], rows)


def _use_and_hits(table: Table, policy: str) -> tuple[float, float] | None:
    """Share of the device in use; mean of the adapters' and KV's hits on the device."""
    keys = ("adapters", "history_kv", "running_kv", "adapter_hits", "kv_device_hits")
    found = [table.overall(policy, key) for key in keys]
    if None in found:
        return None
    values: Sequence[float] = [value or 0.0 for value in found]
    return sum(values[:3]), sum(values[3:]) / 2


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
