"""Tables of the pages: records in, rows of text out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.records import Study, control, median, ratios, told

WAYS = ("blocking", "wait", "stream", "cpu")  # of starting cold
AUTO = ("auto", "auto, file")  # and of choosing between them
CONTROL = (0.97, 1.03)  # a side against itself must stay inside, or the times beside it are void


def controls(*values: float) -> str:
    """Controls, and whether they void the numbers beside them."""
    known = [value for value in values if not math.isnan(value)]
    void = "" if all(CONTROL[0] <= value <= CONTROL[1] for value in known) else " void"
    return " / ".join(f"{value:.3f}" for value in known) + void


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
        row["control"] = controls(*(control(rows, side, "seconds") for side in rate.index))
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
                found = [control(rows, name, key) for name in (side, best) if name]
                made.append({**row, "control": controls(*found)})
    return pd.DataFrame(made)


def llama(study: Study) -> pd.DataFrame:
    """R2: tokens per second of both servers."""
    rows, made = study.rows[study.rows["cell"] == "rounds"], []
    for case, name in (("clients", "one client per adapter"), ("alone", "one client")):
        rate = study.settings["output_tokens"][case] / median(rows, ["side"])["seconds"]
        sides = [side for side in (f"jlora {case}", f"llama.cpp {case}") if side in rate]
        row = {"clients": name} | {f"{side.removesuffix(f' {case}')} tok/s": f"{rate[side]:.1f}" for side in sides}
        if len(sides) == 2:
            row["ratio"] = told(ratios(rows, sides[1], sides[0], "seconds"))
        row["control"] = controls(*(control(rows, side, "seconds") for side in sides))
        made.append({**row, "outputs": outputs(once(study, f"outputs {case}"))})
    return pd.DataFrame(made)


def compare(study: Study) -> pd.DataFrame:
    """Two commits: milliseconds of everything timed, and how many times as fast the new one is."""
    made = []
    for name, rows in study.rows.groupby("cell", sort=False):
        ms = 1e3 * median(rows, ["side"]).dropna(axis="columns")
        for key in ms.columns:
            row = {"study": name, "what": key} | {side: f"{ms[key][side]:.4g}" for side in ("old", "new")}
            row["old / new"] = told(ratios(rows, "old", "new", key))
            made.append({**row, "control": controls(*(control(rows, side, key) for side in ("old", "new")))})
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
            made.append({**row, "control": controls(control(study.rows, side, f"{start} seconds"))})
    return pd.DataFrame(made)


def _start_columns(start: str) -> dict[str, str]:
    phases = {phase: f"{start} {phase}_s" for phase in ("process", "adapters", "weights", "programs", "rest")}
    return {"ready": f"{start} seconds", **phases, "all programs": f"{start} all_compiled_s"}


def host(study: Study) -> pd.DataFrame:
    """Microseconds of Python per engine step."""
    middle = median(study.rows, ["running", "queued"])["step_s"].reset_index()
    middle["µs per step"] = (1e6 * middle.pop("step_s")).map("{:.0f}".format)
    return middle.astype({"running": int, "queued": int})


def fronts(study: Study) -> pd.DataFrame:
    """Microseconds of the server's processor time per token by front, and the ratio to gRPC's in the same round."""
    middle = median(study.rows, ["side"]).loc[["grpc", "http"]].reset_index()
    middle["µs per token"] = (1e6 * middle.pop("cpu_s_per_token")).map("{:.0f}".format)
    middle["deltas per token"] = middle.pop("deltas_per_token").map("{:.2f}".format)
    middle["over gRPC"] = ["1", told(ratios(study.rows, "http", "grpc", "cpu_s_per_token"))]
    middle["control"] = [told(ratios(study.rows, "control", "grpc", "cpu_s_per_token")), ""]
    return middle.rename(columns={"side": "front"})


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


def lora(studies: Sequence[Study]) -> pd.DataFrame:
    """Milliseconds of a layer by blocks, dense and without adapters."""
    made = []
    for study in studies:
        for cell, rows in study.rows.groupby("cell", sort=False):
            ms = 1e3 * median(rows, ["side"])["seconds"]
            row = {"dtype": study.settings["dtype"], "tokens, adapters in the batch of registered": cell}
            row |= {side: f"{ms[side]:.2f}" for side in ("base", "blocks", "dense")}
            row["dense / blocks"] = told(ratios(rows, "dense", "blocks", "seconds"))
            made.append({**row, "control": controls(*(control(rows, s, "seconds") for s in ("blocks", "dense")))})
    return pd.DataFrame(made)


GAINS = {
    "pipeline": "seconds",
    "check, end to end": "check_end_to_end_s",
    "TTFT": "check_ttft_s",
    "prefill": "check_prefill_s",
    "decode": "check_decode_s",
}


def alora(study: Study) -> pd.DataFrame:
    """Times as fast as the same adapters as plain LoRAs, and what both sides keep and find."""
    made = []
    for cell, rows in study.rows.groupby("cell", sort=False):
        middle = median(rows, ["side"])
        row = {"context, adapters": cell}
        row |= {name: told(ratios(rows, "lora", "activated", key)) for name, key in GAINS.items()}
        row["hit rate"] = " / ".join(f"{middle['check_hit_rate'][side]:.3f}" for side in ("activated", "lora"))
        made.append({**row, "control": controls(*(control(rows, s, "seconds") for s in ("activated", "lora")))})
    return pd.DataFrame(made)


def against(study: Study, others: Sequence[str]) -> pd.DataFrame:
    """Simulated: TTFT and TPOT of `others` over `jlora`'s, geometric means over all shared rates of all cells."""
    rows = study.rows[(study.rows["kind"] == "cell") & (study.rows["side"] != "anchors")]
    ours = rows[rows["side"] == "jlora"].set_index(["cell", "rate"])
    made = []
    for other in others:
        theirs = rows[rows["side"] == other].set_index(["cell", "rate"])
        both = ours.merge(theirs, left_index=True, right_index=True, suffixes=("", " other"))
        ttft = both["ttft_s other"] / both["ttft_s"]
        row = {"policy": other, "points": len(both), "TTFT": f"{np.exp(np.log(ttft).mean()):.2f}"}
        row["TPOT"] = f"{np.exp(np.log(both['tpot_s other'] / both['tpot_s']).mean()):.2f}"
        row |= {"lowest TTFT": f"{ttft.min():.2f}", "median": f"{ttft.median():.2f}", "highest": f"{ttft.max():.2f}"}
        made.append(row | {"faster than jlora by 2 %": int((ttft < 0.98).sum())})
    return pd.DataFrame(made)


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


