"""Tables of studies of many replicas."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from benchmarks.records import Study

CELL = ["kernel", "cell", "replicas"]
OURS = ("jlora", "loraserve, jlora")
MEASURES = {"attainment": True, "ttft_p99_s": False, "goodput": True}  # whether more is better
FORMS = {"attainment": "{:.1%}", "ttft_p99_s": "{:.2f}", "goodput": "{:.1f}"}


def beside_best(study: Study, kernel: str) -> pd.DataFrame:
    """`jlora` and the best baseline of each cell, by each measure for itself."""
    made = []
    for (cell, replicas), group in study.rows[study.rows["kernel"] == kernel].groupby(["cell", "replicas"], sort=False):
        sides = group.set_index("side")
        row = {"traffic": cell, "replicas": f"{replicas}"}
        for key, title in (("attainment", "attained"), ("ttft_p99_s", "TTFT p99 s"), ("goodput", "goodput/s")):
            name, best = _best(sides, key)
            ours = _value(sides, "jlora", key)
            row[title] = FORMS[key].format(ours)
            row[f"best baseline, {title}"] = f"{FORMS[key].format(best)} {name}"
        made.append(row)
    return pd.DataFrame(made)


def wins(study: Study, key: str, within: float = 0.0) -> str:
    """In how many cells `jlora` is at least as good as the best baseline, or worse by at most this share of it."""
    more, count, all_ = MEASURES[key], 0, 0
    for _, group in study.rows.groupby(CELL):
        sides = group.set_index("side")
        _, best = _best(sides, key)
        ours = _value(sides, "jlora", key)
        all_ += 1
        count += ours >= best * (1 - within) if more else ours <= best * (1 + within)
    return f"{count} of {all_}"


def by_policy(study: Study, kernel: str, replicas: list[int]) -> pd.DataFrame:
    """Each policy over all kinds of traffic to so many replicas."""
    rows = study.rows[(study.rows["kernel"] == kernel) & study.rows["replicas"].isin(replicas)]
    base = rows[rows["side"] == "round-robin"].set_index(["cell", "replicas"])["ttft_p99_s"]
    made = []
    for side, group in rows.groupby("side", sort=False):
        ratio = group.set_index(["cell", "replicas"])["ttft_p99_s"] / base
        made.append(
            {
                "policy": side,
                "attained": f"{group['attainment'].mean():.1%}",
                "least": f"{group['attainment'].min():.1%}",
                "TTFT p99 / round-robin's": f"{np.exp(np.log(ratio).mean()):.2f}",
                "goodput/s of a replica": f"{(group['goodput'] / group['replicas']).mean():.2f}",
                "prompts cached": f"{group['cached'].mean():.0%}",
                "GB fetched by a replica": f"{(group['bytes_fetched'] / group['replicas']).mean() / 1e9:.2f}",
                "GB from the host": f"{(group['bytes_in'] / group['replicas']).mean() / 1e9:.2f}",
                "adapters stored, most": f"{group['adapters_most'].mean():.0f}",
            }
        )
    return pd.DataFrame(made)


def predictions(study: Study) -> pd.DataFrame:
    """What the simulator said, and what was measured, in milliseconds; the error in brackets."""
    made = []
    for route, group in study.rows.groupby("cell", sort=False):
        sides = group.set_index("side")
        row = {"policy": route, "requests": f"{_value(sides, 'measured', 'requests'):.0f}"}
        for key in ("ttft_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_s", "tpot_p99_s"):
            said, was = (1e3 * _value(sides, side, key) for side in ("predicted", "measured"))
            title = key.removesuffix("_s").replace("_", " ").replace("ttft", "TTFT").replace("tpot", "TPOT")
            row[title] = f"{was:.1f}, predicted {said:.1f} ({said / was - 1:+.0%})"
        made.append(row)
    return pd.DataFrame(made)


def storage(study: Study, replicas: int, kernel: str = "padded") -> pd.DataFrame:
    """Adapters of the fullest host, and gigabytes fetched by all, by policy and traffic."""
    rows = study.rows[(study.rows["kernel"] == kernel) & (study.rows["replicas"] == replicas)]
    text = rows["adapters_most"].map("{:.0f}".format) + ", " + (rows["bytes_fetched"] / 1e9).map("{:.1f} GB".format)
    made = rows.assign(text=text).pivot(index="side", columns="cell", values="text")
    return made.loc[rows["side"].unique(), rows["cell"].unique()].rename_axis(columns=None).reset_index(names="policy")


def _best(sides: pd.DataFrame, key: str) -> tuple[str, float]:
    baselines = sides[~sides.index.isin(OURS)][key]
    name = baselines.idxmax() if MEASURES[key] else baselines.idxmin()
    return str(name), _value(sides, str(name), key)


def _value(sides: pd.DataFrame, side: str, key: str) -> float:
    """One number; NaN for a side that is not there."""
    return float(sides[key].to_dict().get(side, math.nan))
