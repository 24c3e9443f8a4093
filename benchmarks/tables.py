"""Tables of the pages: records in, rows of text out."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from benchmarks.records import Study, averaged, control, median, ratios, steady, told
from benchmarks.studies.caraserve import CASES

SKEW = ("off", "auto", "merged")  # sides of `skew`
AUTO = ("auto", "auto, file")  # ways of starting cold that choose between the others
GAP_S = 0.1  # by which a gap may be longer than the idle server's
GAPS = {"loop_s": "loop, ms", "engine_s": "engine, ms", "tokens_s": "tokens, ms"}
PAPER = {  # cases of `arrivals` -> the paper's
    "Figure 10": ("Figure 10",),
    "Figure 13, rank 32": ("Figure 13, rank 32",),
    "Figure 13, a lower rate": ("Figure 13, 6 req/s",),
    "Figure 14, skewed": ("Figure 14, 128 adapters", "Figure 14, 512 adapters"),
}
CONTROL = (0.97, 1.03)  # a side against itself must stay inside, or the times beside it are void


def controls(rows: pd.DataFrame, sides: Iterable[str], key: str = "seconds") -> str:
    """The control of each side, and whether they void the numbers beside them."""
    known = [value for value in (control(rows, side, key) for side in sides) if not math.isnan(value)]
    void = "" if all(CONTROL[0] <= value <= CONTROL[1] for value in known) else " void"
    return " / ".join(f"{value:.3f}" for value in known) + void


def together(studies: Iterable[Study]) -> pd.DataFrame:
    """The rows of all files, those of a cell and kernel beside each other."""
    rows = pd.concat([study.rows for study in studies], ignore_index=True)
    order = rows.groupby(["cell", "kernel"], sort=False).ngroup()
    return rows.loc[order.sort_values(kind="stable").index]


def once(study: Study, side: str) -> dict[str, Any]:
    """What was measured once, beside the rounds; {} if it was not."""
    rows = study.rows
    found = rows[(rows["cell"] == "once") & (rows["side"] == side)]
    return found.iloc[0].dropna().to_dict() if len(found) else {}


def outputs(found: dict[str, Any]) -> str:
    """How many outputs were equal."""
    if not found:
        return ""
    more = "".join(f", {found[key]:.0f} {key}" for key in ("ties", "different") if found[key])
    return f"{found['equal']:.0f} of {found['requests']:.0f} equal{more}"


def throughput(studies: Sequence[Study]) -> pd.DataFrame:
    """R1: tokens per second of both sides."""
    made = []
    for study in studies:
        rows, tokens = study.rows[study.rows["cell"] == "rounds"], study.settings["output_tokens"]
        rate = tokens / median(rows, ["side"])["seconds"]
        row = {"dtype": study.settings["dtype"], "jlora tok/s": f"{rate['jlora']:.1f}"}
        if grpc := once(study, "jlora over gRPC"):
            row["over gRPC"] = f"{tokens / grpc['seconds']:.1f}"
        if "peft" in rate:
            known = once(study, "peft, clairvoyant")["seconds"]
            row["PEFT tok/s"] = f"{rate['peft']:.1f}"
            row["ratio"] = told(ratios(rows, "peft", "jlora", "seconds"))
            row["to clairvoyant PEFT"] = f"{known * rate['jlora'] / tokens:.2f}"
        row["control"] = controls(rows, rate.index)
        made.append({**row, "rounds": rows["round"].nunique(), "outputs": outputs(once(study, "outputs"))})
    return pd.DataFrame(made).fillna("")


def latency(studies: Sequence[Study]) -> pd.DataFrame:
    """R1b: prefill and decode of one request, against the peer's faster way."""
    made = []
    for study in studies:
        rows = study.rows[study.rows["cell"] == "rounds"]
        middle = median(rows, ["side"])
        for side in (side for side in middle.index if side.startswith("jlora ")):
            case = side.removeprefix("jlora ")
            for key, what in (("prefill_s", "prefill"), ("step_s", "decode, per token")):
                row = {"dtype": study.settings["dtype"], "case, prompt": case, "what": what}
                row["jlora ms"] = f"{1e3 * middle[key][side]:.1f}"
                ways = [f"{how} {case}" for how in ("generate", "loop") if f"{how} {case}" in middle.index]
                best = min(ways, key=middle[key].get, default="")
                if best:
                    row["PyTorch ms"] = f"{1e3 * middle[key][best]:.1f} ({best.partition(' ')[0]})"
                    row["ratio"] = told(ratios(rows, best, side, key))
                made.append({**row, "control": controls(rows, filter(None, (side, best)), key)})
    return pd.DataFrame(made)


