"""The page and the figure of `jlora bench policies`."""

from __future__ import annotations

import datetime
import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rounds
from jlora import machine

PAGE = "policies.md"
FIGURE = "policies.png"
MARK = "<!-- below: written by jlora bench policies -->"
OURS = "jlora"
AGAIN = "jlora, again"  # the same policy as another side of each round: the control

# Column -> (key of a sample, factor, digits).
COLUMNS: Mapping[str, tuple[str, float, int]] = {
    "TTFT ms": ("ttft_s", 1e3, 1),
    "p50": ("ttft_p50_s", 1e3, 1),
    "p99": ("ttft_p99_s", 1e3, 0),
    "TPOT ms": ("tpot_s", 1e3, 2),
    "queue ms": ("queue_s", 1e3, 1),
    "swap-in ms": ("swap_s", 1e3, 1),
    "adapter": ("adapter_s", 1e3, 1),
    "KV": ("kv_s", 1e3, 1),
    "adapter hits": ("adapter_hits", 1, 2),
    "KV hits device": ("kv_device_hits", 1, 2),
    "host": ("kv_host_hits", 1, 2),
    "invalid KV": ("invalid_kv", 1, 3),
    "MB in": ("bytes_in", 1e-6, 0),
    "MB out": ("bytes_out", 1e-6, 0),
    "blocks lost": ("blocks_lost", 1, 0),
    "recomputed": ("recomputed_tokens", 1, 0),
    "preempted": ("preemptions", 1, 0),
    "unfinished": ("unfinished", 1, 0),
    "tok/s": ("tokens_per_s", 1, 0),
}


def write(out: Path, result: Mapping[str, Any]) -> None:
    """Writes the page and the figure into `out`; what stands above the mark on the page stays."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    text = path.read_text().partition(MARK)[0] if path.exists() else "# Cache policies on the real engine\n\n"
    figure = f"![TTFT by policy]({FIGURE})\n\n" if draw(result, out / FIGURE) else ""
    path.write_text(f"{text}{MARK}\n\n{origin(result)}\n{figure}{tables(result)}")


def origin(result: Mapping[str, Any]) -> str:
    """Command, date, machine, versions and the workloads' facts."""
    m = machine.describe()
    versions = ", ".join(f"{k} {v}" for k, v in result["settings"]["versions"].items())
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    line = f"`{report.command()}`, {day}, {m['processor']}, {m['cores']} cores, {m['memory_gib']:.0f} GiB; {versions}."
    facts = "\n".join(facts_line(name, facts) for name, facts in result["workloads"].items())
    return f"{line}\n\n```\n{facts}\n```\n"


def facts_line(name: str, facts: Mapping[str, Any]) -> str:
    """The facts of a workload in a few lines."""
    f = facts["facts"]
    sizes = " or ".join(map(str, facts["adapter_blocks"]))
    links = ", ".join(f"{gbps * 1e3:.0f} MB/s for {paper} GB/s" for paper, gbps in facts["links"].items())
    return (
        f"{name} ({facts['trace']}): {f['requests']} requests of {f['sessions']} sessions, {f['rate']:.2f}/s played "
        f"{facts['accelerated']:.1f} times as fast = {facts['requests_per_s']:.0f}/s, of at most "
        f"{facts['capacity']:.0f}/s; gaps vary {f['burstiness']:.2f}\n"
        f"  prompts of {_lengths(f['prompt'])} tokens, of them new {f['added'][0]:.0f}; answers of "
        f"{_lengths(f['output'])}; {f['adapters']} adapters asked for, the top 10 by {f['top10']:.0%}\n"
        f"  a cache of any size hits {f['bound']:.0%}; working set {f['working_set']} blocks of "
        f"{facts['block_tokens']} tokens: {f['kv_blocks']} of KV, {f['adapter_blocks']} of adapters ({sizes} each); "
        f"host tier {facts['host_blocks']}\n"
        f"  a token is computed in {facts['token_us']:.0f} us, its KV has {facts['token_bytes']:.0f} bytes: {links}"
    )


