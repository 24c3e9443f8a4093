"""R7 as a page and a picture: tables of cost growth, and one log-log figure."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURE = "cache-growth.png"
Row = Mapping[str, Any]


def section(record: Mapping[str, Any]) -> str:
    """Markdown: the targets, the operations against tree size, the scheduler against its loads."""
    trees, loads, summary = record["trees"], record["loads"], record["summary"]
    lines = [
        "## R7: cost growth of the host's work\n",
        f"![cost growth]({FIGURE})\n",
        "Microseconds of the thread's own time, median (99th percentile), Python's garbage collector on. "
        "Trees are grown by conversations through the real manager, each in a fresh process; "
        "one node is one block. Nothing here touches a device. "
        f"{record['settings']['rounds']} rounds, one after the other; each operation is from the round where its "
        "median is lowest, since neighbours on the processor slow some of them down.\n",
        _table(
            ["target", "worst case", "limit", "met"],
            [
                [t["what"], f"{t['worst']:.4g}", f"{t['limit']:g}", "yes" if t["met"] else "**no**"]
                for t in summary["targets"]
            ],
        ),
        _table(
            [
                "policy",
                "tokens per block",
                "KV nodes",
                "adapters",
                *trees[0]["operations"],
                "bytes per node",
                "full gc, ms",
            ],
            [_tree(row) for row in trees],
        ),
        f"Scheduler, `plan` and `commit` of one decode step: {summary['fixed_us']:.0f} µs + "
        f"{summary['per_sequence_us']:.2f} µs per running request.\n",
        _table(
            ["running", "queued", "registered", "µs per step"],
            [[str(r["running"]), str(r["queued"]), str(r["registered"]), _cell(r["step"])] for r in loads],
        ),
    ]
    return "\n".join(lines)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Writes the figure; False, and one line on stderr, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    operations, memory, steps = figure.subplots(1, 3)
    _draw_operations(operations, record["trees"])
    _draw_memory(memory, record["trees"])
    _draw_steps(steps, record["loads"])
    figure.savefig(path, dpi=130)
    return True


def _draw_operations(axes: Any, trees: Sequence[Row]) -> None:
    most = max(row["adapters"] for row in trees)
    for policy, style in (("jlora", "-"), ("fastlibra", "--")):
        rows = [r for r in trees if (r["policy"], r["adapters"], r["block_tokens"]) == (policy, most, 32)]
        for i, name in enumerate(rows[0]["operations"]) if rows else ():
            axes.plot(
                [r["kv_nodes"] for r in rows],
                [r["operations"][name]["median_us"] for r in rows],
                style,
                color=f"C{i}",
                marker=".",
                label=name if policy == "jlora" else None,
            )
    axes.axhline(500, color="0.6", lw=1)
    axes.axhline(5000, color="0.6", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="KV nodes", ylabel="µs, median")
    axes.set_title(
        f"cache, {most} adapters: jlora (—), fastlibra (- -)\ngrey: 0.5 ms for a match, 5 ms for a decision",
        fontsize=10,
    )
    axes.legend(fontsize=8, ncols=2)


def _draw_memory(axes: Any, trees: Sequence[Row]) -> None:
    for policy, size in sorted({(r["policy"], r["block_tokens"]) for r in trees}):
        for adapters in sorted({r["adapters"] for r in trees}):
            rows = [
                r
                for r in trees
                if (r["policy"], r["block_tokens"], r["adapters"]) == (policy, size, adapters) and r["bytes_per_node"]
            ]
            if rows:
                label = f"{policy}, {size} tokens, {adapters} adapters"
                axes.plot([r["kv_nodes"] for r in rows], [r["bytes_per_node"] for r in rows], marker=".", label=label)
    axes.axhline(600, color="0.6", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="KV nodes", ylabel="bytes per node (resident)")
    axes.set_title("memory; grey: 600 bytes\n(small trees carry the process's own overhead)", fontsize=10)
    axes.legend(fontsize=8)


def _draw_steps(axes: Any, loads: Sequence[Row]) -> None:
    for key in sorted({(r["queued"], r["registered"]) for r in loads}):
        rows = [r for r in loads if (r["queued"], r["registered"]) == key]
        xs = [r["running"] for r in rows]
        label = f"{key[0]} queued, {key[1]} registered"
        axes.plot(xs, [r["step"]["median_us"] for r in rows], marker=".", label=label)
    xs = sorted({r["running"] for r in loads})
    axes.plot(xs, [200 + 3 * x for x in xs], color="0.6", lw=1, label="200 µs + 3 µs per running request")
    axes.set(xscale="log", yscale="log", xlabel="running requests", ylabel="µs per step, median")
    axes.set_title("scheduler: plan and commit", fontsize=10)
    axes.legend(fontsize=8)


def _tree(row: Row) -> list[str]:
    memory = f"{row['bytes_per_node']:.0f}" if row["bytes_per_node"] else ""
    collection = f"{row['full_collection_s'] * 1e3:.0f}"
    what = [row["policy"], str(row["block_tokens"]), f"{row['kv_nodes']:,}", str(row["adapters"])]
    return [*what, *map(_cell, row["operations"].values()), memory, collection]


def _cell(spread: Mapping[str, float]) -> str:
    return f"{spread['median_us']:.3g} ({spread['p99_us']:.3g})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
