"""One figure per study, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.records import Study, median
from benchmarks.services import KILLED

LIMIT_MS = 500.0  # of mean TTFT, at the peak
SHORT = 32  # tokens of a prompt


def _grid(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list]:
    lines = -(-count // columns)
    figure = Figure((size[0] * min(count, columns), size[1] * lines + 0.5), layout="constrained")
    panels = list(figure.subplots(lines, min(count, columns), squeeze=False).flat)
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels[:count]


def _finish(figure: Figure, path: Path) -> None:
    """One legend for all panels."""
    found = {label: h for axes in figure.axes for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def cache(study: Study, path: Path) -> None:
    """Microseconds over the tree's size, bytes per node, and the scheduler's step over its batch."""
    figure, (operations, memory, steps) = _grid(3, 3, (5, 4))
    trees, loads = (study.rows[study.rows["side"] == side] for side in ("tree", "step"))
    most = trees[trees["adapters"] == trees["adapters"].max()]
    for name in (name for name in trees.columns if name.endswith(" median") and name != "step median"):
        at = most[most["policy"] == "jlora"].groupby("kv_nodes")[name].min()
        operations.plot(at.index, at, marker=".", label=name.removesuffix(" median"))
    for key, group in trees.groupby(["policy", "block_tokens"]):
        at = group.groupby("kv_nodes")["bytes_per_node"].min()
        memory.plot(at.index, at, marker=".", label=f"{key[0]}, {key[1]:.0f} tokens per block")
    for queued, group in loads.groupby("queued"):
        at = group.groupby("running")["step median"].min()
        steps.plot(at.index, at, marker=".", label=f"{queued:.0f} queued")
    operations.set(xlabel="KV nodes", ylabel="µs, median")
    memory.set(xlabel="KV nodes", ylabel="bytes per node")
    steps.set(xlabel="running requests", ylabel="µs per step of the scheduler")
    for axes in (operations, memory, steps):
        axes.set(xscale="log", yscale="log")
    _finish(figure, path)


def alora(study: Study, path: Path) -> None:
    """Gains over the length of the context."""
    rows = study.rows[(study.rows["sessions"] == 1) & (study.rows["adapters"] == study.rows["adapters"].iloc[0])]
    middle = median(rows, ["context", "side"])
    figure, (axes,) = _grid(1, 1, (6, 4))
    for key in ("seconds", "check_end_to_end_s", "check_ttft_s", "check_prefill_s"):
        table = middle[key].unstack()
        axes.plot(table.index, table["lora"] / table["activated"], marker="o", label=key.removesuffix("_s"))
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="times as fast as plain LoRA")
    _finish(figure, path)


def caraserve(study: Study, path: Path) -> None:
    """The way of starting with the soonest first token, over link and prompt: a panel per chip and rank.

    Below, each way over waiting with a short prompt, from host memory and from disks.
    """
    rows = study.rows[study.rows["kind"] == "map"]
    ways = ["wait", "stream", "cpu"]
    groups = list(rows.groupby(["chip", "rank"]))
    figure, panels = _grid(2 * len(groups), 5, (2.6, 2.4))
    for axes, ((chip, rank), group) in zip(panels[: len(groups)], groups, strict=True):
        best = group.assign(best=group[ways].astype(float).to_numpy().argmin(axis=1))
        grid = best.pivot(index="prompt", columns="gbps", values="best")
        axes.imshow(grid, origin="lower", aspect="auto", vmin=0, vmax=2, cmap="viridis")
        axes.set_xticks(range(len(grid.columns)), [f"{gbps:g}" for gbps in grid.columns], fontsize=6)
        axes.set_yticks(range(len(grid.index)), [f"{prompt:.0f}" for prompt in grid.index], fontsize=6)
        axes.set_title(f"{chip}, rank {rank:.0f} (yellow: cpu)", fontsize=8)
        axes.set_ylabel("prompt, tokens", fontsize=6)
    short = study.rows[study.rows["prompt"] == SHORT].assign(mbps=lambda r: r["mbps"].fillna(math.inf))
    for axes, (chip, rank) in zip(panels[len(groups) :], (key for key, _ in groups), strict=True):
        places = short[(short["chip"] == chip) & (short["rank"] == rank)].groupby("mbps")
        for (mbps, some), style in zip(places, (":", "--", "-"), strict=True):
            where = "host memory" if mbps == math.inf else f"a disk of {mbps:g} MB/s"
            for way, colour in (("stream", "C2"), ("cpu", "C1")):
                over = some[way] / some["wait"]
                axes.plot(some["gbps"], over, style, color=colour, label=f"{way}, from {where}", linewidth=1)
        axes.axhline(1.0, color="lightgray", zorder=0)
        links = some["gbps"].tolist()
        axes.set(xscale="log", ylim=(0, 1.2), xticks=links, xticklabels=[f"{gbps:g}" for gbps in links])
        axes.minorticks_off()
        axes.tick_params(labelsize=6)
        axes.set_title(f"{chip}, rank {rank:.0f}, {SHORT} tokens", fontsize=8)
        axes.set_ylabel("first token over wait's", fontsize=6)
    for axes in panels:
        axes.set_xlabel("link, GB/s", fontsize=6)
    _finish(figure, path)


def beyond(study: Study, path: Path) -> None:
    """Mean TTFT over the rate, a panel per cell."""
    rows = study.rows[(study.rows["kind"] == "cell") & (study.rows["side"] != "anchors")]
    cells = list(rows.groupby("cell", sort=False))
    figure, panels = _grid(len(cells), 6, (3, 2.4))
    for axes, (cell, group) in zip(panels, cells, strict=True):
        for side, mine in group[~group["side"].str.contains(":")].groupby("side"):
            ttft: pd.Series = 1e3 * mine.set_index("rate")["ttft_s"].sort_index()
            axes.plot(ttft.index, ttft, marker=".", label=side, linewidth=2 if side == "jlora" else 1)
        axes.axhline(LIMIT_MS, color="lightgray", zorder=0)
        axes.set_yscale("log")
        axes.set_title(str(cell), fontsize=8)
    _finish(figure, path)


def step_model(study: Study, path: Path) -> None:
    """Measured steps that decode over CaraServe's two sizes, and all unseen steps over what was predicted."""
    rows = study.rows[study.rows["side"] == "step"].assign(ms=lambda r: r["seconds"].map(lambda s: 1e3 * min(s)))
    decode = rows[rows["kind"] == "decode"]
    figure, (padded, unpadded, ours) = _grid(3, 3, (4, 3.4))
    padded.scatter(decode["padded"], decode["ms"], s=6, label="decode steps")
    unpadded.scatter(decode["ranks"].map(sum), decode["ms"], s=6, label="decode steps")
    for kind, some in rows[rows["cell"] == "held"].groupby("kind"):
        ours.scatter(1e3 * some["ours_s"].astype(float), some["ms"], s=6, label=f"unseen, {kind}")
    ends = [rows["ms"].min(), rows["ms"].max()]
    ours.plot(ends, ends, color="lightgray", zorder=0)
    ours.set(xscale="log", yscale="log", xlabel="ms predicted", ylabel="ms measured")
    padded.set(xlabel="sequences × highest rank", ylabel="ms measured")
    unpadded.set(xlabel="sum of ranks", ylabel="ms measured")
    _finish(figure, path)


