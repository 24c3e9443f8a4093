"""Interleaved rounds: A B A B on one machine, ratios inside a round, and a control of A against A.

A machine drifts (clocks, neighbours, memory). So only sides measured next to each other are
compared, and a side measured in successive rounds must agree with itself. Finished rounds are kept
in a journal: an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

Sample = dict[str, Any]  # one measurement


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared; `run` measures it once."""

    name: str
    run: Callable[[], Sample]


class Kept(Protocol):
    """Finished rounds, {side: sample} each."""

    rounds: list[dict[str, Any]]

    def add(self, finished: dict[str, Any]) -> None:
        """Keeps one more."""
        ...


class Journal:
    """Finished rounds in a file of JSON lines, the first of them the settings. Other settings begin it anew."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self._path = path
        head = json.dumps(settings, sort_keys=True, default=str)
        lines = path.read_text().splitlines() if path.exists() else []
        self.rounds: list[dict[str, Any]] = []
        if lines and lines[0] == head:
            self.rounds = [json.loads(line) for line in lines[1:]]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + "\n")

    def add(self, finished: dict[str, Any]) -> None:
        """Keeps one finished round, on disk too."""
        self.rounds.append(finished)
        with self._path.open("a") as file:
            file.write(json.dumps(finished) + "\n")


@dataclass(frozen=True, slots=True)
class Budget:
    """`rounds` rounds. After the second, none begins that would end later than `minutes` after the start."""

    rounds: int
    minutes: float


def interleave(sides: Sequence[Side], journal: Kept, budget: Budget, title: str) -> list[dict[str, Sample]]:
    """Runs every side once per round, in turn, until the budget is spent; returns all rounds."""
    start = time.monotonic()
    longest = 0.0
    left = max(0, budget.rounds - len(journal.rounds))
    with tqdm(total=left * len(sides), desc=title, unit="run") as bar:
        while len(journal.rounds) < budget.rounds:
            began = time.monotonic()
            if len(journal.rounds) >= 2 and began - start + longest > budget.minutes * 60:
                break
            finished: dict[str, Sample] = {}
            for side in sides:
                bar.set_postfix_str(side.name)
                finished[side.name] = side.run()
                bar.update()
            journal.add(finished)
            longest = max(longest, time.monotonic() - began)
    return journal.rounds


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the lowest and the highest."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def control(values: Sequence[float]) -> float:
    """The median of one side over itself a round later: 1 on a steady machine, NaN with fewer than two rounds.

    Neighbouring rounds are compared, so slow drift counts little.
    """
    pairs = [b / a for a, b in zip(values, values[1:], strict=False)]
    return statistics.median(pairs) if pairs else float("nan")
