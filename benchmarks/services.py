"""Tables of studies of many replicas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.records import Study

Row = Mapping[str, Any]
KILLED = ", one killed"  # behind the name of a cell
PLACED = (
    "loraserve",
    "loraserve, jlora",
    "all three",
    "dlora, all",
)  # begin with the adapters of their first placement
LONG = "long tail"  # adapters of every replica: 600, elsewhere 50
# Measure -> (its title, its form, what the best one of several is).
MEASURES: Mapping[str, tuple[str, str, Callable[..., Any]]] = {
    "attainment": ("attained", "{:.1%}", max),
    "ttft_p99_s": ("TTFT p99 s", "{:.2f}", min),
    "goodput": ("goodput/s", "{:.1f}", max),
}


def beside_best(study: Study, kernel: str) -> pd.DataFrame:
    """`jlora`, the best router among the baselines by each measure for itself, and LoRAServe's placement."""
    made = []
    for (_, cell, replicas), sides in _cells(study, kernel=kernel).items():
        row = {"traffic": cell, "replicas": f"{replicas}"}
        for key, (title, form, _) in MEASURES.items():
            best = _best(sides, key)
            row[title] = form.format(sides["jlora"][key])
            row[f"best other, {title}"] = f"{form.format(best[key])} {best['side']}"
            if "loraserve" in sides:
                row[f"loraserve, {title}"] = form.format(sides["loraserve"][key])
        made.append(row)
    return pd.DataFrame(made).fillna("")


def wins(study: Study, key: str, within: float = 0.0, placed: bool = False, replicas: Sequence[int] = ()) -> str:
    """In how many cells `jlora` is as good as the best other router, or worse by at most this share of it.

    Args:
        placed: `loraserve` counts as a router, though it begins with its first placement's adapters in place.
        replicas: only cells of so many.
    """
    cells, more = _cells(study), MEASURES[key][2] is max
    told = []
    for (_, _, count), sides in cells.items():
        if not replicas or count in replicas:
            ours, best = sides["jlora"][key], _best(sides, key, placed)[key]
            told.append(ours >= best * (1 - within) if more else ours <= best * (1 + within))
    return f"{sum(told)} of {len(told)}"


def losses(study: Study) -> pd.DataFrame:
    """Where `jlora` attains less than another router, and less than `loraserve`, by traffic."""
    by: dict[str, list[dict[str, Row]]] = {}
    for (_, cell, _), sides in _cells(study).items():
        by.setdefault(cell, []).append(sides)
    made = []
    for cell, some in by.items():
        line = {"traffic": cell, "cells": f"{len(some)}"}
        behind = [(_best(sides, "attainment"), sides["jlora"]) for sides in some]
        line["better routers"] = ", ".join(sorted({best["side"] for best, ours in behind if _behind(best, ours) > 0}))
        for title, pairs in (
            ("the best router", behind),
            ("`loraserve`", [(sides["loraserve"], sides["jlora"]) for sides in some if "loraserve" in sides]),
        ):
            lost = [_behind(other, ours) for other, ours in pairs if _behind(other, ours) > 0]
            line[f"behind {title}"] = f"{len(lost)}, by up to {max(lost):.1f} points" if lost else "0"
        made.append(line)
    return pd.DataFrame(made)


def _behind(other: Row, ours: Row) -> float:
    return 100 * (other["attainment"] - ours["attainment"])


def attained(study: Study, side: str, kernel: str, replicas: Sequence[int] = ()) -> str:
    """The mean over all kinds of traffic, in percent."""
    return f"{100 * _mean(_rows(study, side, kernel, replicas), 'attainment'):.1f}"


def waits(study: Study, side: str, kernel: str) -> str:
    """The 99th percentile of TTFT over round-robin's, the geometric mean over all cells."""
    cells = _cells(study, kernel=kernel).values()
    ratios = [sides[side]["ttft_p99_s"] / sides["round-robin"]["ttft_p99_s"] for sides in cells]
    return f"{statistics.geometric_mean(ratios):.2f}"


