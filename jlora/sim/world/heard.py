"""What the product logs while a world is played: an error that nobody expects there is a find."""

from __future__ import annotations

import logging
import sqlite3
import traceback
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from jlora.errors import JloraError
from jlora.sim.world.sites import Planted

# What faults bring, and what the product makes of them: a thread that dies does so by SystemExit.
EXPECTED = (Planted, MemoryError, JloraError, CancelledError, SystemExit, sqlite3.OperationalError)


class Heard(logging.Handler):
    """Keeps what is wrong with the log's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        line = record.getMessage()
        if error is not None and not isinstance(error, EXPECTED):
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            self.found.append(f"the log has an error: {line}: {type(error).__name__}: {error} ({where})")


@contextmanager
def heard() -> Iterator[Heard]:
    """Takes the log's place meanwhile: faults fill it by the thousand."""
    log, handler = logging.getLogger("jlora"), Heard()
    before = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.handlers, log.propagate = before[:2]
        log.setLevel(before[2])
