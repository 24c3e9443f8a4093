"""Folders for what one start needs, such as its secret. A killed process leaves its own, and the next start removes it.

A living process holds a lock on its folder, which ends with it however it ends. Processes of other users, machines
or containers that share the directory are told apart by the same lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "jlora-run-"  # short: Ray puts sockets below its folder
FRESH_S = 60.0  # between the making of a folder and its lock


class Scratch:
    """A folder of this process, for its owner's eyes only, until `close`."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes the folder. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Removes the folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid == os.getuid() and time.time() - folder.stat().st_mtime > FRESH_S:
                _remove(folder)
        except OSError:  # its owner removes it, or holds it
            continue


def _remove(folder: Path) -> None:
    """Raises OSError if a process holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
