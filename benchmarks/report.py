"""`jlora bench report`: a page and a figure for every study in --out.

A page is a template in `templates/`: its claim is written by a person, its tables and its last line
come from the records. Rendering twice gives the same page; nothing on a page is edited in place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from benchmarks import figures, services, tables
from benchmarks.records import Study, median, ratios, read, told
from benchmarks.runner import Options
from jlora.errors import ConfigError

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class Page:
    """A page: the files that it needs (a pattern), and what draws its figure from them."""

    files: str
    draw: Callable[[Sequence[Study], Path], None] | None = None
    figure: str = ""


def _first(draw: Callable[[Study, Path], None]) -> Callable[[Sequence[Study], Path], None]:
    """Draws the first file alone."""
    return lambda studies, path: draw(studies[0], path)


PAGES: Mapping[str, Page] = {
    "throughput": Page("throughput-*.jsonl"),
    "latency": Page("latency-*.jsonl"),
    "llama": Page("llama-*.jsonl"),
    "start-up": Page("compare-startup-*.jsonl"),
    "host": Page("host-*.jsonl"),
    "fronts": Page("fronts-*.jsonl"),
    "refusals": Page("refusals-*.jsonl"),
    "abuse": Page("abuse-*.jsonl"),
    "prefix-timing": Page("prefix-timing-*.jsonl"),
    "gaps": Page("gaps-*.jsonl"),
    "compiling": Page("compiling-*.jsonl"),
    "cache": Page("cache-*.jsonl", _first(figures.cache), "cache-growth.png"),
    "lora": Page("lora-*.jsonl"),
    "price": Page("price-*.jsonl"),
    "alora": Page("alora-*.jsonl", _first(figures.alora), "alora.png"),
    "beyond": Page("beyond-*.jsonl", _first(figures.beyond), "beyond.png"),
    "step-model": Page("step-model-*.jsonl", _first(figures.step_model), "step-model.png"),
    "cold": Page("cold-*.jsonl"),
    "exchange": Page("exchange-*.jsonl"),
    "arrivals": Page("arrivals-*.jsonl"),
    "switches": Page("switches-*.jsonl"),
    "skew": Page("skew-*.jsonl"),
    "tiers": Page("tiers-*.jsonl"),
    "catalogue": Page("catalogue-python.jsonl"),
    "catalogue-tiers": Page("catalogue-tiers-*.jsonl"),
    "zipf": Page("zipf-*.jsonl"),
    "failures": Page("failures-*.jsonl", figures.failures, "failures.png"),
    "pauses": Page("pauses-*.jsonl"),
    "soak": Page("soak-serve.jsonl", _first(figures.soak), "soak.png"),
    "faults": Page("faults-real.jsonl"),
    "cluster-routing": Page("cluster-routing-*.jsonl"),
    "cluster-migration": Page("cluster-migration-*.jsonl"),
    "cluster-placement": Page("cluster-placement-*.jsonl", _first(figures.placement), "cluster-placement.png"),
    "cluster-placement-unpadded": Page("cluster-placement-*.jsonl"),
    "cluster-placement-sides": Page("cluster-placement-*.jsonl"),
    "cluster-real": Page("cluster-real-paced.jsonl"),
    "cluster-load": Page("cluster-load-*.jsonl"),
    "cluster-table": Page("cluster-table-*.jsonl", _first(figures.services), "cluster-table.png"),
    "cluster-cells": Page("cluster-table-*.jsonl"),
    "caraserve": Page("caraserve-*.jsonl", _first(figures.caraserve), "caraserve.png"),
}


def run(options: Options) -> None:
    """Draws the figures and renders the pages that there are records for. Raises ConfigError if there are none."""
    made = [name for name in PAGES if render(name, options.out, draw=True)]
    if not made:
        raise ConfigError(f"report: no records of a study in {options.out}")


def render(name: str, out: Path, draw: bool) -> bool:
    """Writes OUT/NAME.md, and its figure if asked for; False if there are no records."""
    page = PAGES[name]
    found = [read(path) for path in sorted(out.glob(page.files))]
    if not found:
        return False
    if draw and page.draw is not None:
        page.draw(found, out / page.figure)
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    made.filters |= FILTERS
    made.globals |= {"tables": tables, "services": services, "controls": tables.controls}
    made.globals |= {"median": median, "ratios": ratios, "told": told, "geometric_mean": statistics.geometric_mean}
    text = made.get_template(f"{name}.md.j2").render(
        studies=found,
        study=found[0],
        origin="\n".join(map(origin, found)),
        figure=page.figure,
    )
    (out / f"{name}.md").write_text(text)
    return True


def markdown(rows: pd.DataFrame) -> str:
    """A table of text."""
    lines = [rows.columns.tolist(), ["---"] * len(rows.columns), *rows.astype(str).to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# For templates: numbers as text.
FILTERS: Mapping[str, Callable[..., str]] = {
    "table": markdown,
    "fixed": lambda value, digits=0: f"{value:.{digits}f}",
    "ms": lambda seconds, digits=0: f"{1e3 * seconds:.{digits}f}",
    "share": lambda value, digits=1: f"{value:.{digits}%}",
    "more": lambda value: f"{value:+.0%}".replace("-0%", "+0%"),
    "counts": lambda found: ", ".join(f"{count:,} {what}" for what, count in found.items()),
}


def origin(study: Study) -> str:
    """Command, date, code, machine and versions in one line."""
    e: Mapping[str, Any] = study.environment
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items() if name != "jlora")
    machine = f"{e['machine']['processor']}, {e['machine']['cores']} cores, {e['machine']['memory_gib']:.0f} GiB"
    code = f", code at {e['commit']}" if e["commit"] else ""
    return (
        f"- `{e['command']}`, {e['date']}{code}; {machine}; {versions}. Raw: [{e['study']}.jsonl]({e['study']}.jsonl)."
    )
