"""What jlora takes from the machine: time, files, threads, random numbers.

The engine and its adapters reach the machine through these protocols only. A simulation or a test
passes its own: a virtual clock, a disk that fails, threads that run in a chosen order.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

Clock = Callable[[], float]  # seconds from any origin; they never go back


class Files(Protocol):
    """Reads files and directories. Every method raises OSError as the `os` functions do."""

    def names(self, directory: str) -> list[str]:
        """The names in a directory, sorted."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a regular file; None if there is none at `path`."""
        ...

    def read(self, path: str, size: int) -> bytes:
        """At most `size` bytes from the start of a file."""
        ...


class Thread(Protocol):
    """A running thread."""

    def join(self) -> None:
        """Waits until the thread has ended."""
        ...


class Threads(Protocol):
    """Starts threads. They are daemons: they never keep the process alive."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Runs `run` on a thread of its own."""
        ...

    def pool(self, name: str, size: int) -> Executor:
        """Runs submitted calls on at most `size` threads."""
        ...


class DiskFiles:
    """The machine's own files."""

    def names(self, directory: str) -> list[str]:
        """See `Files.names`."""
        return sorted(os.listdir(directory))

    def size(self, path: str) -> int | None:
        """See `Files.size`."""
        return os.path.getsize(path) if os.path.isfile(path) else None

    def read(self, path: str, size: int) -> bytes:
        """See `Files.read`."""
        with open(path, "rb") as stream:
            return stream.read(size)


class OsThreads:
    """The operating system's threads."""

    def start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """See `Threads.start`."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, name: str, size: int) -> Executor:
        """See `Threads.pool`."""
        return ThreadPoolExecutor(size, thread_name_prefix=name)


@dataclass(frozen=True, slots=True)
class System:
    """The machine as one record. `random` draws the seeds of requests that name none."""

    clock: Clock = time.monotonic
    files: Files = field(default_factory=DiskFiles)
    threads: Threads = field(default_factory=OsThreads)
    random: random.Random = field(default_factory=random.Random)
