"""Files that an operator replaces while the server runs: keys and certificates."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jlora.errors import ConfigError
from jlora.ports import Clock

T = TypeVar("T")

LOOK_S = 1.0  # between two looks at the files

log = logging.getLogger(__name__)


class Watched(Generic[T]):
    """What some files say. `current` reads them again when they have changed, on any thread.

    If they cannot be read, or change meanwhile, what they said before stays. The log says so once.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T], clock: Clock = time.monotonic):
        """Reads the files. Raises ConfigError, as `read` does."""
        self._paths = paths
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._identities()
        self._value = read()
        self._looked = clock()

    def current(self) -> T:
        """Looks at the files at most every `LOOK_S` seconds."""
        with self._lock:
            if self._clock() - self._looked >= LOOK_S:
                self._looked = self._clock()
                self._look()
            return self._value

    def _look(self) -> None:
        seen = self._identities()
        if seen == self._seen:
            return
        try:
            value = self._read()
        except ConfigError as e:
            self._seen = seen
            log.error("%s; what was read before stays in use", e)
            return
        if seen == self._identities():  # otherwise the next look reads them again
            self._seen, self._value = seen, value
            log.info("read again: %s", ", ".join(self._paths))

    def _identities(self) -> list[tuple[int, ...] | None]:
        return [_identity(path) for path in self._paths]


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