def compare(study: Study) -> pd.DataFrame:
    """Two commits: milliseconds of everything timed, and how many times as fast the new one is."""
    made = []
    for name, rows in study.rows.groupby("cell", sort=False):
        ms = 1e3 * median(rows, ["side"]).dropna(axis="columns")
        for key in ms.columns:
            row = {"study": name, "what": key} | {side: f"{ms[key][side]:.4g}" for side in ("old", "new")}
            row["old / new"] = told(ratios(rows, "old", "new", key))
            made.append({**row, "control": controls(rows, ("old", "new"), key)})
    return pd.DataFrame(made)


def startup(study: Study) -> pd.DataFrame:
    """Seconds of a start at two commits, medians over the rounds: until ready, by phase, and with every program."""
    middle, made = median(study.rows, ["side"]), []
    for start in ("cached", "cold"):
        for side in ("old", "new"):
            told_s = {what: middle[key][side] for what, key in _start_columns(start).items() if key in middle}
            row = {"start": start, "commit": study.settings[side]}
            row |= {what: "" if math.isnan(seconds) else f"{seconds:.1f}" for what, seconds in told_s.items()}
            row["old / new"] = told(ratios(study.rows, "old", "new", f"{start} seconds")) if side == "new" else ""
            made.append({**row, "control": controls(study.rows, [side], f"{start} seconds")})
    return pd.DataFrame(made)


def _start_columns(start: str) -> dict[str, str]:
    phases = {phase: f"{start} {phase}_s" for phase in ("process", "adapters", "weights", "programs", "rest")}
    return {"ready": f"{start} seconds", **phases, "all programs": f"{start} all_compiled_s"}


def cache(study: Study, side: str) -> pd.DataFrame:
    """Microseconds, median (99th percentile), of the round with the lowest median."""
    rows = study.rows[study.rows["side"] == side]
    keys = ["policy", "block_tokens", "nodes", "adapters"] if side == "tree" else ["running", "queued", "registered"]
    names = [name.removesuffix(" median") for name in rows.columns if name.endswith(" median")]
    made = []
    for key, group in rows.groupby(keys, sort=False):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        for name in names:
            if group[f"{name} median"].notna().any():
                best = group.loc[group[f"{name} median"].idxmin()]
                row[name] = f"{best[f'{name} median']:.3g} ({best[f'{name} p99']:.3g})"
        if side == "tree":
            row["bytes per node"] = f"{group['bytes_per_node'].median():.0f}"
        made.append(row)
    found = pd.DataFrame(made).fillna("")
    numbers = [key for key in keys if key != "policy"]
    return found.astype(dict.fromkeys(numbers, int))


def cells(study: Study, others: Sequence[str]) -> pd.DataFrame:
    """Simulated: `jlora`'s TTFT at the rates of each cell, and the others' over it."""
    rows, made = study.rows[study.rows["kind"] == "cell"], []
    for cell, rates in rows[rows["side"] == "anchors"].set_index("cell")["rates"].items():
        mine = rows[rows["cell"] == cell]
        by = {side: mine[mine["side"] == side].set_index("rate")["ttft_s"] for side in ("jlora", *others)}
        shown = [rate for rate in rates if rate in by["jlora"].index]
        row = {"cell": cell, "requests/s": ", ".join(f"{rate:g}" for rate in shown)}
        row["jlora ms"] = ", ".join(f"{1e3 * by['jlora'][rate]:.0f}" for rate in shown)
        for other in others:
            known = [rate for rate in shown if rate in by[other].index]
            row[other] = ", ".join(f"{by[other][rate] / by['jlora'][rate]:.2f}" for rate in known)
        made.append(row)
    return pd.DataFrame(made)


def worst_start(study: Study, way: str) -> str:
    """The most that a way of starting adds to the first token of a case, over all adapters on the device."""
    ttft = study.rows[study.rows["kind"] == "figure"].pivot(index="cell", columns="side", values="ttft_s")
    return f"{100 * (ttft[way] / ttft['cached'] - 1).max():.0f} %"


