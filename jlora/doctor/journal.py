"""The findings of a part of `jlora doctor`, written line by line, so that none is lost with its process.

    Journal(path)              the part writes: begin a case, add a row, put a value, end
    read(path) -> Found        the job reads, also while the part runs and after it died

A line is one JSON object: {"begin": case}, {"row": [list, row]}, {"value": [key, value]},
{"skipped": reason}, {"end": true}. No jax.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Journal:
    """Appends to a part's file; every line is on the disk when its call returns.

    What a process that died left of a line is dropped.
    """

    def __init__(self, path: Path):
        self._path = path
        if path.exists():
            whole, _, _ = path.read_text().rpartition("\n")
            path.write_text(whole + "\n" if whole else "")

    def begin(self, case: str) -> None:
        """What is tried next: if nothing follows, it is what the part died of."""
        self._write({"begin": case})

    def row(self, rows: str, row: Mapping[str, Any]) -> None:
        """Adds to a list of the report."""
        self._write({"row": [rows, row]})

    def put(self, key: str, value: Any) -> None:
        """A value of the report."""
        self._write({"value": [key, value]})

    def skip(self, reason: str) -> None:
        """Something was left out, and why."""
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
    """A part's file as it is now.

    Attributes:
        values: lists of rows, and values.
        skipped: what was left out.
        begun: every case that was begun, in order.
        open: the last of them, while nothing of it is known.
        died: those of which nothing was ever known.
        ended: the part said that it was done.
    """

    values: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    open: str | None = None
    died: list[str] = field(default_factory=list)
    ended: bool = False


def read(path: Path) -> Found:
    """What the file says; a last line that was cut off is no line."""
    found = Found()
    for text in path.read_text().split("\n")[:-1] if path.exists() else ():
        line = json.loads(text)
        if "begin" in line:
            found.died += [found.open] if found.open is not None else []
            found.begun.append(line["begin"])
            found.open = line["begin"]
            continue
        if "row" in line:
            name, row = line["row"]
            found.values.setdefault(name, []).append(row)
        elif "value" in line:
            key, value = line["value"]
            found.values[key] = value
        elif "skipped" in line:
            found.skipped.append(line["skipped"])
        found.ended = found.ended or "end" in line
        found.open = None
    return found


def before(path: Path) -> Found:
    """The same for a process that goes on where another ended: what was under way then has died."""
    found = read(path)
    found.died += [found.open] if found.open is not None else []
    return found
