"""The report of `jlora bench serve`: JSON, tables as text, and a figure."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jlora.errors import ConfigError
from jlora.loadgen.player import OK
from jlora.loadgen.rounds import Sample
from jlora.loadgen.sample import ERRORS, known

LATE_S = 0.01  # a client that sends 1 % of the requests later than this adds to what it measures
ADAPTERS = 20  # in the report; the JSON has all
KINDS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


def prepare(flag: str, directory: Path) -> None:
    """Makes a directory. Raises ConfigError, which names the flag, if nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{flag} {directory}: {e.strerror}") from e
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {directory}: cannot be written")


def name_of(settings: Mapping[str, Any]) -> str:
    """The name of a run's files. Other settings have another one."""
    trace = settings["trace"]["name"].replace(", ", "-").replace(" ", "-")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"serve-{trace}-{digest}"


def write(out: Path, record: Mapping[str, Any]) -> str:
    """Writes the results as JSON and a figure into `out`; returns the report as text."""
    path = out / f"{name_of(record['settings'])}.json"
    path.write_text(json.dumps(_plain(record), indent=1) + "\n")
    draw(record, path.with_suffix(".png"))
    console = Console(file=io.StringIO(), width=200, highlight=False)
    for table in tables(record):
        console.print(table)
    for line in notes(record):
        console.print(line, markup=False)
    console.print(f"Written: {path}", markup=False, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """A row per side, ratios to the first side, and the adapters of the last round."""
    rounds, sides = record["rounds"], list(record["summary"])
    yield _table(f"Medians of {len(rounds)} rounds", [_row(side, [r[side] for r in rounds]) for side in sides])
    if len(rounds) > 1 or len(sides) > 1:
        yield _table(f"Times {sides[0]}'s, inside a round", [_ratios(s, record["summary"][s]) for s in sides])
    for side in sides:
        found = rounds[-1][side]["adapters"]
        rows = [_adapter(row) for row in found[:ADAPTERS]]
        yield _table(f"{side}: {len(rows)} of {len(found)} adapters, last round", rows)


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    made = Table(title=title, title_justify="left", box=None)
    for i, name in enumerate(rows[0]):
        made.add_column(name, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row.values())
    return made


def _row(side: str, runs: Sequence[Sample]) -> dict[str, str]:
    def of(key: str, inner: str = "") -> float:
        return statistics.median(known([run[key][inner] if inner else run[key] for run in runs]))

    failed = statistics.median(_failed(run) for run in runs)
    cached = statistics.median(run["cached_tokens"] / max(run["prompt_tokens"], 1) for run in runs)
    return {
        "side": side,
        "requests": f"{of('requests'):.0f}",
        "failed": f"{failed:.0f}",
        "req/s": f"{of('requests_per_s'):.2f}",
        "tok/s": f"{of('tokens_per_s'):.0f}",
        "in time": f"{of('attained'):.1%}",
        "goodput/s": f"{of('goodput_per_s'):.2f}",
        "TTFT ms": _told(1e3 * of("ttft", "mean"), 1),
        "TTFT p50": _told(1e3 * of("ttft", "p50"), 1),
        "TTFT p99": _told(1e3 * of("ttft", "p99"), 1),
        "TPOT ms": _told(1e3 * of("tpot", "mean"), 2),
        "TPOT p99": _told(1e3 * of("tpot", "p99"), 2),
        "latency s": _told(of("latency", "p50"), 2),
        "latency p99": _told(of("latency", "p99"), 2),
        "cached": f"{cached:.0%}",
        "adapter hits": _told(100 * of("cache", "adapter_hits"), 0, "%"),
        "differ": f"{of('different'):.0f}",
    }


def _ratios(side: str, summary: Mapping[str, Any]) -> dict[str, str]:
    names = {"ttft_s": "TTFT", "tpot_s": "TPOT", "goodput_per_s": "goodput"}
    told = {
        names[key]: f"{_told(r['median'], 2)} ({_told(r['low'], 2)}-{_told(r['high'], 2)})"
        for key, r in summary["ratio"].items()
    }
    return {"side": side, **told, "control": _told(summary["control"], 3)}


def _adapter(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "adapter": row["adapter"] or "(base)",
        "requests": str(row["requests"]),
        "failed": str(row["failed"]),
        "in time": f"{row['attained']:.0%}",
        "TTFT ms": _told(1e3 * row["ttft_s"], 1),
        "TTFT p99": _told(1e3 * row["ttft_p99_s"], 1),
        "TPOT ms": _told(1e3 * row["tpot_s"], 1),
        "cached": f"{row['cached']:.0%}",
    }


def notes(record: Mapping[str, Any]) -> Iterator[str]:
    """What "in time" means, which requests failed, and how late the client was."""
    slo = record["settings"]["slo"]
    yield (
        f"In time: first token within {slo['ttft_s']:g} s, later ones within {slo['tpot_s']:g} s each in the mean. "
        f"Times count from when a request was due. Trace {record['settings']['trace']['digest']}."
    )
    for side in record["summary"]:
        runs = [r[side] for r in record["rounds"]]
        yield from (f"{side}: {line}" for line in failures(runs))
        if silent := sum(math.isnan(run["cache"]["adapter_hits"]) for run in runs):
            yield f"{side}: after {silent} of {len(runs)} runs the server did not say what its cache had done."
        p99 = statistics.median(run["lateness"]["p99"] for run in runs)
        warning = " The client was busy: its own delay is in these times." if p99 > LATE_S else ""
        yield f"{side}: the client sent requests {1e3 * p99:.1f} ms late (p99).{warning}"


def failures(runs: Sequence[Sample]) -> Iterator[str]:
    """A line for each of the most frequent kinds of errors, and one for all others."""
    errors = Counter[tuple[str, str]]()
    for error in (error for run in runs for error in run["errors"]):
        errors[error["status"], error["message"]] += error["count"]
    told = errors.most_common(ERRORS)
    yield from (f"failed {n} x {status}: {message}" for (status, message), n in told)
    kinds = len(errors) - len(told) + sum(run["error_kinds"] - len(run["errors"]) for run in runs)
    if kinds:
        rest = sum(map(_failed, runs)) - sum(n for _, n in told)
        yield f"failed {rest} x: {kinds} more kinds of errors"


def _failed(run: Sample) -> int:
    return run["requests"] - run["status"].get(OK, 0)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draws the cumulative distributions of all sides; without matplotlib, says on stderr that it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        for side in record["summary"]:
            curves = [r[side][key]["cdf"] for r in record["rounds"] if r[side][key]["cdf"]]
            if curves:
                axes.plot([1e3 * statistics.median(at) for at in zip(*curves, strict=True)], range(101), label=side)
        axes.set(xlabel=f"{label}, ms", xscale="log", ylabel="% of requests")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _told(value: float, digits: int, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}{unit}"


def _plain(value: Any) -> Any:
    """The same without NaN, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
