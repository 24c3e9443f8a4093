"""What jlora takes from the machine: time, files, threads, random numbers.

The engine and its adapters reach the machine through these protocols only. A simulation or a test
passes its own: a virtual clock, a disk that fails, threads that run in a chosen order.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger(__name__)

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
    """Starts threads, and tells of those that fail."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Runs `run` on a thread of its own, a daemon: it never keeps the process alive."""
        ...

    def pool(self, name: str, size: int) -> Executor:
        """Runs submitted calls on at most `size` threads; the process waits for those under way when it ends."""
        ...

    def watch(self, failed: Callable[[str, BaseException], None]) -> None:
        """Calls `failed` with the name of every started thread that an exception ends, on that thread."""
        ...


class Garbage(Protocol):
    """When Python collects garbage."""

    def begin(self) -> None:
        """Everything is loaded."""
        ...

    def after_step(self) -> None:
        """The engine is between two steps; its thread calls."""
        ...

    def idle(self) -> None:
        """The engine has nothing to do; its thread calls."""
        ...


class DiskFiles(Files):
    """The machine's own files."""

    def names(self, directory: str) -> list[str]:
        return sorted(os.listdir(directory))

    def size(self, path: str) -> int | None:
        return os.path.getsize(path) if os.path.isfile(path) else None

    def read(self, path: str, size: int) -> bytes:
        with open(path, "rb") as stream:
            return stream.read(size)


class OsThreads(Threads):
    """The operating system's threads."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[str, BaseException], None]] = []

    def start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(name, run), name=name, daemon=True)
        thread.start()
        return thread

    def watch(self, failed: Callable[[str, BaseException], None]) -> None:
        self._watchers.append(failed)

    def _run(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # SystemExit too, which Python drops without a word
            log.critical("thread %s has failed", name, exc_info=error)
            for failed in self._watchers:
                failed(name, error)

    def pool(self, name: str, size: int) -> Executor:
        return ThreadPoolExecutor(size, thread_name_prefix=name)


class PythonGarbage(Garbage):
    """Leaves garbage to Python: right for a notebook, whose process is its user's."""

    def begin(self) -> None:
        pass

    def after_step(self) -> None:
        pass

    def idle(self) -> None:
        pass


class ServerGarbage(Garbage):
    """Keeps full collections off the steps: a big dependency tree makes one last a large part of a second.

    The loaded program is frozen. Python collects young objects as always, and old ones only when the
    engine is idle, at most every `IDLE_S`, or after `BUSY_S` without such a pause.
    """

    IDLE_S, BUSY_S = 10.0, 900.0
    NEVER = 1_000_000  # young collections before Python would start a full one by itself

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._collected = clock()

    def begin(self) -> None:
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, self.NEVER)

    def after_step(self) -> None:
        self._collect_after(self.BUSY_S)

    def idle(self) -> None:
        self._collect_after(self.IDLE_S)

    def _collect_after(self, seconds: float) -> None:
        if self._clock() - self._collected >= seconds:
            gc.collect()
            self._collected = self._clock()


@dataclass(frozen=True, slots=True)
class System:
    """The machine as one record.

    Attributes:
        random: draws the seeds of requests that name none; None makes one from `model.seed`.
    """

    clock: Clock = time.monotonic
    files: Files = field(default_factory=DiskFiles)
    threads: Threads = field(default_factory=OsThreads)
    random: random.Random | None = None
    garbage: Garbage = field(default_factory=PythonGarbage)