def cold_borders(study: Study) -> pd.DataFrame:
    """The longest prompt of the map for which `cpu` brings the first token soonest, by chip, rank and link."""
    rows = study.rows[study.rows["kind"] == "map"]
    soonest = rows[["wait", "stream", "cpu"]].astype(float).idxmin(axis=1)
    wins = rows[soonest == "cpu"]
    most = wins.pivot_table(index=["chip", "rank"], columns="gbps", values="prompt", aggfunc="max")
    every = pd.MultiIndex.from_frame(rows[["chip", "rank"]].drop_duplicates())
    most = most.reindex(index=every, columns=sorted(rows["gbps"].unique()))
    told = most.map(lambda prompt: "never" if math.isnan(prompt) else f"{prompt:.0f}").reset_index()
    told.columns = [f"{name:g} GB/s" if isinstance(name, float) else str(name) for name in told.columns]
    return told.assign(rank=told["rank"].astype(int))


def from_disk(study: Study, rank: int, gbps: float) -> pd.DataFrame:
    """First tokens of `stream` and `cpu` over `wait`'s, by chip, prompt and where the adapter is."""
    rows, made = study.rows[(study.rows["rank"] == rank) & (study.rows["gbps"] == gbps)], []
    rows = rows.assign(mbps=rows["mbps"].fillna(math.inf)).sort_values("mbps", ascending=False, kind="stable")
    for (chip, prompt), group in rows.groupby(["chip", "prompt"], sort=False):
        row = {"chip": chip, "prompt": f"{prompt:.0f}"}
        for place in group.to_dict("records"):
            over = " / ".join(f"{place[way] / place['wait']:.2f}" for way in ("stream", "cpu"))
            if place["mbps"] == math.inf:
                row["host memory"] = over
            else:
                row[f"disk, {place['mbps']:g} MB/s (read, ms)"] = f"{over} ({1e3 * place['read_s']:.0f})"
        made.append(row)
    return pd.DataFrame(made)


def most_saved(study: Study, mbps: float, gbps: float) -> str:
    """The most of waiting's first token that the soonest way saves, from that disk over links of at least `gbps`."""
    rows = study.rows[(study.rows["mbps"] == mbps) & (study.rows["gbps"] >= gbps)]
    return f"{100 * (1 - rows[['wait', 'stream', 'cpu']].min(axis=1) / rows['wait']).max():.0f} %"


def step_noise(study: Study) -> str:
    """Median and 90th percentile between the least of a step's even and odd rounds."""
    rows = study.rows[(study.rows["cell"] == "quality") & (study.rows["side"] == "noise")]
    return ", ".join(f"{row['median']:.1%} / {row['p90']:.1%} ({row['set']})" for row in rows.to_dict("records"))


def step_verdict(study: Study) -> str:
    """Ours against the targets: R² of the fit; errors on steps that it has not seen."""
    rows = study.rows[(study.rows["cell"] == "quality") & (study.rows["kind"] == "all")]
    ours = rows[rows["form"] == "ours"].set_index("set")
    r2, median_, p90 = ours.loc["fit", "r2"], ours.loc["held", "median"], ours.loc["held", "p90"]
    met = r2 >= 0.96 and median_ <= 0.05 and p90 <= 0.15
    return f"R² {r2:.3f}; on unseen steps {median_:.1%} in the median and {p90:.1%} at the 90th percentile: " + (
        "met" if met else "missed"
    )


def switches(study: Study) -> pd.DataFrame:
    """Milliseconds of a switch and of steps, medians over the rounds."""
    made = []
    for cell, rows in study.rows[study.rows["side"] != "serving"].groupby("cell", sort=False):
        middle = median(rows, ["side"])
        switch = middle.loc["switch"]
        row = {"adapter": cell}
        for key, name in (("merge_s", "merge"), ("unmerge_s", "unmerge"), ("proof_s", "proof"), ("longest_s", "piece")):
            row[f"{name} ms"] = f"{1e3 * switch[key]:.1f}"
        if "longest_probe_s" in switch:  # older files lack it
            row["probe ms"] = f"{1e3 * switch['longest_probe_s']:.1f} of {1e3 * switch['measure_s']:.1f}"
        row["host MB"] = f"{switch['host_bytes'] / 1e6:.1f}"
        row |= {f"{side} step ms": f"{1e3 * middle.loc[side, 'seconds']:.1f}" for side in ("unmerged", "merged")}
        row["unmerged / merged"] = told(ratios(rows, "unmerged", "merged", "seconds"))
        made.append({**row, "control": controls(rows, ("unmerged", "merged"))})
    return pd.DataFrame(made)