def span(study: Study, side: str, cell: str, key: str = "attainment", replicas: Sequence[int] = ()) -> str:
    """The least and the most of a measure in the cells of one kind of traffic; attainment in percent."""
    rows = [row for kernel in ("padded", "unpadded") for row in _rows(study, side, kernel, replicas)]
    values = [row[key] for row in rows if row["cell"] == cell]
    form, scale = ("{:.0f}", 100) if key == "attainment" else ("{:.1f}", 1)
    ends = dict.fromkeys(form.format(scale * value) for value in (min(values), max(values)))
    return " to ".join(ends) + " %" * (key == "attainment")


def by_load(study: Study, cell: str, replicas: int) -> pd.DataFrame:
    """What each policy attains, and its 99th percentile of TTFT, by the requests per second of a replica."""
    made: dict[str, dict[str, str]] = {}
    for row in study.rows.to_dict("records"):
        if (row["cell"], row["replicas"]) == (cell, replicas):
            line = made.setdefault(row["side"], {"policy": row["side"]})
            line[f"{row['rate']:g}/s"] = f"{row['attainment']:.1%}, {row['ttft_p99_s']:.2f} s"
    return pd.DataFrame(list(made.values()))


def over_turns(study: Study, cell: str, key: str = "ttft_p99_s", side: str = "jlora") -> pd.DataFrame:
    """A measure over round-robin's, by the number of replicas and requests per second of each."""
    made: dict[int, dict[str, str]] = {}
    rows = [row for row in study.rows.to_dict("records") if row["cell"] == cell]
    of = {(row["replicas"], row["rate"], row["side"]): row for row in rows}
    for (replicas, rate, name), row in of.items():
        if name == side:
            line = made.setdefault(replicas, {"replicas": f"{replicas}"})
            line[f"{rate:g}/s"] = f"{row[key] / of[replicas, rate, 'round-robin'][key]:.2f}"
    return pd.DataFrame(list(made.values())).fillna("")


def reach(study: Study, side: str, share: float) -> str:
    """In how many cells a policy attains this share."""
    sides = [sides[side] for sides in _cells(study).values()]
    return f"{sum(row['attainment'] >= share for row in sides)} of {len(sides)}"


def waits_by_kind(study: Study, side: str) -> pd.DataFrame:
    """The 99th percentile of TTFT over round-robin's by kind of traffic, for each kernel and number of replicas."""
    made: dict[str, dict[str, str]] = {}
    for (kernel, cell, replicas), sides in _cells(study).items():
        line = made.setdefault(cell, {"traffic": cell})
        ratio = sides[side]["ttft_p99_s"] / sides["round-robin"]["ttft_p99_s"]
        line[f"{replicas} replicas, {kernel}"] = f"{ratio:.2f}"
    return pd.DataFrame(list(made.values())).fillna("")


def by_policy(study: Study, kernel: str) -> pd.DataFrame:
    """Each policy over all kinds of traffic, by the number of replicas; "–" where it was not played."""
    cells: dict[tuple[str, int], list[dict[str, Row]]] = {}
    for (_, _, replicas), sides in _cells(study, kernel=kernel).items():
        for side in sides:
            cells.setdefault((side, replicas), []).append(sides)
    sizes = sorted({replicas for _, replicas in cells})
    made = []
    for side in dict.fromkeys(side for side, _ in cells):
        columns = [_means(cells.get((side, replicas), []), side) for replicas in sizes]
        joined = {title: " / ".join(c.get(title, "–") for c in columns) for title in max(columns, key=len)}
        made.append({"policy": side} | joined)
    return pd.DataFrame(made)


