"""Disks for tests of loads, and a full one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from jlora.ports import DiskFiles, DiskFolder


class Gate(DiskFiles):
    """A disk whose folders open once it is open, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.open.set()

    def folder(self, directory: str) -> AbstractContextManager[DiskFolder]:
        self.reached.set()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return super().folder(directory)

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()


def fill(directory: Path) -> Path:
    """Takes all room of a small file system; the file that does."""
    filler = directory / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
    return filler
