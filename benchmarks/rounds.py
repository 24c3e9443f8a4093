"""Interleaved rounds: A B A B on one machine, ratios inside a round, and a control of A against A.

A machine drifts (clocks, neighbours, memory), so only sides measured next to each other are
compared, and the same side measured in successive rounds must agree with itself.
Finished rounds are kept in a journal: an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

# The same side against itself must stay inside, or the run is void.
CONTROL = (0.97, 1.03)

Sample = dict[str, Any]  # one measurement; "seconds" is what ratios are made of


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared; `run` measures it once."""

    name: str
    run: Callable[[], Sample]


class Journal:
    """Finished rounds of one benchmark in a file of JSON lines, the first of them the settings.

    A journal of other settings is begun anew.
    """

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
    """`rounds` rounds, but none that would end more than `minutes` after the start (2 at least)."""

    rounds: int
    minutes: float


def interleave(sides: Sequence[Side], journal: Journal, budget: Budget, title: str) -> list[dict[str, Sample]]:
    """Runs every side once per round, in turn, until the budget is spent; returns all rounds."""
    start = time.monotonic()
    longest = 0.0
    left = max(0, budget.rounds - len(journal.rounds))
    with tqdm(total=left * len(sides), desc=title, unit="run") as bar:
        while len(journal.rounds) < budget.rounds:
            spent = time.monotonic() - start
            if len(journal.rounds) >= 2 and spent + longest > budget.minutes * 60:
                break
            began = time.monotonic()
            finished: dict[str, Sample] = {}
            for side in sides:
                bar.set_postfix_str(side.name)
                finished[side.name] = side.run()
                bar.update()
            journal.add(finished)
            longest = max(longest, time.monotonic() - began)
    return journal.rounds


@dataclass(frozen=True, slots=True)
class Ratio:
    """Over rounds: the median, the smallest and the largest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def spread(values: Sequence[float]) -> Ratio:
    """Median and range of at least one value."""
    return Ratio(statistics.median(values), min(values), max(values))


def speed_ratio(rounds: Sequence[Mapping[str, Sample]], ours: str, theirs: str, key: str = "seconds") -> Ratio:
    """How many times faster `ours` is than `theirs`, round by round."""
    return spread([r[theirs][key] / r[ours][key] for r in rounds])


def control(rounds: Sequence[Mapping[str, Sample]], side: str, key: str = "seconds") -> float:
    """The median of one side over itself a round later; 1 if the machine was steady.

    Neighbouring rounds, so slow drift counts little; with one round there is nothing to compare.
    """
    values = [r[side][key] for r in rounds]
    pairs = [b / a for a, b in zip(values, values[1:], strict=False)]
    return statistics.median(pairs) if pairs else float("nan")


def is_steady(value: float) -> bool:
    """Whether a control lets the run count."""
    return CONTROL[0] <= value <= CONTROL[1]
