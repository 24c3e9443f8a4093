"""Tables of the pages on what a server withstands."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.records import Study, median

GAP_S = 0.1  # by which a gap may be longer than the idle server's
GAPS = {"loop_s": "loop, ms", "engine_s": "engine, ms", "tokens_s": "tokens, ms"}


def refusals(study: Study) -> pd.DataFrame:
    """Milliseconds to a refusal, and refusals per second of a core."""
    middle = median(study.rows, ["callers"]).reset_index()
    made = middle[["callers"]].astype(int)
    for name in ("p50", "p99", "max"):
        made[f"{name} ms"] = (1e3 * middle[f"{name}_s"]).map("{:.1f}".format)
    made["per second of a core"] = middle["per_core_s"].map("{:.0f}".format)
    made["other answers"] = middle["otherwise"].astype(int)
    return made


def abuse(study: Study) -> pd.DataFrame:
    """What a good client and the server's memory see of each attack."""

    def counted(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{n:,} {what}" for what, n in counts.items())

    made = []
    for row in study.rows.to_dict("records"):
        calm, attacked = row["calm_p99_s"], row["attack_p99_s"]
        made.append({
            "attack": row["side"],
            "what it did": counted(row["attack"]),
            "calls of the good client": counted(row["calls"]),
            "p99 ms, calm": f"{1e3 * calm:.0f}",
            "p99 ms, attacked": f"{1e3 * attacked:.0f}",
            "ratio": f"{attacked / calm:.2f}",
            "MB grown": f"{row['rss_grown'] / 1e6:.0f}",
            "calls on new connections": counted(row["others"]),
        })  # fmt: skip
    return pd.DataFrame(made)


def failures(studies: Sequence[Study]) -> pd.DataFrame:
    """Goodput of both phases, what was wrong, and the pauses that clients saw, for each number of replicas."""
    made = []
    for study in sorted(studies, key=lambda study: study.rows["cell"].iloc[0]):
        sides = {side: study.rows[study.rows["side"] == f"{side} in all"].iloc[0] for side in ("clean", "killed")}
        count = int(sides["killed"]["cell"].split()[0])
        ratio = sides["killed"]["goodput"] / sides["clean"]["goodput"]
        for side, row in sides.items():
            pauses = [f"{1e3 * row[f'gap_{name}_s']:.0f}" for name in ("p50", "p99", "max")]
            made.append({
                "": f"{row['cell']}, {side}",
                "tokens per second": f"{row['goodput']:.0f}",
                "over clean (goal)": "" if side == "clean" else f"{ratio:.2f} ({0.95 * (count - 1) / count:.2f})",
                "answers": int(row["answers"]),
                "errors": int(row["errors"]),
                "wrong tokens": int(row["wrong_tokens"]),
                "longest pause of an answer, ms (p50, p99, max)": ", ".join(pauses),
            })  # fmt: skip
    return pd.DataFrame(made)


def soak(study: Study) -> pd.DataFrame:
    """The verdict, line by line."""
    rows = study.rows[study.rows["cell"] == "verdict"]
    columns = {"": rows["what"], "found": rows["value"].map("{:.4g}".format), "limit": rows["limit"].map("{:g}".format)}
    return pd.DataFrame({**columns, "holds": rows["holds"].map({True: "yes", False: "**no**"})})


def soak_parts(study: Study) -> pd.DataFrame:
    """Time to the first token in each part of the run."""
    rows = study.rows[study.rows["cell"] == "ttft"]
    times = {f"TTFT {name}, s": rows[f"{name}_s"].map("{:.2f}".format) for name in ("p50", "p99")}
    minutes = [f"{row.begin_s / 60:.1f}–{row.end_s / 60:.1f}" for row in rows.itertuples()]
    return pd.DataFrame({"minutes": minutes, "streams": rows["streams"].map("{:.0f}".format), **times})


def soak_ends(study: Study) -> str:
    """How many requests ended how."""
    rows = study.rows[study.rows["cell"] == "ends"]
    return ", ".join(f"{end} {count:,.0f}" for end, count in zip(rows["side"], rows["count"], strict=True))


def faults(study: Study) -> pd.DataFrame:
    """The last run of each fault: how often it was injected, and what was found."""
    last = study.rows.groupby("cell", sort=False).tail(1)
    made = []
    for row in sorted(last.to_dict("records"), key=lambda row: int(row["cell"][1:])):
        known = ("cell", "side", "round", "injected", "holds")
        figures = {key: value for key, value in row.items() if key not in known and value == value and value != ""}
        found = "; ".join(f"{key.replace('_', ' ')} {_told(value)}" for key, value in figures.items())
        made.append({"fault": row["cell"], "injected": f"{row['injected']:,.0f}", "found": found, "": row["side"]})
    return pd.DataFrame(made)


def _told(value: Any) -> str:
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


def gaps_verdict(study: Study) -> str:
    """Which attacks keep somebody waiting for too long."""
    attacks = [row for row in gaps(study, "attacks").to_dict("records") if not row[""].startswith("idle")]
    over = [f"{row['']} ({row['beyond the limit']})" for row in attacks if row["beyond the limit"]]
    return (
        f"Under {len(attacks) - len(over)} of {len(attacks)} attacks, no gap is longer than the idle server's by more "
        f"than 100 ms. Beyond that: {'; '.join(over) or 'none'}."
    )


def _ends(ends: Counter[str]) -> str:
    return ", ".join(f"{count:,} {status.replace('_', ' ')}" for status, count in ends.items()) or "none"
