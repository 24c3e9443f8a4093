"""The figure of `jlora bench beyond`: TTFT over the rate in every cell; needs matplotlib."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.beyond import BOUND, LEVELS, OURS, best_share, by_rate
from benchmarks.paper import LIMIT_S, STATIC, static

NAME = "beyond.png"
COLORS: Mapping[str, str] = {
    OURS: "black",
    "lru": "tab:blue",
    "fastlibra": "tab:green",
    STATIC: "goldenrod",
    BOUND: "tab:gray",
}
COLUMNS = 6


def draw(out: Path, cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Draws finished cells, a panel each, as OUT/beyond.png; the file's name, or nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return []
    from matplotlib.figure import Figure

    lines = -(-len(cells) // COLUMNS)
    figure = Figure((3 * COLUMNS, 2.4 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, COLUMNS, squeeze=False).flatten()
    for panel, (name, study) in zip(panels, cells.items(), strict=False):
        runs, rates = by_rate(study), study["rates"]
        best = static(best_share(runs, rates))
        for policy, color in COLORS.items():
            times = [1e3 * runs[rate, best if policy == STATIC else policy]["ttft_s"] for rate in rates]
            panel.plot(LEVELS, times, color=color, marker=".", linestyle="--" if policy == BOUND else "-", label=policy)
        panel.axhline(1e3 * LIMIT_S, color="lightgray", zorder=0)
        panel.set_yscale("log")
        panel.set_title(name, fontsize=8)
    for panel in panels[len(cells) :]:
        panel.set_axis_off()
    figure.supxlabel(f"rate, as a share of the peak of {OURS}", fontsize=9)
    figure.supylabel("mean TTFT, ms", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, [f"{STATIC}, best share" if x == STATIC else x for x in labels], loc="outside upper center", ncols=5
    )
    figure.savefig(out / NAME, dpi=80)
    return [NAME]
