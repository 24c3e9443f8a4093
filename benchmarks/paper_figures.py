"""Figures of `jlora bench paper`, one file per figure of the paper; needs matplotlib."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper import ABLATIONS, CARDS, LIMIT_S, POLICIES, REFERENCE, SCENES
from benchmarks.paper_numbers import Table

BEST = "best"
BARS = (*POLICIES, BEST)
COLORS: Mapping[str, str] = {
    "jlora": "black",
    "fastlibra": "tab:green",
    "vllm": "tab:red",
    "vllm-fair:0.2": "tab:orange",
    BEST: "goldenrod",
    "slora": "tab:blue",
}
LABELS = {BEST: "vllm-fair, best share"}
PARTS = {"queue_s": "queue", "adapter_s": "LoRA cold start", "kv_s": "KV cold start"}


def draw(out: Path, figures: Mapping[str, Table], studies: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Draws what there are runs for, as OUT/fastlibra-NAME.png; the file names.

    Args:
        figures: complete cases: "grid" of Figures 11 to 15, "many" of Figure 16.
        studies: the raw runs by kind.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no figures: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return []
    grid, many = figures["grid"], figures["many"]
    makers: Mapping[str, tuple[bool, Callable[[Path], None]]] = {
        "11": (bool(grid.cases), lambda path: _bars(path, grid, ("ttft_s", "tpot_s", "peak"))),
        **{
            f"curves-{count}": (True, lambda path, count=count: _curves(path, grid, count))
            for count in sorted({study["case"]["adapters"] for study in grid.cases.values()})
        },
        "12": (bool(grid.cases), lambda path: _breakdown(path, grid)),
        "13": (bool(grid.cases), lambda path: _use(path, grid)),
        "14": (
            any(study["runs"] for study in studies["time"]),
            lambda path: _over_time(path, studies["time"][0]["runs"]),
        ),
        "15": (
            any(grid.curve(case, ABLATIONS[0]) for case in grid.cases),
            lambda path: _ablations(path, grid),
        ),
        "16": (bool(many.cases), lambda path: _bars(path, many, ("ttft_s", "tpot_s"))),
        "9": (any(study["runs"] for study in studies["ratios"]), lambda path: _ratios(path, studies["ratios"])),
    }
    made = []
    for name, (there, make) in makers.items():
        if there:
            made.append(f"fastlibra-{name}.png")
            make(out / made[-1])
    return made


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(figure: Any, path: Path) -> None:
    """One legend for all panels: that of the one with the most entries."""
    handles, labels = max((axes.get_legend_handles_labels() for axes in figure.axes), key=lambda found: len(found[1]))
    columns = max(1, min(len(labels), int(figure.get_figwidth() / 1.8)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path, dpi=90)


def _bars(path: Path, table: Table, keys: Sequence[str]) -> None:
    """A row per quantity, a group of bars per case."""
    titles = {"ttft_s": "mean TTFT, ms", "tpot_s": "mean TPOT, ms", "peak": "peak, requests/s"}
    names = list(table.cases)
    figure = _figure(max(7.0, 0.75 * len(names) + 2), 2.4 * len(keys) + 0.8)
    rows = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(rows, keys, strict=True):
        for index, policy in enumerate(BARS):
            places, values = [], []
            for place, name in enumerate(names):
                curve = table.curve(name, policy)
                if curve is not None:
                    places.append(place + (index - 2.5) * 0.14)
                    values.append(curve.peak if key == "peak" else 1e3 * curve.mean(key, table.cases[name]["rates"]))
            axes.bar(places, values, 0.13, color=COLORS[policy], label=LABELS.get(policy, policy))
        axes.set_ylabel(titles[key])
        axes.set_yscale("log")
        axes.grid(alpha=0.3, axis="y")
    rows[-1].set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    _finish(figure, path)


def _curves(path: Path, table: Table, adapters: int) -> None:
    """Mean TTFT over the rate: a panel per scene and model, with so many adapters."""
    cases = {name: study["case"] for name, study in table.cases.items()}
    chosen = {(c["workload"], c["model"]): name for name, c in cases.items() if c["adapters"] == adapters}
    scenes = [w for w in SCENES if any(at[0] == w for at in chosen)]
    models = [m for m in CARDS if any(at[1] == m for at in chosen)]
    figure = _figure(4.0 * len(models), 2.8 * len(scenes) + 0.6)
    panels = figure.subplots(len(scenes), len(models), squeeze=False)
    for row, scene in enumerate(scenes):
        for column, model in enumerate(models):
            name = chosen.get((scene, model))
            if name is not None:
                _curve(panels[row][column], table, name)
    _finish(figure, path)


def _curve(axes: Any, table: Table, name: str) -> None:
    for policy in BARS:
        curve = table.curve(name, policy)
        if curve is not None:
            rates, runs = zip(*curve.points, strict=True)
            line = [1e3 * run["ttft_s"] for run in runs]
            axes.plot(rates, line, color=COLORS[policy], label=LABELS.get(policy, policy), marker=".", linewidth=1.2)
    axes.axhline(1e3 * LIMIT_S, color="gray", linewidth=0.8, linestyle=":")
    axes.set_title(name, fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("mean TTFT, ms")
    axes.grid(alpha=0.3)


def _breakdown(path: Path, table: Table) -> None:
    """Figure 12: what a request waits for before its prompt is computed."""
    scenes = _scenes(table)
    figure = _figure(4.0 * len(scenes), 3.2)
    panels = figure.subplots(1, len(scenes), squeeze=False)[0]
    for axes, scene in zip(panels, scenes, strict=True):
        for place, policy in enumerate(BARS):
            bottom = 0.0
            for index, (key, label) in enumerate(PARTS.items()):
                value = 1e3 * (table.overall(policy, key, scene) or 0.0)
                axes.barh(place, value, left=bottom, color=f"C{index}", label=label if place == 0 else None)
                bottom += value
        axes.set_yticks(range(len(BARS)), [LABELS.get(policy, policy) for policy in BARS], fontsize=8)
        axes.set_title(f"{scene} {SCENES[scene]}")
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xlabel("ms, mean over cases and rates")
        axes.grid(alpha=0.3, axis="x")
    _finish(figure, path)


def _use(path: Path, table: Table) -> None:
    """Figure 13: how full the device is, and what is found there."""
    scenes = _scenes(table)
    keys = (("adapters", "history_kv", "running_kv"), ("adapter_hits",), ("kv_device_hits", "kv_host_hits"))
    titles = ("device in use: adapters, history, running", "adapter hits", "KV hits: device (full), host (light)")
    figure = _figure(13.0, 3.4)
    panels = figure.subplots(1, 3)
    for axes, parts, title in zip(panels, keys, titles, strict=True):
        for index, policy in enumerate(BARS):
            places = [place + (index - 2.5) * 0.14 for place in range(len(scenes))]
            bottom = [0.0] * len(scenes)
            for depth, key in enumerate(parts):
                values = [table.overall(policy, key, scene) or 0.0 for scene in scenes]
                label = LABELS.get(policy, policy) if depth == 0 else None
                axes.bar(places, values, 0.13, bottom, color=COLORS[policy], alpha=1 - 0.35 * depth, label=label)
                bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        axes.set_xticks(range(len(scenes)), [SCENES[scene] for scene in scenes])
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3, axis="y")
    _finish(figure, path)


def _ablations(path: Path, table: Table) -> None:
    """Figure 15: each ablation over the whole, case by case."""
    figure = _figure(max(7.0, 0.5 * len(table.cases) + 2), 7.0)
    rows = figure.subplots(len(ABLATIONS), 1, sharex=True)
    names = list(table.cases)
    for axes, policy in zip(rows, ABLATIONS, strict=True):
        for offset, (key, label) in enumerate((("ttft_s", "TTFT"), ("tpot_s", "TPOT"))):
            ratios = table.ratios(policy, REFERENCE, key)
            places = [names.index(name) + (offset - 0.5) * 0.35 for name in ratios]
            axes.bar(places, list(ratios.values()), 0.33, label=label)
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_ylabel(f"{policy}\nover {REFERENCE}", fontsize=8)
        axes.grid(alpha=0.3, axis="y")
    rows[-1].set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    _finish(figure, path)


def _over_time(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Figure 14: history KV, adapters and running KV on the device, and TTFT; a column per rate."""
    panels = {"history_kv": "history KV", "adapters": "adapters", "running_kv": "running KV"}
    rates = sorted({run["rate"] for run in runs})
    figure = _figure(6.0 * len(rates), 9.0)
    rows = figure.subplots(4, len(rates), sharex="col", squeeze=False)
    for run in runs:
        series, color, column = run["series"], COLORS[run["policy"]], rows[:, rates.index(run["rate"])]
        for axes, (key, title) in zip(column, panels.items(), strict=False):
            axes.plot(series["at"], [100 * value for value in series[key]], color=color, label=run["policy"])
            axes.set_ylabel(f"{title}, % of the device")
        at, wait = zip(*run["waits"], strict=True)
        column[3].plot(at, [1e3 * value for value in wait], color=color, label=run["policy"])
        column[3].set_yscale("log")
        column[3].set_ylabel("TTFT, ms (30 s means)")
        column[3].set_xlabel("seconds")
        column[0].set_title(f"{run['rate']:g} requests/s", fontsize=9)
    for axes in rows.flat:
        axes.grid(alpha=0.3)
    _finish(figure, path)