def switching(study: Study) -> pd.DataFrame:
    """A full batch's steps while its adapter is merged and taken out: the slowest of each kind over a usual one."""
    made = []
    for cell, rows in study.rows[study.rows["side"] == "serving"].groupby("cell", sort=False):
        row = {"adapter": str(cell).partition(",")[0], "usual step ms": f"{1e3 * rows['unmerged_step_s'].median():.1f}"}
        for kind, name in (("unmerged", "of no switch"), ("merge", "of a merge"), ("unmerge", "of taking out")):
            row[f"slowest {name}"] = told(rows[f"{kind}_longest_s"] / rows["unmerged_step_s"])
        made.append(row)
    return pd.DataFrame(made)


def host(study: Study) -> tuple[float, float]:
    """Microseconds of host time in a decode step: the fixed part, and each sequence's; by the ends of the range."""
    rows = study.rows[study.rows["side"].str.fullmatch(r"\d+ running, 0 queued")]
    times = 1e6 * rows.groupby("running")["step_s"].median()
    slope = (times.iloc[-1] - times.iloc[0]) / (times.index[-1] - times.index[0])
    return times.iloc[0] - slope * times.index[0], slope


def host_rows(study: Study, device: bool) -> pd.DataFrame:
    """The rows with or without a device whose steps take a while."""
    return study.rows[study.rows["side"].str.contains("device") == device]


def hidden(study: Study) -> pd.DataFrame:
    """Microseconds per step, round by round: of the host without a device and with it, and of the device waiting."""
    made, alone = [], host_rows(study, device=False)
    for side, rows in host_rows(study, device=True).groupby("side", sort=False):
        same = alone[alone["side"] == str(side).rpartition(", ")[0]]
        row = {"": side, "the host without a device": same["step_s"], "the host": rows["step_s"]}
        row["the device waits"] = rows["idle_s"]
        made.append({key: one if key == "" else ", ".join(f"{1e6 * s:.0f}" for s in one) for key, one in row.items()})
    return pd.DataFrame(made)


def skew(study: Study) -> pd.DataFrame:
    """Latency per token by skew, merged and not."""
    made = []
    for cell, rows in study.rows.groupby("cell", sort=False):
        middle = median(rows, ["side"])
        rank, hot = cell.split(", ")
        row = {"adapters": rank, "hottest": hot}
        row |= {
            side: f"{1e3 * middle.loc[side, 'mean_s']:.1f} / {1e3 * middle.loc[side, 'p90_s']:.1f}" for side in SKEW
        }
        pairs = []
        for side in SKEW[::2]:
            kept = steady(rows, side, "auto")
            for what in ("mean", "p90"):
                row[f"{side} / auto, {what}"] = averaged(ratios(kept, side, "auto", f"{what}_s"))
            found = ratios(rows, side, "auto", "mean_s")
            row[f"{side} / auto, all"] = averaged(found)
            pairs.append(f"{len(ratios(kept, side, 'auto', 'mean_s'))} of {len(found)}")
        row["steady"] = " / ".join(pairs)
        worst = rows.groupby("side")["others_queue_s"].max()
        row["wait s"] = " / ".join(f"{worst[side]:.2f}" for side in SKEW)
        row["switches"] = " / ".join(f"{middle.loc[side, 'switches']:.0f}" for side in SKEW[1:])
        made.append(row)
    return pd.DataFrame(made)


def merges_by_skew(study: Study) -> dict[str, Any]:
    """Where `auto` has switched and what that gained, and what its decisions cost.

    Returns:
        merged: `off` over `auto`, as told, by the cell's name; "" without a steady pair. pairs, ratio: of all other
        cells. decide_us, decide_share: of a step, the median and the largest share. always: means of `merged` over
        `auto` by the cell's name, where others ask and where nobody else does.
    """
    rows = study.rows
    switched = set(rows[(rows["side"] == "auto") & (rows["switches"] > 0)]["cell"])
    by_side = {
        side: {
            cell: ratios(steady(found, side, "auto"), side, "auto", "mean_s")
            for cell, found in rows.groupby("cell", sort=False)
        }
        for side in SKEW[::2]
    }
    others = pd.concat([found for cell, found in by_side["off"].items() if cell not in switched] or [pd.Series()])
    auto = rows[rows["side"] == "auto"]
    always: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for cell, found in by_side["merged"].items():
        if not found.empty:
            always[cell.endswith(", 1")][cell] = statistics.geometric_mean(found)
    return {
        "merged": {cell: averaged(found) for cell, found in by_side["off"].items() if cell in switched},
        "pairs": len(others),
        "ratio": averaged(others),
        "decide_us": 1e6 * auto["decide_s"].median(),
        "decide_share": (auto["decide_s"] * auto["steps"] / auto["seconds"]).max(),
        "always": (always[False], always[True]),
    }