def _means(cells: Sequence[dict[str, Row]], side: str) -> dict[str, str]:
    """Of one policy over some cells."""
    if not cells:
        return {}
    rows = [sides[side] for sides in cells]
    ratios = [sides[side]["ttft_p99_s"] / sides["round-robin"]["ttft_p99_s"] for sides in cells]
    return {
        "attained": f"{_mean(rows, 'attainment'):.1%}",
        "least": f"{min(row['attainment'] for row in rows):.1%}",
        "TTFT p99 / round-robin's": f"{statistics.geometric_mean(ratios):.2f}",
        "goodput/s of a replica": f"{_each(rows, 'goodput'):.2f}",
        "prompts cached": f"{_mean(rows, 'cached'):.0%}",
        "GB fetched by a replica": f"{1e-9 * _each(rows, 'bytes_fetched'):.2f}",
        "GB from its host": f"{1e-9 * _each(rows, 'bytes_in'):.2f}",
        "adapters stored, most": f"{_mean(rows, 'adapters_most'):.0f}",
    }


def killed(study: Study) -> pd.DataFrame:
    """The cells in which a replica is killed, by policy: what each attains, P99 of TTFT, and requests that went on."""
    made: dict[tuple[str, int], dict[str, str]] = {}
    for row in study.rows.to_dict("records"):
        if row["cell"].endswith(KILLED):
            key = row["cell"].removesuffix(KILLED), row["replicas"]
            line = made.setdefault(key, {"traffic": key[0], "replicas": f"{key[1]}"})
            line[row["side"]] = f"{row['attainment']:.1%}, {row['ttft_p99_s']:.2f} s, {row['resumed']:.0f}"
    return pd.DataFrame(list(made.values()))


def storage(study: Study, replicas: int, kernel: str = "padded") -> pd.DataFrame:
    """Adapters of the fullest host, and gigabytes fetched by all, by policy and traffic."""
    made: dict[str, dict[str, str]] = {}
    for (_, cell, count), sides in _cells(study, kernel=kernel).items():
        for side, row in sides.items() if count == replicas else ():
            text = f"{row['adapters_most']:.0f}, {1e-9 * row['bytes_fetched']:.1f} GB"
            made.setdefault(side, {"policy": side})[cell] = text
    return pd.DataFrame(list(made.values()))


def stored(study: Study, *routers: str) -> str:
    """Adapters of `loraserve`'s fullest host, as multiples of those of some routers, or all: the least and the most."""
    ratios = []
    for sides in _cells(study).values():
        if placed := sides.get(PLACED[0]):
            others = routers or (side for side in sides if side not in PLACED)
            ratios += [placed["adapters_most"] / sides[side]["adapters_most"] for side in others]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def growth(study: Study) -> pd.DataFrame:
    """Milliseconds of a core for each request over both kernels, by policy: in the long tail and elsewhere."""
    rows = [row for row in study.rows.to_dict("records") if not row["cell"].endswith(KILLED)]
    made = []
    for side in dict.fromkeys(row["side"] for row in rows):
        line = {"policy": side}
        for count in sorted({row["replicas"] for row in rows}):
            for long in (False, True):
                mine = [
                    row for row in rows
                    if (row["side"], row["replicas"], row["cell"] == LONG) == (side, count, long)
                ]  # fmt: skip
                asked = sum(row["requests"] for row in mine)
                title = f"{count} replicas" + f", {LONG}" * long
                line[title] = f"{1e3 * sum(row['cpu_s'] for row in mine) / asked:.1f}" if asked else ""
        made.append(line)
    return pd.DataFrame(made)


SLA_S = 1.0  # 95th percentile of TTFT: a run of half a minute cannot queue for the paper's ten seconds


def played(study: Study, figure: str) -> bool:
    """Whether there are runs of a figure."""
    return figure in set(study.rows["figure"])


def grid(study: Study, figure: str, kernel: str, by: Sequence[str], form: Callable[[Row], str]) -> pd.DataFrame:
    """The runs of a figure of LoRAServe's: a line for each value of `by`, a column for each side."""
    made: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in _of(study, figure, kernel):
        key = tuple(row[name] for name in by)
        line = made.setdefault(key, {name: _plain(value) for name, value in zip(by, key, strict=True)})
        line[row["side"]] = form(row)
    return pd.DataFrame(list(made.values())).fillna("")


