"""Interleaved rounds, and the file that keeps those that are finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

Sample = dict[str, Any]  # one run in numbers
Round = dict[str, Sample]  # of every side


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


class Rounds(Protocol):
    """Keeps finished rounds."""

    @property
    def rounds(self) -> Sequence[Round]: ...

    def add(self, finished: Round) -> None: ...


def measure(journal: Rounds, name: str, sides: Sequence[Side], budget: Budget, alternate: bool = False) -> None:
    """Runs every side once per round, in turn, until the budget is spent.

    Only neighbours are compared, because a machine drifts. An interrupted run continues after the
    rounds that the journal has.

    Args:
        alternate: every other round runs the sides in reverse, so that none always follows the same one.
    """
    start, longest = time.monotonic(), 0.0
    with tqdm(total=max(0, budget.rounds - len(journal.rounds)) * len(sides), desc=name, unit="run") as bar:
        while len(journal.rounds) < budget.rounds:
            began = time.monotonic()
            if len(journal.rounds) >= 2 and began - start + longest > budget.minutes * 60:
                break
            finished: Round = {}
            for side in sides[::-1] if alternate and len(journal.rounds) % 2 else sides:
                bar.set_postfix_str(side.name)
                finished[side.name] = side.run()
                bar.update()
            journal.add(finished)
            longest = max(longest, time.monotonic() - began)


class JsonLines:
    """A file of one JSON object per line. The first line has the settings; other settings begin the file anew.

    Args:
        settings: what makes two runs comparable.
        more: what the first line says beside them.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], **more: Any):
        self._path = path
        self.settings = json.loads(json.dumps(settings, default=str))
        # An interrupted process may leave half a line: what follows the last line break is dropped.
        found = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
        kept = found and found[0].get("settings") == self.settings
        self.lines: list[dict[str, Any]] = found[1:] if kept else []
        head = found[0] if kept else {**more, "settings": self.settings}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *self.lines)))

    def append(self, line: dict[str, Any]) -> None:
        """Keeps a line, on disk too."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Unfinished(JsonLines):
    """The finished rounds of a run that may be interrupted: each line is a round."""

    @property
    def rounds(self) -> Sequence[Round]:
        return self.lines

    def add(self, finished: Round) -> None:
        self.append(finished)

    def done(self) -> None:
        """The run is complete: the same command measures again."""
        self._path.unlink()