def cold(study: Study) -> pd.DataFrame:
    """Seconds to the first token: of waiting, and of each way over waiting in the same round."""
    made = []
    for cell, rows in study.rows.groupby("cell", sort=False):
        ttft = rows.pivot(index="round", columns="side", values="ttft_s")
        over = ttft.div(ttft["wait"], axis=0).median()
        row = {"case": cell, "wait, ms": f"{1e3 * ttft['wait'].median():.0f}"}
        row |= {way: f"{over[way]:.2f}" for way in ("stream", "cpu", *AUTO)}
        for way in AUTO:
            picked = rows.loc[rows["side"] == way, "kinds"]
            row[f"{way} picked"] = ", ".join(sorted({kind for kinds in picked for kind in kinds}))
        made.append(row)
    return pd.DataFrame(made)


def cold_error(study: Study) -> pd.DataFrame:
    """What was predicted beside what was measured, for single requests, by how they started."""
    rows, made = study.rows[study.rows["kinds"].map(lambda kinds: list(kinds.values()) == [1])], []
    started = rows["side"].where(~rows["side"].isin(AUTO), rows["side"] + " → " + rows["kinds"].map(min))
    for way, group in rows.groupby(started, sort=False):
        row = {"way": way, "runs": len(group)}
        for costs, key in (("rehearsed", "rehearsed_s"), ("file", "file_s")):
            error = (group[key] / group["ttft_s"] - 1).dropna()
            told = [error.abs().median(), error.abs().quantile(0.9)]
            row[f"{costs}: median"], row["p90" + " " * (costs == "file")] = (
                f"{value:.0%}" if len(error) else "" for value in told
            )
            row["bias" + " " * (costs == "file")] = f"{error.median():+.0%}" if len(error) else ""
        made.append(row)
    return pd.DataFrame(made)


def cold_regret(study: Study, way: str) -> str:
    """A way that picks over the fastest fixed way of each case: median and worst."""
    middle = study.rows.pivot_table(index="cell", columns="side", values="ttft_s", aggfunc="median")
    over = middle[way] / middle[["wait", "stream", "cpu"]].min(axis=1)
    return f"{over.median():.2f} in the median and {over.max():.2f} at worst"


def exchange(study: Study) -> pd.DataFrame:
    """Microseconds of an empty exchange by form: the median of the rounds and their best; each over `programs`."""
    made = []
    for cell, rows in study.rows.groupby("cell", sort=False):
        forms, row = list(dict.fromkeys(rows["side"])), {"tokens x width": cell}
        for form in forms:
            took = 1e6 * rows.loc[rows["side"] == form, "seconds"]
            row[f"{form}, µs"] = f"{took.median():.0f} ({took.min():.0f})"
        row |= {f"{form} / programs": told(ratios(rows, form, "programs", "seconds")) for form in forms[1:]}
        made.append({**row, "control": controls(rows, forms)})
    return pd.DataFrame(made)


def arrivals(study: Study, key: str) -> pd.DataFrame:
    """Each side over `cached` in the same round, the medians of the rounds; milliseconds of `cached`.

    Beside first tokens: the paper's mean ones on demand and with the CPU's help, over all adapters cached.
    """
    made, paper = [], {case.name: case.paper for case in CASES}
    for cell, rows in study.rows.groupby("cell", sort=False):
        row = {"case": cell, "cached, ms": f"{1e3 * rows.loc[rows['side'] == 'cached', key].median():.0f}"}
        others = [side for side in rows["side"].unique() if side != "cached"]
        row |= {side: told(ratios(rows, side, "cached", key)) for side in others}
        if key == "ttft_s":
            increases = zip(*(paper[name] for name in PAPER.get(str(cell), ())), strict=True)
            told_there = [", ".join(f"{1 + increase:.2f}" for increase in way) for way in increases] or ["", ""]
            row |= zip(("paper: on demand", "paper: CPU"), told_there, strict=True)
        made.append({**row, "control": controls(rows, ["cached"], key)})
    return pd.DataFrame(made)