def cold_starts(study: Study) -> pd.DataFrame:
    """CaraServe's figures: mean TTFT over that of adapters that are all on the device, beside the paper's."""
    made = []
    for case, group in study.rows[study.rows["kind"] == "figure"].groupby("cell", sort=False):
        ttft, tpot = (group.set_index("side")[key].astype(float) for key in ("ttft_s", "tpot_s"))
        paper = group["paper"].iloc[0]
        row = {"case": case, "cached ms": f"{1e3 * ttft['cached']:.0f}"}
        row |= {
            side: f"{ttft[side] / ttft['cached'] - 1:+.0%}" for side in ("blocking", "wait", "stream", "cpu", "auto")
        }
        row |= {"paper: on demand": f"{paper[0]:+.0%}", "paper: CPU": f"{paper[1]:+.0%}"}
        made.append({**row, "blocking TPOT": f"{tpot['blocking'] / tpot['cached'] - 1:+.0%}"})
    return pd.DataFrame(made)


def cold_borders(study: Study) -> pd.DataFrame:
    """The longest prompt of the map for which `cpu` brings the first token soonest, by chip, rank and link."""
    rows = study.rows[study.rows["kind"] == "map"]
    soonest = rows[["wait", "stream", "cpu"]].astype(float).idxmin(axis=1)
    wins = rows[soonest == "cpu"]
    most = wins.pivot_table(index=["chip", "rank"], columns="gbps", values="prompt", aggfunc="max")
    most = most.reindex(columns=sorted(rows["gbps"].unique()))
    told = most.map(lambda prompt: "never" if math.isnan(prompt) else f"{prompt:.0f}").reset_index()
    told.columns = [f"{name:g} GB/s" if isinstance(name, float) else str(name) for name in told.columns]
    return told.assign(rank=told["rank"].astype(int))


