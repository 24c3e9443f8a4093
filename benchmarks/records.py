"""Results as tidy JSON lines: the first line is the environment, every other line one measurement.

    {"environment": {"study": "throughput", "command": ..., "date": ..., "machine": ...}, "settings": ...}
    {"cell": "float32", "side": "jlora", "round": 0, "seconds": 12.5, "ttft_mean_s": 0.8}

A file is also the journal of its study: a study that was interrupted finds its finished rounds there
and goes on. Other settings begin the file anew.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from jlora import machine
from jlora.sim.outcome import rounded

Sample = dict[str, Any]


def environment(study: str) -> dict[str, Any]:
    """Where and how numbers are made."""
    return {
        "study": study,
        "command": machine.command("jlora bench"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


class Records:
    """The file of one study.

    Args:
        settings: what makes two runs comparable.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self._path = path
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.settings = json.loads(json.dumps(settings, default=str))
        if lines and lines[0].get("settings") == self.settings:
            self.lines: list[Sample] = lines[1:]
            return
        self.lines = []
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"environment": environment(path.stem), "settings": self.settings}
        path.write_text(json.dumps(head) + "\n")

    def add(self, cell: str, side: str, round_: int, sample: Mapping[str, Any]) -> None:
        """Keeps one measurement, on disk too."""
        line = {"cell": cell, "side": side, "round": round_, **rounded(dict(sample))}
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, cell: str) -> Cell:
        """The rounds of one cell, for `runner.measure`."""
        return Cell(self, cell)


@dataclass
class Cell:
    """One cell of a study as a journal: its finished rounds, {side: sample} each."""

    records: Records
    name: str
    rounds: list[dict[str, Sample]] = field(default_factory=list)

    def __post_init__(self) -> None:
        found: dict[int, dict[str, Sample]] = {}
        for line in self.records.lines:
            if line["cell"] == self.name:
                found.setdefault(line["round"], {})[line["side"]] = line
        self.rounds = [found[i] for i in sorted(found)]

    def add(self, finished: dict[str, Sample]) -> None:
        """Keeps a round."""
        for side, sample in finished.items():
            self.records.add(self.name, side, len(self.rounds), sample)
        self.rounds.append(dict(finished))


@dataclass(frozen=True)
class Study:
    """A finished file: its environment, its settings, a row per measurement."""

    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: pd.DataFrame


def read(path: Path) -> Study:
    """Reads a file of `Records`."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    return Study(head["environment"], head["settings"], pd.DataFrame(lines))


def median(rows: pd.DataFrame, keys: Sequence[str] = ("cell", "side")) -> pd.DataFrame:
    """Medians over the rounds of every number."""
    return rows.groupby(list(keys), sort=False).median(numeric_only=True).drop(columns="round", errors="ignore")


def ratios(rows: pd.DataFrame, side: str, base: str, key: str) -> pd.Series:
    """`side` over `base`, round by round."""
    ours, theirs = (rows[rows["side"] == name].set_index("round")[key] for name in (side, base))
    return pd.Series(ours / theirs).dropna()


def told(values: pd.Series) -> str:
    """Median (lowest-highest)."""
    return f"{values.median():.2f} ({values.min():.2f}–{values.max():.2f})"


def control(rows: pd.DataFrame, side: str, key: str) -> float:
    """The median of one side over itself a round later, which slow drift hardly moves; NaN with one round."""
    values = rows[rows["side"] == side][key].tolist()
    pairs = [later / value for value, later in pairwise(values)]
    return statistics.median(pairs) if pairs else float("nan")