def arrivals_worst(study: Study, side: str, key: str) -> str:
    """The most of the cases' medians that a side takes over `cached`."""
    rows = study.rows.groupby("cell", sort=False)
    return f"{max(ratios(some, side, 'cached', key).median() for _, some in rows):.2f}"


def beside(study: Study) -> pd.DataFrame:
    """Milliseconds per token of requests beside loads, by where the adapters come from, and over `hot` by round."""
    rows, made = study.rows[study.rows["cell"] == "neighbours"], []
    over = {"over hot": "tpot_s", "the slowest over hot's slowest": "slowest_tpot_s"}
    for side, some in rows.groupby("side", sort=False):
        row = {"the adapter comes from": "the device (hot)" if side == "hot" else side}
        row["ms per token of the others"] = f"{1e3 * some['tpot_s'].median():.1f}"
        for name, key in over.items():
            if key in rows:  # older files lack the slowest
                found = ratios(rows, str(side), "hot", key)
                row[name] = f"{found.median():.3f} ({found.min():.3f}–{found.max():.3f})"
        made.append({**row, "first token of the cold request, ms": f"{1e3 * some['ttft_s'].median():.0f}"})
    return pd.DataFrame(made)


def faults(study: Study) -> pd.DataFrame:
    """The last run of each fault: how often it was injected, and what was found."""
    last = study.rows.groupby("cell", sort=False).tail(1)
    made = []
    for row in sorted(last.to_dict("records"), key=lambda row: int(row["cell"][1:].partition("-")[0])):
        known = ("cell", "side", "round", "injected", "holds")
        figures = {key: value for key, value in row.items() if key not in known and value == value and value != ""}
        found = "; ".join(f"{key.replace('_', ' ')} {_figure(value)}" for key, value in figures.items())
        made.append({"fault": row["cell"], "injected": f"{row['injected']:,.0f}", "found": found, "": row["side"]})
    return pd.DataFrame(made)


def _figure(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if value % 1 else f"{value:,.0f}"


def gaps(study: Study, cell: str) -> pd.DataFrame:
    """The longest gaps of each attack over the rounds, and those that are too long."""
    longest: dict[str, dict[str, float]] = {}
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in study.rows.to_dict("records"):
        if row["cell"] == cell:
            seen = longest.setdefault(row["side"], dict.fromkeys(GAPS, 0.0))
            seen.update({key: max(seen[key], row[key]) for key in GAPS})
            answers[row["side"]].update(row["answers"])
    idle = [seen for side, seen in longest.items() if side.startswith("idle")]
    limits = {key: max(seen[key] for seen in idle) + GAP_S for key in GAPS}
    made = []
    for side, seen in longest.items():
        shown = {title: f"{1e3 * seen[key]:.0f}" for key, title in GAPS.items()}
        over = ", ".join(title.partition(",")[0] for key, title in GAPS.items() if seen[key] > limits[key])
        made.append({"": side, "answers": _ends(answers[side]), **shown, "beyond the limit": over})
    return pd.DataFrame(made)


def compiling(study: Study) -> pd.DataFrame:
    """The longest gaps of every round while programs compile, and after."""
    made = []
    for row in study.rows.to_dict("records"):
        facts = {"round": row["round"] + 1, "": row["side"], "programs": row["programs"] or ""}
        gaps = {title: f"{1e3 * row[key]:.0f}" for key, title in GAPS.items()}
        made.append({**facts, "seconds": f"{row['seconds']:.0f}", **gaps})
    return pd.DataFrame(made)


def gaps_verdict(study: Study) -> str:
    """Which attacks keep somebody waiting for too long."""
    attacks = [row for row in gaps(study, "attacks").to_dict("records") if not row[""].startswith("idle")]
    over = [f"{row['']} ({row['beyond the limit']})" for row in attacks if row["beyond the limit"]]
    return (
        f"Under {len(attacks) - len(over)} of {len(attacks)} attacks, no gap is longer than the idle server's by more "
        f"than 100 ms." + (f" Beyond the limit: {'; '.join(over)}." if over else "")
    )


def _ends(ends: Counter[str]) -> str:
    return ", ".join(f"{count:,} {status.replace('_', ' ')}" for status, count in ends.items()) or "none"
