"""What jlora takes from the machine: time, files, threads, random numbers.

The engine and its adapters reach the machine through these protocols only. A simulation or a test
passes its own: a virtual clock, a disk that fails, threads that run in a chosen order.
"""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jlora.errors import ConfigError, InvalidArgument, ResourceExhausted
from jlora.memory import Memory

log = logging.getLogger(__name__)

READ_BYTES = 1 << 24  # at once
MAX_LINKS = 40  # one after the other, as in Linux

Clock = Callable[[], float]  # seconds from any origin; they never go back
Stamp = tuple[int, ...]  # inode, size, time of the last write and of the last change of each file


class File(Protocol):
    """An open regular file. Every method raises OSError as the `os` functions do."""

    size: int  # when it was opened

    def read(self, size: int) -> np.ndarray:
        """The next `size` bytes, fewer at the end of the file. Other threads run meanwhile."""
        ...


class Folder(Protocol):
    """An open directory. It stays the same one if another takes its place on the disk."""

    def names(self, most: int) -> list[str]:
        """The names in it, sorted; at most `most` of them."""
        ...

    def open(self, name: str) -> AbstractContextManager[File]:
        """Opens a file of it. Raises OSError if there is none, or if it is no regular file."""
        ...

    def unchanged(self) -> bool:
        """Whether the names of the files that were opened still stand for them, and none was written to."""
        ...

    def stamp(self) -> Stamp:
        """The identities of the files that were opened, in order of their opening; see `Files.stamp`."""
        ...


class Files(Protocol):
    """Opens directories."""

    def folder(self, directory: str) -> AbstractContextManager[Folder]:
        """Raises OSError if it cannot be opened, ValueError if it is no path."""
        ...

    def stamp(self, directory: str, names: Iterable[str]) -> Stamp:
        """The identities of these files of a directory: equal as long as nobody replaced or wrote one of them.

        It opens no file. Raises OSError if one is missing.
        """
        ...


class Thread(Protocol):
    """A running thread."""

    def join(self) -> None:
        """Waits until the thread has ended."""
        ...


class Event(Protocol):
    """As `threading.Event`."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Condition(AbstractContextManager[object], Protocol):
    """As `threading.Condition`, with a lock of its own."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object: ...
    def notify(self) -> None: ...
    def notify_all(self) -> None: ...


class Threads(Protocol):
    """Starts threads, tells of those that fail, and has all that a thread may wait for."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Runs `run` on a thread of its own, a daemon: it never keeps the process alive."""
        ...

    def pool(self, name: str, size: int) -> Executor:
        """Runs submitted calls on `size` threads; the process waits for those under way when it ends.

        Raises ResourceExhausted if the machine starts no more threads; later no call can fail for want of one.
        """
        ...

    def watch(self, failed: Callable[[str, BaseException], None]) -> None:
        """Calls `failed` with the name of every started thread that an exception ends, on that thread."""
        ...

    def event(self) -> Event:
        """A new event, which is not set."""
        ...

    def condition(self) -> Condition:
        """A new condition."""
        ...

    def wait(self, future: Future, seconds: float | None = None) -> None:
        """Returns when the future is done, or after so many seconds."""
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


@dataclass(slots=True)
class DiskFile(File):
    """A file of the machine."""

    fd: int
    size: int

    def read(self, size: int) -> np.ndarray:
        data, got = np.empty(size, np.uint8), 0  # not zeroed: that would hold Python's lock
        while got < size:
            count = os.readv(self.fd, [data[got : got + READ_BYTES]])
            if not count:
                break
            got += count
        return data[:got]


class Roots:
    """The directories that files may be read from; none are no limit.

    What counts is where an opened directory is, whatever links led to it. Each root is held open, so that no other
    directory gets its inode when it is removed. One that has been replaced at its path is found by the next check.
    """

    def __init__(self, paths: Sequence[str] = ()):
        """Raises ConfigError for a path that is no directory."""
        self._roots = [_Root(path) for path in paths]

    def check(self, fd: int) -> None:
        """Raises InvalidArgument unless the open directory `fd` is one of the roots or below one."""
        if self._roots and not self._holds(fd):
            for root in self._roots:
                root.look()
            if not self._holds(fd):
                raise InvalidArgument("path: is not in a directory of adapters.roots")

    def _holds(self, fd: int) -> bool:
        roots = {root.place for root in self._roots}
        here, above = _place(os.fstat(fd)), ".."
        while here not in roots:
            below, here = here, _place(os.stat(above, dir_fd=fd))
            if here == below:  # the root of the file system is its own parent
                return False
            above += "/.."
        return True


