"""Inputs that are kept: those that reach lines which the seeds do not, and all that ever found a fault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.fuzz._engine import name_of

ROOT = Path(__file__).with_name("corpus")
MOST_BYTES = 4096  # of an input that only reaches new lines
MOST = 24_000  # bytes of a target's corpus


def load(target: str) -> list[bytes]:
    """A target's inputs, in order of name."""
    return [file.read_bytes() for file in sorted((ROOT / target).glob("*"))]


def keep(target: str, inputs: Iterable[bytes]) -> None:
    """Adds inputs as long as there is room, the short ones first."""
    folder = ROOT / target
    folder.mkdir(parents=True, exist_ok=True)
    room = MOST - sum(file.stat().st_size for file in folder.glob("*"))
    for data in sorted(inputs, key=len):
        room -= len(data)
        if room < 0 or len(data) > MOST_BYTES:
            return
        (folder / name_of(data)).write_bytes(data)