def wait(row: Row) -> str:
    """The 95th percentile of TTFT in ms."""
    return f"{1e3 * row['ttft_p95_s']:.0f}"


def wait_and_pace(row: Row) -> str:
    """The same, and the mean TPOT in ms."""
    return f"{wait(row)}, {1e3 * row['tpot_s']:.1f}"


def every_side(study: Study) -> list[Row]:
    """The runs with padded kernels of the cells that have been played under all sides, not some."""
    rows = [row for row in study.rows.to_dict("records") if row["kernel"] == "padded"]
    cells = {(row["cell"], row["seed"]) for row in rows if row["side"] == "loraserve, late"}
    return [row for row in rows if (row["cell"], row["seed"]) in cells]


def under_sla(study: Study, figure: str, kernel: str, by: str = "adapters") -> pd.DataFrame:
    """The highest rate played with which the 95th percentile of TTFT keeps to the SLA, by adapters or servers."""
    rates: dict[Any, dict[str, float]] = {}
    for row in _of(study, figure, kernel):
        best = rates.setdefault(row[by], {})
        met = row["ttft_p95_s"] <= SLA_S and not row["unfinished"]
        best[row["side"]] = max(best.get(row["side"], 0.0), row["rate"] if met else 0.0)
    return pd.DataFrame(
        [{by: f"{count}"} | {side: f"{rate:g}" for side, rate in best.items()} for count, best in rates.items()]
    ).fillna("")


def by_server(study: Study, figure: str, kernel: str, **only: Any) -> pd.DataFrame:
    """Each server's 95th percentile of TTFT and its adapters at the end, and the most that one held, by side."""
    made = []
    for row in _of(study, figure, kernel):
        if all(row[name] == value for name, value in only.items()):
            servers = {
                f"server {i}": f"{1e3 * server['ttft_p95_s']:.0f} ms, {server['adapters']:.0f}"
                for i, server in enumerate(row["by_server"])
            }
            made.append({"side": row["side"], **servers, "all": f"{1e3 * row['ttft_p95_s']:.0f} ms", **_peak(row)})
    return pd.DataFrame(made).fillna("")


def _peak(row: Row) -> dict[str, str]:
    """The most that any one server held at once; older records do not tell it."""
    if not row.get("adapters_peak", math.nan) >= 0:
        return {}
    return {"at once, most": f"{row['adapters_peak']:.0f}, {1e-9 * row['bytes_peak']:.1f} GB"}


def _of(study: Study, figure: str, kernel: str) -> list[Row]:
    return [row for row in study.rows.to_dict("records") if (row["figure"], row["kernel"]) == (figure, kernel)]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cells(study: Study, **only: str) -> dict[tuple[str, str, int], dict[str, Row]]:
    """The rows by kernel, traffic and replicas, and then by policy. A cell that is not finished is left out."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in study.rows.to_dict("records"):
        if all(row[name] == value for name, value in only.items()):
            found.setdefault((row["kernel"], row["cell"], row["replicas"]), {})[row["side"]] = row
    whole = {count: max(len(sides) for key, sides in found.items() if key[2] == count) for _, _, count in found}
    return {key: sides for key, sides in found.items() if len(sides) == whole[key[2]] and "jlora" in sides}


def _rows(study: Study, side: str, kernel: str, replicas: Sequence[int]) -> list[Row]:
    cells = _cells(study, kernel=kernel).items()
    return [sides[side] for (_, _, count), sides in cells if side in sides and (not replicas or count in replicas)]


def _best(sides: Mapping[str, Row], key: str, placed: bool = False) -> Row:
    left_out = ("jlora", *PLACED[1 if placed else 0 :])
    others = (row for side, row in sides.items() if side not in left_out)
    return MEASURES[key][2](others, key=lambda row: row[key])


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _each(rows: Sequence[Row], key: str) -> float:
    """The mean of a replica."""
    return statistics.fmean(row[key] / row["replicas"] for row in rows)
