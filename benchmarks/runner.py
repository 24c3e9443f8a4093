"""What a study is run with, and its interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.records import Records, Sample
from jlora import machine


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared; `run` measures it once."""

    name: str
    run: Callable[[], Sample]


@dataclass(frozen=True, slots=True)
class Budget:
    """`rounds` rounds. After the second, none begins that would end later than `minutes` after the start."""

    rounds: int
    minutes: float


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of a study.

    Attributes:
        out: where results go; work: weights and other things that a later run finds again.
        rounds: 0 leaves the number to the study.
        data: directory of the public traces; None draws the synthetic equivalents.
        settings: jlora `section.key` overrides.
        peer_python: an interpreter with torch, transformers and peft; "" measures jlora alone.
        llama: the flags that say where llama.cpp is.
    """

    out: Path
    work: Path
    quick: bool = False
    dtype: str = "float32"
    rounds: int = 0
    minutes: float = 13.0
    seconds: float = 0.0
    data: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: tuple[int, ...] = ()
    grpc: bool = True
    peer_python: str = ""
    llama: Mapping[str, Any] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """Where a study keeps its weights."""
        return self.work / ("quick" if self.quick else "") / name

    def records(self, name: str, settings: Mapping[str, Any]) -> Records:
        """The study's file, OUT/NAME.jsonl, with what every study's settings have."""
        common = {"dtype": self.dtype, "settings": dict(self.settings), "threads": machine.threads()}
        return Records(self.out / f"{name}.jsonl", {**common, **settings, "versions": machine.versions()})

    def budget(self, rounds: int, quick: int = 2) -> Budget:
        """As the flags say; else `rounds`."""
        return Budget(self.rounds or (quick if self.quick else rounds), self.minutes)


def measure(records: Records, cell: str, sides: Sequence[Side], budget: Budget) -> None:
    """Runs every side of a cell once per round, in turn, until the budget is spent.

    Only neighbours are compared, because a machine drifts. Finished rounds are in the records, so an
    interrupted study continues after them.
    """
    journal = records.of(cell)
    start, longest = time.monotonic(), 0.0
    with tqdm(total=max(0, budget.rounds - len(journal.rounds)) * len(sides), desc=cell, unit="run") as bar:
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