def step_quality(study: Study) -> pd.DataFrame:
    """R² and errors of every form of a step model, by kind of step; `held` no fit has seen."""
    made = []
    for row in study.rows[study.rows["cell"] == "quality"].to_dict("records"):
        if row["form"] != "noise":
            words = {"form": row["form"], "steps": f"{row['kind']}, {row['set']}", "count": f"{row['steps']:.0f}"}
            made.append(
                {**words, "R²": f"{row['r2']:.3f}", "error": f"{row['median']:.1%}", "p90": f"{row['p90']:.1%}"}
            )
    return pd.DataFrame(made)


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
    for cell, rows in study.rows.groupby("cell", sort=False):
        middle = median(rows, ["side"])
        switch = middle.loc["switch"]
        row = {"adapter": cell}
        for key, name in (("merge_s", "merge"), ("unmerge_s", "unmerge"), ("proof_s", "proof"), ("longest_s", "piece")):
            row[f"{name} ms"] = f"{1e3 * switch[key]:.1f}"
        row["host MB"] = f"{switch['host_bytes'] / 1e6:.1f}"
        row |= {f"{side} step ms": f"{1e3 * middle.loc[side, 'seconds']:.1f}" for side in ("unmerged", "merged")}
        row["unmerged / merged"] = told(ratios(rows, "unmerged", "merged", "seconds"))
        made.append({**row, "control": controls(*(control(rows, side, "seconds") for side in ("unmerged", "merged")))})
    return pd.DataFrame(made)


def price(studies: Sequence[Study]) -> pd.DataFrame:
    """A step with adapters over the same step without, in the same round."""
    made = []
    for study in studies:
        for cell, rows in study.rows.groupby("cell", sort=False):
            base = rows[rows["side"] == "base"]["seconds"].median()
            row = {"dtype": study.settings["dtype"], "step": cell, "base ms": f"{1e3 * base:.1f}"}
            sides = [side for side in study.rows["side"].unique() if side != "base"]
            for side in sides:
                over = ratios(rows, side, "base", "seconds")
                row[f"{side}, over base"] = told(over) if len(over) else ""
            made.append({**row, "control": controls(control(rows, "base", "seconds"))})
    return pd.DataFrame(made)


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


def tiers(study: Study) -> pd.DataFrame:
    """Of `benchmarks/micro/tiers.py`: the first token by rank, tier and disk."""
    rows = study.rows[study.rows["cell"] != "neighbours"].copy()
    rows[["adapter", "disk"]] = rows["cell"].str.split(", ", n=1, expand=True)
    rows["disk"] = rows["disk"].where(rows["side"] == "DISK", "")
    found = rows.groupby(["adapter", "side", "disk"], sort=False)
    made = found["ttft_s"].quantile([0.5, 0.9]).unstack() * 1e3
    made["waited"] = found["cold_start_s"].median() * 1e3
    made = made.round(1).reset_index()
    made.columns = ["adapter", "tier", "disk", "first token, ms (median)", "p90", "of it waiting for the adapter"]
    return made


