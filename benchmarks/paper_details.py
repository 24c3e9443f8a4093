"""Tables of docs/results/fastlibra.md about single experiments: Figures 9 and 14, and the overheads (section 6.10)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.paper import SHARES, SHOWN

HOST = "cache-python.json"  # R7: `jlora bench cache`
PHASES = ("quiet", "rising", "peak", "falling")
Study = Mapping[str, Any]

# What section 6.10 states -> the operations of R7 that it is made of, and the limit in milliseconds.
STATED = {
    "matching and updating the tree": (("match", "insert"), 0.5),
    "monitoring and deciding": (("round", "decide"), 5.0),
}


def shares(studies: Sequence[Study]) -> str:
    """Figure 9: mean TTFT by the adapters' share of the device; "" without runs."""
    rows = []
    for study in studies:
        found = {(run["rate"], run["policy"]): run["ttft_s"] for run in study["runs"]}
        policies = (*(f"vllm-fair:{share:g}" for share in SHARES), "fastlibra", "jlora")
        for rate in sorted({rate for rate, _ in found}):
            values = [found.get((rate, policy)) for policy in policies]
            cells = ["" if value is None else f"{1e3 * value:.0f}" for value in values]
            rows.append([str(study["case"]["adapters"]), f"{rate:g}", *cells])
    if not rows:
        return ""
    head = ["adapters", "requests/s", *(f"{share:.0%}" for share in SHARES), "fastlibra", "jlora"]
    return (
        "## The adapters' share (Figure 9)\n\nMean TTFT in ms of `vllm-fair`, by the share of the device that adapters "
        "have, in the chatbot on 7B; at the paper's 2 requests/s, and near the peak.\n\n"
    ) + report.table(head, rows)


def phases(studies: Sequence[Study]) -> str:
    """Figure 14: means by phase; "" without runs."""
    rows = []
    for study in studies:
        spans = list(zip(PHASES, (0.0, *study["ends"]), study["ends"], strict=False))
        for run in sorted(study["runs"], key=lambda run: run["rate"]):
            length = run["requests"] / run["rate"]
            for phase, begin, end in ((phase, length * begin, length * end) for phase, begin, end in spans):
                cells = [f"{run['rate']:g}", run["policy"], phase]
                cells += [_mean(run["series"]["at"], run["series"][key], begin, end, "{:.2f}", 1.0) for key in SHOWN]
                at, waits = zip(*run["waits"], strict=True)
                rows.append([*cells, _mean(at, waits, begin, end, "{:.0f}", 1e3)])
    if not rows:
        return ""
    head = ["requests/s", "policy", "phase", "adapters", "history", "running", "TTFT ms"]
    return (
        "## The device over half an hour (Figure 14)\n\nThe chatbot on 13B with 100 adapters, a rate that rises and "
        "falls around its mean: the paper's 1.6 requests/s, and the same requests at 0.7 of the peak here. Shares of "
        "the device, means over each phase.\n\n"
    ) + report.table(head, rows)


def overheads(path: Path) -> str:
    """Section 6.10 beside R7's largest tree; "" if that has not been measured."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text())
    most = max(tree["nodes"] for tree in record["trees"])
    chosen = [tree for tree in record["trees"] if tree["nodes"] == most and tree["block_tokens"] == 32]
    rows = []
    for what, (operations, limit) in STATED.items():
        for tree in chosen:
            found = [tree["operations"][name]["median_us"] / 1e3 for name in operations]
            rows.append([what, f"{limit:g}", tree["policy"], str(tree["adapters"]), f"{sum(found):.2f}"])
    return (
        f"## Overheads (section 6.10)\n\nMilliseconds of one core; medians at {most:,} nodes, where the paper states a "
        f"mean at the largest tree (of unknown size). Measured by `{record['command'].partition(' --')[0]}` "
        f"([{path.name}]({path.name})), with the 99th percentiles.\n\n"
    ) + report.table(["what", "paper, below", "policy", "adapters", "here"], rows)


def _mean(at: Sequence[float], values: Sequence[float], begin: float, end: float, form: str, scale: float) -> str:
    """The mean of what lies in a phase, as text."""
    inside = [value for when, value in zip(at, values, strict=True) if begin <= when < end]
    return form.format(scale * sum(inside) / len(inside)) if inside else ""
