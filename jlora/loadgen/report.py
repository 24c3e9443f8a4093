"""The report of `jlora bench serve`: JSON, a page of HTML, the same tables as text, and a figure."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.table import Table as RichTable

from jlora.loadgen.sample import known

LATE_S = 0.01  # a client that sends 1 % of the requests later than this adds to what it measures
ADAPTERS = 20  # in the report; the JSON has all
KINDS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
PAGE = jinja2.Environment(autoescape=True).from_string(
    """<!doctype html>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
  body { font: 14px system-ui; margin: 2em auto; max-width: 80em } td, th { padding: .2em .8em; text-align: right }
  td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
</style>
<h1>{{ title }}</h1>
{% for line in notes %}<p>{{ line }}</p>
{% endfor %}
{% for table in tables %}<h2>{{ table.title }}</h2>
<table><tr>{% for name in table.head %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
{% if figure %}<img src="{{ figure }}" alt="distributions of TTFT, TPOT and latency">{% endif %}
"""
)


@dataclass(frozen=True, slots=True)
class Table:
    """A title, column names, rows of text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write(out: Path, record: Mapping[str, Any]) -> str:
    """Writes OUT/serve-TRACE.json, .html and .png; returns the report as text."""
    out.mkdir(parents=True, exist_ok=True)
    name = "serve-" + record["settings"]["trace"]["name"].replace(", ", "-").replace(" ", "-")
    (out / f"{name}.json").write_text(json.dumps(_plain(record), indent=1) + "\n")
    figure = f"{name}.png" if draw(record, out / f"{name}.png") else ""
    title, told, tables = f"Load: {record['settings']['trace']['name']}", list(notes(record)), list(tables_of(record))
    (out / f"{name}.html").write_text(PAGE.render(title=title, notes=told, tables=tables, figure=figure))
    return text(title, told, tables)


def text(title: str, told: Sequence[str], tables: Sequence[Table]) -> str:
    """The report for a terminal."""
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(title)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left", box=None)
        for i, name in enumerate(table.head):
            shown.add_column(name, justify="right" if i else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for line in told:
        console.print(line, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def tables_of(record: Mapping[str, Any]) -> Iterator[Table]:
    """One row per side, ratios to the first side, and the adapters of the last round."""
    done, sides = record["rounds"], list(record["summary"])
    head = [
        *("side", "requests", "failed", "req/s", "tok/s", "in time", "goodput/s", "TTFT ms", "p50", "p99"),
        *("TPOT ms", "p99", "latency s", "p99", "cached", "adapter hits", "differ"),
    ]
    yield Table(f"Medians of {len(done)} rounds", head, [_row([r[side] for r in done], side) for side in sides])
    if len(done) > 1 or len(sides) > 1:
        rows = []
        for side in sides:
            summary = record["summary"][side]
            ratios = [
                f"{_told(r['median'], 2)} ({_told(r['low'], 2)}-{_told(r['high'], 2)})"
                for r in summary["ratio"].values()
            ]
            rows.append([side, *ratios, _told(summary["control"], 3)])
        yield Table(f"Times {sides[0]}'s, inside a round", ["side", "TTFT", "TPOT", "goodput", "control"], rows)
    for side in sides:
        found = done[-1][side]["adapters"]
        rows = [
            [
                row["adapter"] or "(base)",
                str(row["requests"]),
                str(row["failed"]),
                f"{row['attained']:.0%}",
                *(_told(1e3 * row[key], 1) for key in ("ttft_s", "ttft_p99_s", "tpot_s")),
                f"{row['cached']:.0%}",
            ]
            for row in found[:ADAPTERS]
        ]
        names = ["adapter", "requests", "failed", "in time", "TTFT ms", "p99", "TPOT ms", "cached"]
        yield Table(f"{side}: {len(rows)} of {len(found)} adapters, last round", names, rows)


def notes(record: Mapping[str, Any]) -> Iterator[str]:
    """Where the numbers come from, what failed, and how late the client was."""
    machine, slo, done = record["machine"], record["settings"]["slo"], record["rounds"]
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    yield (
        f"{record.get('command', '')} {record.get('date', '')}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB; {versions}. Trace {record['settings']['trace']['digest']}."
    )
    yield (
        f"In time: first token within {slo['ttft_s']:g} s, later ones within {slo['tpot_s']:g} s each in the mean. "
        "Times count from when a request was due."
    )
    for side in record["summary"]:
        counts: dict[tuple[str, str], int] = {}
        for error in (error for r in done for error in r[side]["errors"]):
            key = error["status"], error["message"]
            counts[key] = counts.get(key, 0) + error["count"]
        yield from (f"{side}: failed {n} x {status}: {message}" for (status, message), n in counts.items())
        late = [r[side]["lateness"] for r in done]
        p99 = statistics.median(x["p99"] for x in late)
        warning = " The client was busy: its own delay is in these times." if p99 > LATE_S else ""
        yield f"{side}: the client sent requests {1e3 * p99:.1f} ms late (p99).{warning}"


def _row(runs: Sequence[Mapping[str, Any]], side: str) -> list[str]:
    """Medians of one side's rounds."""

    def of(key: str, inner: str = "") -> float:
        return statistics.median(known([run[key][inner] if inner else run[key] for run in runs]))

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


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Cumulative distributions of all sides; False, and a line on stderr, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed (pip install 'jlora[bench]')", file=sys.stderr)
        return False
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
    return True


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
