"""Files that an operator replaces while the server runs: keys and certificates."""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jlora.errors import ConfigError
from jlora.ports import OsThreads, Threads

T = TypeVar("T")

LOOK_S = 1.0  # between two looks at the files

log = logging.getLogger(__name__)


class Watched(Generic[T]):
    """What some files say. A thread reads them again when they change, as long as this object lives.

    If they cannot be read, or change meanwhile, what they said before stays, and each look tries again. The log says
    so once.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T], threads: Threads | None = None):
        """Reads the files. Raises ConfigError, as `read` does. `threads` reports a failure of the thread."""
        self._paths = paths
        self._read = read
        self._seen = self._identities()
        self._failed: list[tuple[int, ...] | None] | None = None  # the files that could not be read
        self._value = read()
        (threads or OsThreads()).start("jlora-files", functools.partial(_poll, weakref.ref(self)))

    def current(self) -> T:
        """What they said at most `LOOK_S` seconds ago, and the time to read them. For any thread."""
        return self._value

    def look(self) -> None:
        """Reads the files again if they have changed."""
        seen = self._identities()
        if seen == self._seen:
            return
        try:
            value = self._read()
        except Exception as e:  # of any kind: if the thread ended, a revoked key would be good for ever
            if seen != self._failed:  # the next look tries again: the disk may have failed, not the file
                log.error("%s; what was read before stays in use", e, exc_info=not isinstance(e, ConfigError))
            self._failed = seen
            return
        self._failed = None
        if seen == self._identities():  # otherwise the next look reads them again
            self._seen, self._value = seen, value
            log.info("read again: %s", ", ".join(self._paths))

    def _identities(self) -> list[tuple[int, ...] | None]:
        return [_identity(path) for path in self._paths]


def _poll(watched: weakref.ref[Watched[Any]]) -> None:
    while (files := watched()) is not None:
        files.look()
        del files
        time.sleep(LOOK_S)


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