def neighbours(study: Study) -> pd.DataFrame:
    """Of `benchmarks/micro/tiers.py`: time per token beside loads, over that beside warm requests."""
    rows = study.rows[study.rows["cell"] == "neighbours"]
    by_round = rows.pivot(index="round", columns="side", values="tpot_s")
    over = by_round.div(by_round["hot"], axis=0)
    sides = rows["side"].drop_duplicates().tolist()
    return pd.DataFrame(
        {
            "the adapter comes from": ["the device (hot)", *sides[1:]],
            "ms per token of the others": [f"{by_round[side].median() * 1e3:.1f}" for side in sides],
            "over hot": [
                f"{over[side].median():.3f} ({over[side].min():.3f}–{over[side].max():.3f})" for side in sides
            ],
            "first token of the cold request, ms": [
                f"{rows[rows['side'] == side]['ttft_s'].median() * 1e3:.0f}" for side in sides
            ],
        }
    )


def routes(study: Study, kernel: str) -> pd.DataFrame:
    """Every routing policy in every cell of one kernel; the seeds' mean."""
    rows = study.rows[study.rows["kernel"] == kernel]
    made = []
    for cell, group in rows.groupby("cell", sort=False):
        means = group.groupby("side", sort=False).mean(numeric_only=True)
        ours = means["per_token_s"].get("jlora", float("nan"))
        for side, mean in means.iterrows():
            made.append(
                {
                    "cell": cell,
                    "policy": side,
                    "ms per token": f"{1e3 * mean['per_token_s']:.1f}",
                    "p99": f"{1e3 * mean['per_token_p99_s']:.1f}",
                    "Δ": "" if side == "jlora" or math.isnan(ours) else f"{ours / mean['per_token_s'] - 1:+.1%}",
                    "attained": f"{mean['attainment']:.1%}",
                    "TTFT p99 ms": f"{1e3 * mean['ttft_p99_s']:.0f}",
                    "busiest / mean": f"{mean['imbalance']:.2f}",
                    "seeds": group["round"].nunique(),
                }
            )
    return pd.DataFrame(made)


def migrations(study: Study) -> pd.DataFrame:
    """Every way to balance replicas in every case."""
    made = []
    for (cell, side), group in study.rows.groupby(["cell", "side"], sort=False):
        mean = group.mean(numeric_only=True)
        made.append(
            {
                "case": cell,
                "side": side,
                "queue ms": f"{1e3 * mean['queue_s']:.0f}",
                "TTFT ms": f"{1e3 * mean['ttft_s']:.0f}",
                "p99": f"{1e3 * mean['ttft_p99_s']:.0f}",
                "latency per token ms": f"{1e3 * mean['latency_s']:.2f}",
                "tokens/s": f"{mean['output_tokens'] / mean['seconds']:.0f}",
                "moved": f"{mean['moved'] / mean['requests']:.1%}",
                "seeds": len(group),
            }
        )
    return pd.DataFrame(made)


def migration_cost(study: Study) -> pd.DataFrame:
    """What the solver takes beside the replicas' own seconds, on the machine of the run."""
    made = []
    for cell, group in study.rows[study.rows["side"] == "dlora"].groupby("cell", sort=False):
        total = group.sum(numeric_only=True)
        row = {"case": cell, "programs": f"{total['solves']:.0f}"}
        row["mean ms"] = f"{1e3 * total['solve_s'] / max(1, total['solves']):.0f}"
        row["longest ms"] = f"{1e3 * group['solve_longest_s'].max():.0f}"
        made.append({**row, "of the replicas' busy time": f"{total['solve_s'] / total['busy_s']:.2%}"})
    return pd.DataFrame(made)


def placements(study: Study) -> pd.DataFrame:
    """Every placement in every case."""
    made = []
    for row in study.rows.to_dict("records"):
        made.append(
            {
                "case": row["cell"],
                "side": row["side"],
                "TTFT ms": f"{1e3 * row['ttft_s']:.0f}",
                "p99": f"{1e3 * row['ttft_p99_s']:.0f}",
                "TPOT ms": f"{1e3 * row['tpot_s']:.1f}",
                "attained": f"{row['attainment']:.1%}",
                "busiest / mean": f"{row['imbalance']:.2f}",
                "adapters stored": int(row["adapters_most"]),
                "GB fetched": f"{row['bytes_fetched'] / 1e9:.1f}",
            }
        )
    return pd.DataFrame(made)