def failures(studies: Sequence[Study], path: Path) -> None:
    """Tokens per second over time, with the times in which a replica was down; a panel for each number of replicas."""
    figure, panels = _grid(len(studies), 1, (9, 3))
    for axes, study in zip(panels, studies, strict=True):
        rows = study.rows
        for side in ("clean", "killed"):
            at = rows[rows["side"] == side]
            axes.plot(at["round"], at["tokens"].rolling(5, min_periods=1).mean(), label=side, linewidth=1)
        for kill in rows[rows["side"] == "kill"].itertuples():
            axes.axvspan(kill.at_s, kill.back_s, color="0.85")
        axes.set(xlabel="seconds", ylabel="tokens per second (mean of 5 s)", ylim=(0, None))
        axes.set_title(rows["cell"].iloc[0], fontsize=9)
    _finish(figure, path)


def soak(study: Study, path: Path) -> None:
    """Memory of each process over time."""
    rows = study.rows[study.rows["cell"] == "samples"]
    figure, (axes,) = _grid(1, 1, (9, 3.5))
    for name, group in rows.groupby("side", sort=False):
        axes.plot(group["at_s"] / 60, group["rss_mib"], label=name, linewidth=1)
    axes.set(xlabel="minutes", ylabel="MiB of resident memory", ylim=(0, None))
    _finish(figure, path)


def services(study: Study, path: Path) -> None:
    """The 99th percentile of TTFT over the replicas, a panel per kernel and kind of traffic."""
    rows = study.rows[~study.rows["cell"].str.endswith(KILLED)]
    groups = list(rows.groupby(["kernel", "cell"], sort=False))
    groups.sort(key=lambda group: group[0][0])
    colours = dict(zip(study.rows["side"].unique(), colormaps["tab20"].colors, strict=False))
    figure, panels = _grid(len(groups), 6, (3, 2.6))
    for axes, ((kernel, cell), group) in zip(panels, groups, strict=True):
        for side, mine in group.groupby("side", sort=False):
            p99 = mine.set_index("replicas")["ttft_p99_s"].sort_index()
            width = 2 if side == "jlora" else 1
            axes.plot(p99.index, p99, marker=".", label=side, linewidth=width, color=colours[side])
        axes.set(xscale="log", yscale="log", xticks=[4, 8, 16, 60], xticklabels=["4", "8", "16", "60"])
        axes.minorticks_off()
        axes.set_title(f"{cell}, {kernel}", fontsize=8)
    _finish(figure, path)


def placement(study: Study, path: Path) -> None:
    """TTFT by the tenth of the run in which a request came, through the shifting skew: a panel per kernel and run."""
    rows = study.rows[study.rows["skew"] == "shifting"]
    groups = list(rows.groupby(["cell", "kernel", "seed"], sort=False))
    colours = {side: f"C{i}" for i, side in enumerate(rows["side"].unique())}
    figure, panels = _grid(len(groups), 4, (3.4, 2.6))
    for axes, ((cell, kernel, seed), group) in zip(panels, groups, strict=True):
        for side, mine in group.groupby("side", sort=False):
            parts = mine["ttft_parts_s"].iloc[0]
            width = 2 if side == "loraserve" else 1
            axes.plot(range(1, len(parts) + 1), parts, marker=".", label=side, linewidth=width, color=colours[side])
        axes.set(yscale="log", xlabel="tenth of the run")
        axes.set_title(f"{cell}\n{kernel}, seed {seed:.0f}", fontsize=6)
    _finish(figure, path)
