"""Results as tidy JSON lines: the first line is the environment, every other line one measurement.

    {"environment": {"study": "throughput", "command": ..., "date": ..., "machine": ...}, "settings": ...}
    {"cell": "float32", "side": "jlora", "round": 0, "seconds": 12.5, "ttft_mean_s": 0.8}

A file is also the journal of its study: a study that was interrupted finds its finished rounds there
and goes on. Other settings begin the file anew.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from jlora import machine
from jlora.loadgen.rounds import Budget, JsonLines, Round, Side, measure
from jlora.sim.outcome import rounded

STEADY = 1.1  # a machine that changes less is as fast


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


class Records(JsonLines):
    """The file of one study.

    Args:
        settings: what makes two runs comparable.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        super().__init__(path, settings, environment=environment(path.stem))

    def add(self, cell: str, side: str, round_: int, sample: Mapping[str, Any]) -> None:
        """Keeps one measurement, on disk too."""
        self.append({"cell": cell, "side": side, "round": round_, **rounded(dict(sample))})

    def has(self, **values: Any) -> bool:
        """Whether it holds a measurement with these values."""
        return any(all(line.get(key) == value for key, value in values.items()) for line in self.lines)

    def measure(self, cell: str, sides: Sequence[Side], budget: Budget, alternate: bool = False) -> None:
        """Measures a cell in interleaved rounds, after those that the file has."""
        measure(Cell(self, cell), cell, sides, budget, alternate)


@dataclass
class Cell:
    """One cell of a study: its finished rounds."""

    records: Records
    name: str

    @property
    def rounds(self) -> Sequence[Round]:
        found: dict[int, Round] = {}
        for line in self.records.lines:
            if line["cell"] == self.name:
                found.setdefault(line["round"], {})[line["side"]] = line
        return [found[i] for i in sorted(found)]

    def add(self, finished: Round) -> None:
        """Keeps a round."""
        number = len(self.rounds)
        for side, sample in finished.items():
            self.records.add(self.name, side, number, sample)


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


def steady(rows: pd.DataFrame, *sides: str) -> pd.DataFrame:
    """The rounds in which the machine was as fast beside all runs of these sides.

    A row's `pace_s` are the seconds of the same work just before and just after the run.
    """
    kept = []
    for number, found in rows[rows["side"].isin(sides)].groupby("round"):
        paces = [pace for both in found["pace_s"] for pace in both]
        if max(paces) < STEADY * min(paces):
            kept.append(number)
    return rows.loc[rows["round"].isin(kept)]


def told(values: pd.Series) -> str:
    """Median (lowest-highest)."""
    return f"{values.median():.2f} ({values.min():.2f}–{values.max():.2f})"


def averaged(values: pd.Series) -> str:
    """Geometric mean and its standard error; "" of nothing."""
    if values.empty:
        return ""
    logs = [math.log(value) for value in values]
    mean = math.exp(statistics.fmean(logs))
    error = f" ± {mean * statistics.stdev(logs) / math.sqrt(len(logs)):.3f}" if len(logs) > 1 else ""
    return f"{mean:.3f}{error}"


def control(rows: pd.DataFrame, side: str, key: str) -> float:
    """The median of one side over itself a round later, which slow drift hardly moves; NaN with one round."""
    values = rows[rows["side"] == side][key].tolist()
    pairs = [later / value for value, later in pairwise(values)]
    return statistics.median(pairs) if pairs else float("nan")