def tables(result: Mapping[str, Any]) -> str:
    """Mean TTFT of all cells in one table, then everything of each cell."""
    cells = result["cells"]
    policies = [p for p in cells[0]["median"] if p != AGAIN]
    rows = [[_name(cell), *_relative(cell, policies)] for cell in cells]
    count = len(cells[0]["rounds"])
    parts = [
        f"## Mean TTFT: milliseconds of `{OURS}`, and times as long for the others\n\n"
        f"Median of {count} interleaved rounds of the ratio inside a round (lowest–highest). "
        f"*Control*: `{OURS}` played twice in a round, one over the other.\n\n"
        + report.table(["cell", *policies, "control"], rows)
    ]
    for cell in cells:
        head = (
            f"## {_name(cell)}\n\nDevice {cell['device_blocks']} blocks, link {cell['link_gbps'] * 1e3:.0f} MB/s. "
            f"Medians of {len(cell['rounds'])} rounds.\n\n"
        )
        body = [[p, *_row(cell["median"][p])] for p in cell["median"]]
        parts.append(head + report.table(["policy", *COLUMNS], body))
    return "\n".join(parts)


def draw(result: Mapping[str, Any], path: Path) -> bool:
    """The figure: mean TTFT and swap-in time by policy; False, and a line on stderr, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return False
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((cell["workload"], cell["gbps"]) for cell in result["cells"]))
    figure = Figure(figsize=(4.2 * len(groups), 7.2), layout="constrained")
    panels = figure.subplots(2, len(groups), squeeze=False)
    for column, group in enumerate(groups):
        cells = [cell for cell in result["cells"] if (cell["workload"], cell["gbps"]) == group]
        panels[0][column].set_title(f"{group[0]}, link as of {group[1]:g} GB/s")
        for row, (key, label) in enumerate((("ttft_s", "mean TTFT, ms"), ("swap_s", "swap-in per request, ms"))):
            _panel(panels[row][column], cells, key, label)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
    return True


def _panel(axes: Any, cells: Sequence[Mapping[str, Any]], key: str, label: str) -> None:
    """One quantity over the device's size, a line per policy with the range of its rounds."""
    for index, policy in enumerate(p for p in cells[0]["median"] if p != AGAIN):
        at = [100 * cell["share"] for cell in cells]
        values = [[1e3 * r[policy][key] for r in cell["rounds"]] for cell in cells]
        ours = policy == OURS
        (line,) = axes.plot(
            at,
            [statistics.median(v) for v in values],
            label=policy,
            color="black" if ours else f"C{index}",
            linewidth=2.4 if ours else 1.2,
            marker="o",
            markersize=4,
            zorder=3 if ours else 2,
        )
        axes.fill_between(at, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.08)
    axes.set_xlabel("device, % of the working set")
    axes.set_ylabel(label)
    axes.set_xticks([100 * cell["share"] for cell in cells])
    if key == "ttft_s":
        axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _lengths(values: Sequence[float]) -> str:
    """Mean, median and 95th percentile."""
    return "{:.0f} (median {:.0f}, p95 {:.0f})".format(*values)


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['workload']}, {cell['share']:.0%}, {cell['gbps']:g} GB/s"


def _relative(cell: Mapping[str, Any], policies: Sequence[str]) -> list[str]:
    """`OURS` in milliseconds, the others as ratios to it, and the control."""
    found = []
    for policy in policies:
        if policy == OURS:
            found.append(f"{1e3 * cell['median'][policy]['ttft_s']:.1f} ms")
        else:
            found.append(str(rounds.speed_ratio(cell["rounds"], OURS, policy, "ttft_s")))
    return [*found, str(rounds.speed_ratio(cell["rounds"], OURS, AGAIN, "ttft_s"))]


def _row(sample: Mapping[str, float]) -> list[str]:
    return [f"{sample[key] * factor:.{digits}f}" for key, factor, digits in COLUMNS.values()]