class _Root:
    """A directory that is held open."""

    def __init__(self, path: str):
        self._path = path
        self._lock = threading.Lock()
        try:
            self._fd = self._open()
        except (OSError, ValueError) as e:
            raise ConfigError(f"adapters.roots = {path!r}: {getattr(e, 'strerror', None) or 'is no path'}") from e
        self.place = _place(os.fstat(self._fd))

    def look(self) -> None:
        """Takes the directory that is at the path now, if there is one."""
        with self._lock:
            try:
                fd = self._open()
            except OSError as e:
                log.warning("adapters.roots = %r: %s", self._path, e.strerror)
                return
            os.close(self._fd)
            self._fd, self.place = fd, _place(os.fstat(fd))

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _place(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class DiskFolder(Folder):
    """A directory of the machine.

    Links to files are followed, because the cache of the Hugging Face hub, Kubernetes' volumes and data
    version control consist of them. Every directory on the way is opened once, too: if all files are links
    through one directory, and another takes its place, all come from the first.
    """

    def __init__(self, fd: int, roots: Roots):
        self._fd = fd
        self._roots = roots
        self._ways: dict[tuple[int, str], int] = {}  # (descriptor, path of a directory from there) -> descriptor
        self._opened: dict[str, tuple[int, ...]] = {}

    def names(self, most: int) -> list[str]:
        with os.scandir(self._fd) as entries:
            return sorted(entry.name for entry in itertools.islice(entries, most))

    @contextmanager
    def open(self, name: str) -> Iterator[DiskFile]:
        self._opened[name] = ()
        directory, last = self._end(name)
        fd = os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):  # a FIFO, say, whose opening did not block
                raise OSError(errno.EINVAL, "is not a regular file")
            self._opened[name] = _identity(status)
            yield DiskFile(fd, status.st_size)
        finally:
            os.close(fd)

    def unchanged(self) -> bool:
        try:
            return all(self._identity(name) == opened for name, opened in self._opened.items())
        except OSError:
            return False

    def stamp(self) -> Stamp:
        return sum((opened[1:] for opened in self._opened.values()), ())

    def close(self) -> None:
        """Closes the directories on the way, not the folder's own."""
        for fd in self._ways.values():
            os.close(fd)

    def _identity(self, name: str) -> tuple[int, ...]:
        directory, last = self._end(name)
        return _identity(os.stat(last, dir_fd=directory, follow_symlinks=False))

    def _end(self, name: str) -> tuple[int, str]:
        """Where a chain of links ends: the descriptor of the directory, and the name in it."""
        directory = self._fd
        for _ in range(MAX_LINKS):
            try:
                way, name = os.path.split(os.readlink(name, dir_fd=directory))
            except OSError as e:
                if e.errno == errno.EINVAL:  # not a link
                    return directory, name
                raise
            if way and (directory, way) not in self._ways:
                fd = os.open(way, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
                self._ways[directory, way] = fd
                self._roots.check(fd)
            directory = self._ways.get((directory, way), directory)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class DiskFiles(Files):
    """The machine's own files, from directories in `roots` only; files that links lead to must be there, too."""

    def __init__(self, roots: Sequence[str] = ()):
        """Raises ConfigError for a root that is no directory."""
        self._roots = Roots(roots)

    @contextmanager
    def folder(self, directory: str) -> Iterator[DiskFolder]:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        folder = DiskFolder(fd, self._roots)
        try:
            self._roots.check(fd)
            yield folder
        finally:
            folder.close()
            os.close(fd)

    def stamp(self, directory: str, names: Iterable[str]) -> Stamp:
        return sum((_identity(os.stat(os.path.join(directory, name)))[1:] for name in names), ())


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

    def event(self) -> threading.Event:
        return threading.Event()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def wait(self, future: Future, seconds: float | None = None) -> None:
        futures.wait([future], seconds)

    def pool(self, name: str, size: int) -> Executor:
        pool, all_there = ThreadPoolExecutor(size, thread_name_prefix=name), threading.Barrier(size)
        try:
            for started in [pool.submit(all_there.wait) for _ in range(size)]:
                started.result()
        except BaseException as e:  # also Ctrl-C: Python would wait for the threads at its end
            all_there.abort()
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(e, RuntimeError):  # of the machine: can't start new thread
                raise ResourceExhausted(f"{name}: the machine starts fewer than {size} more threads: {e}") from e
            raise
        return pool


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
        wall: seconds since 1970, for what outlives the process.
        random: draws the seeds of requests that name none; None makes one from `model.seed`.
    """

    clock: Clock = time.monotonic
    wall: Clock = time.time
    files: Files = field(default_factory=DiskFiles)
    threads: Threads = field(default_factory=OsThreads)
    random: random.Random | None = None
    garbage: Garbage = field(default_factory=PythonGarbage)
    memory: Memory = field(default_factory=Memory)
