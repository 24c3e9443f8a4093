"""What a part of `jlora doctor` is asked, and its findings, written line by line. No jax.

A line is one JSON object: {"begin": case}, {"row": [list, row]}, {"value": [key, value]},
{"skipped": reason}, {"end": true}. Every line is on the disk at once, so no finding is lost with the
process that made it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jlora.doctor.fit import Rates

COMPILE = "compile "  # how the names of programs begin


@dataclass(frozen=True, slots=True)
class Order:
    """What a part is started with."""

    part: str
    to: str  # its file
    seconds: float  # it begins no case later than this
    kernels: str
    quick: bool
    model: str = ""  # of the part `steps`
    rates: Rates | None = None  # as the part `rates` measured them


class Journal:
    """Appends to a part's file. Drops the unfinished line of a process that died."""

    def __init__(self, path: Path):
        self._path = path
        if path.exists():
            whole, _, _ = path.read_text().rpartition("\n")
            path.write_text(whole + "\n" if whole else "")

    def begin(self, case: str) -> None:
        """Names what is tried next: if nothing follows, the part died of it."""
        self._write({"begin": case})

    def row(self, rows: str, row: Mapping[str, Any]) -> None:
        self._write({"row": [rows, row]})

    def put(self, key: str, value: Any) -> None:
        self._write({"value": [key, value]})

    def skip(self, reason: str) -> None:
        self._write({"skipped": reason})

    def end(self) -> None:
        """All is done; what the process does from here on means nothing."""
        self._write({"end": True})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass(slots=True)
class Found:
    """A part's file as it is now."""

    values: dict[str, Any] = field(default_factory=dict)  # lists of rows, and values
    skipped: list[str] = field(default_factory=list)  # what was left out
    begun: list[str] = field(default_factory=list)  # every case that was begun, in order
    open: str | None = None  # the last of them, while nothing of it is known
    ended: bool = False  # the part said that it was done

    @property
    def unfinished(self) -> list[str]:
        """What was begun and has not come to its end: programs, which compile side by side, and the last case."""
        compiled = {row["program"] for row in self.values.get("compile", ())}
        begun = [name for name in self.begun if name.startswith(COMPILE) and name not in compiled]
        return list(dict.fromkeys([*begun, *([self.open] if self.open else [])]))

    @property
    def compiling(self) -> bool:
        """Whether a program is what is waited for."""
        return any(name.startswith(COMPILE) for name in ([self.open] if self.open else self.unfinished))


def read(path: Path) -> Found:
    """What the file says; a last line that was cut off is no line."""
    found = Found()
    for text in path.read_text().split("\n")[:-1] if path.exists() else ():
        line = json.loads(text)
        found.open = line.get("begin")
        if "begin" in line:
            found.begun.append(line["begin"])
        elif "row" in line:
            name, row = line["row"]
            found.values.setdefault(name, []).append(row)
        elif "value" in line:
            found.values.update([line["value"]])
        elif "skipped" in line:
            found.skipped.append(line["skipped"])
        found.ended = found.ended or "end" in line
    return found