def _ratios(path: Path, studies: Sequence[Mapping[str, Any]]) -> None:
    """Figure 9: TTFT over the share that adapters have, and where one pool is; a panel per number of adapters."""
    figure = _figure(5.0 * len(studies), 3.6)
    for axes, study in zip(figure.subplots(1, len(studies), squeeze=False)[0], studies, strict=True):
        rates = sorted({run["rate"] for run in study["runs"]})
        for index, rate in enumerate(rates):
            runs = {run["policy"]: 1e3 * run["ttft_s"] for run in study["runs"] if run["rate"] == rate}
            shares = sorted((float(name.partition(":")[2]), value) for name, value in runs.items() if ":" in name)
            axes.plot(*zip(*shares, strict=True), marker="o", color=f"C{index}", label=f"vllm-fair, {rate:g}/s")
            if "jlora" in runs:
                axes.axhline(runs["jlora"], color=f"C{index}", linestyle=":", label=f"jlora, {rate:g}/s")
        axes.set_title(study["case"]["name"], fontsize=9)
        axes.set_xlabel("share of the device for adapters")
        axes.set_ylabel("mean TTFT, ms")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    _finish(figure, path)


def _scenes(table: Table) -> list[str]:
    return [scene for scene in SCENES if any(name.startswith(scene) for name in table.cases)]
