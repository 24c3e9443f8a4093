"""The page, the JSON and the figure of `jlora bench serve`."""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jlora.bench import report
from jlora.bench.load_sample import known

LATE_S = 0.01  # a client that is later than this for one request in a hundred is part of what it measures
ROWS = 20  # adapters on the page; the JSON has all
KINDS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


def write(out: Path, result: Mapping[str, Any]) -> str:
    """Writes OUT/serve-TRACE.json, .md and .png; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    name = "serve-" + result["settings"]["trace"]["name"].replace(", ", "-").replace(" ", "-")
    record = {
        "benchmark": "serve",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": report.command(),
        **result,
    }
    (out / f"{name}.json").write_text(json.dumps(_plain(record), indent=1) + "\n")
    drawn = draw(result, out / f"{name}.png")
    text = page(record) + (f"\n![distributions]({name}.png)\n" if drawn else "")
    (out / f"{name}.md").write_text(text)
    return text


def page(record: Mapping[str, Any]) -> str:
    """Markdown: origin, one row per side, what failed, how late the client was, adapters."""
    machine, trace, slo = record["machine"], record["settings"]["trace"], record["settings"]["slo"]
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    done = record["rounds"]
    sides = list(record["summary"])
    parts = [
        f"# Load: {trace['name']}\n\n`{record['command']}`, {record['date']}, {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gib']:.0f} GiB; {versions}. Trace {trace['digest']}, "
        f"{len(done)} rounds. In time: first token within {slo['ttft_s']:g} s, later ones {slo['tpot_s']:g} s each in "
        "the mean. Times count from when a request was due.\n",
        report.table(_HEAD, [_row(record, side) for side in sides]),
        _ratios(record, sides),
        *(_errors(done, side) for side in sides),
        *(_lateness(done, side) for side in sides),
        *(_adapters(done[-1][side], side) for side in sides),
    ]
    return "\n".join(part for part in parts if part)


_HEAD = [
    "side",
    "requests",
    "failed",
    "req/s",
    "tok/s",
    "in time",
    "goodput/s",
    *(f"TTFT ms {q}" for q in ("mean", "p50", "p99")),
    *(f"TPOT ms {q}" for q in ("mean", "p99")),
    *(f"latency s {q}" for q in ("p50", "p99")),
    "cached",
    "adapter hits",
    "differ",
]


def _row(record: Mapping[str, Any], side: str) -> list[str]:
    """Medians of the rounds."""
    runs = [r[side] for r in record["rounds"]]

    def of(*path: str) -> float:
        values = []
        for run in runs:
            value: Any = run
            for key in path:
                value = value[key]
            values.append(value)
        return statistics.median(known(values))

    failed = statistics.median(sum(e["count"] for e in run["errors"]) for run in runs)
    cached = statistics.median(run["cached_tokens"] / max(run["prompt_tokens"], 1) for run in runs)
    return [
        side,
        f"{of('requests'):.0f}",
        f"{failed:.0f}",
        f"{of('requests_per_s'):.2f}",
        f"{of('tokens_per_s'):.0f}",
        f"{of('attained'):.1%}",
        f"{of('goodput_per_s'):.2f}",
        *(_told(1e3 * of("ttft", q), 1) for q in ("mean", "p50", "p99")),
        *(_told(1e3 * of("tpot", q), 2) for q in ("mean", "p99")),
        *(_told(of("latency", q), 2) for q in ("p50", "p99")),
        f"{cached:.0%}",
        f"{of('cache', 'adapter_hits'):.0%}",
        f"{of('different'):.0f}",
    ]


def _ratios(record: Mapping[str, Any], sides: Sequence[str]) -> str:
    """Other sides against the first, inside a round."""
    rows = []
    for side in sides:
        summary = record["summary"][side]
        ratios = ("-" if math.isnan(r["median"]) else report.ratio(r) for r in summary["ratio"].values())
        control = "-" if math.isnan(summary["control"]) else report.controls(summary, "control")
        rows.append([side, *ratios, control])
    head = ["side", *(f"{key.partition('_')[0]} / {sides[0]}'s" for key in ("ttft_s", "tpot_s", "goodput_per_s"))]
    return report.table([*head, "control"], rows) if len(record["rounds"]) > 1 or len(sides) > 1 else ""


def _errors(done: Sequence[Mapping[str, Any]], side: str) -> str:
    """What failed, with the server's words."""
    counts: dict[tuple[str, str], int] = {}
    for r in done:
        for error in r[side]["errors"]:
            key = (error["status"], error["message"])
            counts[key] = counts.get(key, 0) + error["count"]
    lines = [f"- {n} x {status}: {message}" for (status, message), n in counts.items()]
    return "\n".join([f"Failed on {side}, all rounds:\n", *lines]) + "\n" if lines else ""


def _lateness(done: Sequence[Mapping[str, Any]], side: str) -> str:
    """How late the client itself was."""
    late = [r[side]["lateness"] for r in done]
    p99, most = statistics.median(x["p99"] for x in late), max(x["max"] for x in late)
    warning = " **The client was busy: its own delay is in these times.**" if p99 > LATE_S else ""
    return f"The client sent {side}'s requests {1e3 * p99:.1f} ms late (p99; at most {1e3 * most:.1f}).{warning}\n"


def _adapters(run: Mapping[str, Any], side: str) -> str:
    """The most asked for adapters of the last round."""
    rows = [
        [
            row["adapter"] or "(base)",
            str(row["requests"]),
            str(row["failed"]),
            f"{row['attained']:.0%}",
            _told(1e3 * row["ttft_s"], 1),
            _told(1e3 * row["ttft_p99_s"], 1),
            _told(1e3 * row["tpot_s"], 2),
            f"{row['cached']:.0%}",
        ]
        for row in run["adapters"][:ROWS]
    ]
    more = len(run["adapters"]) - len(rows)
    head = ["adapter", "requests", "failed", "in time", "TTFT ms", "p99", "TPOT ms", "cached"]
    title = f"## {side}: adapters of the last round" + (f", the first {ROWS} of {ROWS + more}" if more else "")
    return f"{title}\n\n{report.table(head, rows)}"


def _told(value: float, digits: int) -> str:
    """A number, or "-" where nothing was answered."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _plain(value: Any) -> Any:
    """The same without NaN, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def draw(result: Mapping[str, Any], path: Path) -> bool:
    """Cumulative distributions of all sides; False, and a line on stderr, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        for side in result["summary"]:
            curves = [r[side][key]["cdf"] for r in result["rounds"] if r[side][key]["cdf"]]
            if curves:
                axes.plot([1e3 * statistics.median(at) for at in zip(*curves, strict=True)], range(101), label=side)
        axes.set_xlabel(f"{label}, ms")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("% of requests")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    return True
