"""The threads that read adapters for an engine: loads that a caller asked for, and those from the disk.

They wait for the engine's thread (`between_steps`), never the other way round.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import TypeVar

import numpy as np

from jlora.adapters.names import is_key
from jlora.adapters.registry import Record
from jlora.engine.built import Built
from jlora.engine.futures import BetweenSteps, error_of, failure_of, follow
from jlora.engine.records import NewAdapter
from jlora.engine.shelf import Reading
from jlora.engine.sources import check_version, read_adapter
from jlora.errors import Busy, DataLoss, InvalidArgument, JloraError, NotFound, ResourceExhausted, ShortOfMemory
from jlora.ports import File, Files, Folder, Stamp, System
from jlora.replica import Load
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

# Reads a registered adapter, from its files or from elsewhere: takes its record, what reads its files, and whether
# nobody waits any more.
Read = Callable[[Record, Callable[[], NewAdapter], Callable[[], bool]], NewAdapter]

LOADERS = 4  # adapters that callers load at once
PIECE = 1 << 20  # bytes read between two looks at whether anybody still waits


class Loaders:
    """The loader threads of one replica."""

    def __init__(self, built: Built, system: System, between_steps: BetweenSteps):
        self._engine = built.engine
        self._adapters = built.engine.adapters
        self._swapper = built.parts.swapper
        self._reader = built.reader
        self._between_steps = between_steps
        self._threads = system.threads
        self.read: Read = lambda record, from_files, unwanted: from_files()
        self.loads = system.threads.pool("jlora-load", LOADERS)
        self._reads = system.threads.pool("jlora-read", built.parts.readers)
        self._readings: set[Reading] = set()  # submitted and not ended; only the engine's thread

    def close(self) -> None:
        """Begins no more; those under way end by themselves."""
        for reading in self._readings:
            reading.cancelled = True
        self.loads.shutdown(wait=False, cancel_futures=True)
        self._reads.shutdown(wait=False, cancel_futures=True)

    # -- what requests wait for -----------------------------------------------------------------

    def begin(self) -> None:
        """Starts the readings that are due; the engine's thread calls, between two steps."""
        for reading in self._adapters.shelf.begin():
            self._readings.add(reading)
            self._reads.submit(self._read, reading)

    def _read(self, reading: Reading) -> None:
        try:
            with _within_memory(reading.record.name):
                new = self._version(reading)
                self._adapters.fill(reading.blocks, new)
        except BaseException as e:  # SystemExit, too: the requests would wait for ever
            error = e
            if not isinstance(e, _Unwanted):
                log.warning("adapter %s cannot be read from %.4096r: %s", reading.record.name, reading.record.path, e)
            self._between_steps(lambda: self._end(reading, lambda: self._unread(reading, error_of(error))))
        else:
            self._between_steps(lambda: self._end(reading, lambda: self._engine.arrived(reading, new)))

    def _unread(self, reading: Reading, error: Exception) -> None:
        """Its path may have had another version's files when it was registered: the next request describes it anew."""
        self._engine.unread(reading, error)
        record = reading.record
        if isinstance(error, DataLoss) and is_key(record.name) and not record.load_cost_s:
            self._adapters.forget(record)

    def _end(self, reading: Reading, command: Callable[[], None]) -> None:
        self._readings.remove(reading)
        command()

    def _version(self, reading: Reading) -> NewAdapter:
        """The version that was registered, read and packed. Raises NotFound, DataLoss, ResourceExhausted."""
        record = reading.record
        new = self.read(record, lambda: self._from_files(reading), lambda: reading.cancelled)
        check_version(record, new.digest, new.header)
        if len(new.projections) != len(reading.blocks):
            raise DataLoss(f"adapter {record.name!r}: its size has changed on the disk")
        return new

    def _from_files(self, reading: Reading) -> NewAdapter:
        record = reading.record
        files = _Watched(self._reader.files, lambda: reading.cancelled)
        try:
            return read_adapter(record.name, record.path, replaced(self._reader, files=files))
        except NotFound as e:
            raise NotFound(f"adapter {record.name!r}: its files are gone from the disk ({e})") from e
        except Busy:
            raise  # of descriptors or memory: it says nothing of the files
        except (InvalidArgument, ResourceExhausted) as e:
            what = "have changed on the disk" if record.digest else "cannot be used"  # so far the headers were read
            raise DataLoss(f"adapter {record.name!r}: its files {what}: {e}") from e

    # -- what callers ask for -------------------------------------------------------------------

    def load(self, load: Load, settled: Callable[[AdapterInfo], Future[AdapterInfo]]) -> Future[AdapterInfo]:
        """Loads an adapter; done when `settled` says so. The caller can cancel it until requests can use it."""
        answer: Future[AdapterInfo] = Future()
        try:
            # The answer will hold an error whose traceback holds the frames of `_load`; held by them, it is a cycle.
            loading = self.loads.submit(self._load, weakref.proxy(answer), load)
        except RuntimeError:  # the pool is shut down
            return self._between_steps(lambda: self._adapters.get(load.name))  # fails: the replica is closed

        def over(loaded: Future[AdapterInfo]) -> None:
            if (error := failure_of(loaded)) is None:
                follow(settled(loaded.result()), answer)
            elif answer.running() or not answer.cancelled() and answer.set_running_or_notify_cancel():
                answer.set_exception(error)

        loading.add_done_callback(over)
        waiting = weakref.ref(loading)  # the pool holds it while it waits for a loader; held here, it would be a cycle
        answer.add_done_callback(lambda answer: answer.cancelled() and (found := waiting()) and found.cancel())
        return answer

    def _load(self, answer: Future[AdapterInfo], load: Load) -> AdapterInfo:
        """Publishes an adapter, unless the caller cancels `answer` before."""
        adapters, between_steps = self._adapters, self._between_steps

        def now(command: Callable[[], T]) -> T:
            done = between_steps(command)
            try:
                self._threads.wait(done)
                return done.result()
            finally:
                del done  # it holds its error, whose traceback holds this frame: a cycle

        def begin() -> None:
            _go_on(answer)
            if not load.replace:
                adapters.check_free(load.name)  # fail before the files are read

        def reserve() -> tuple[int, ...]:
            _go_on(answer)
            return adapters.reserve(new, load.replace)

        def claim(otherwise: Callable[[], None]) -> None:
            if not answer.set_running_or_notify_cancel():  # from here on it is too late to cancel
                otherwise()
                raise CancelledError

        def publish() -> AdapterInfo:
            claim(lambda: adapters.cancel(blocks))
            return adapters.publish(new, blocks, load.pinned, load.replace)

        def register() -> AdapterInfo:
            claim(lambda: None)
            return adapters.register(new, load.replace)

        now(begin)
        # Not `answer.cancelled`: that would hold the answer, which will hold an error's frames.
        files = _Watched(self._reader.files, lambda: answer.cancelled())
        with _within_memory(load.name):
            new = read_adapter(load.name, load.path, replaced(self._reader, files=files))
        if load.lazy:  # it was read once, so that its digest is pinned
            new = replaced(new, data=None)
            return now(register)
        blocks = now(reserve)
        try:
            with _within_memory(load.name):
                adapters.fill(blocks, new)
        except BaseException:
            between_steps(lambda: adapters.cancel(blocks))
            raise
        return now(publish)


@contextmanager
def _within_memory(name: str) -> Iterator[None]:
    """What runs here reads an adapter: without memory for it, this load alone fails."""
    try:
        yield
    except MemoryError as e:
        raise ShortOfMemory(f"adapter {name!r}: too little memory to read it; try again later") from e


class _Unwanted(JloraError):
    """Nobody waits any more for what is being read."""


@dataclass(frozen=True, slots=True)
class _Watched(Files):
    """Files whose reading ends when `cancelled` says so."""

    files: Files
    cancelled: Callable[[], bool]

    @contextmanager
    def folder(self, directory: str) -> Iterator[Folder]:
        with self.files.folder(directory) as folder:
            yield _WatchedFolder(folder, self.cancelled)

    def stamp(self, directory: str, names: Iterable[str]) -> Stamp:
        return self.files.stamp(directory, names)


@dataclass(frozen=True, slots=True)
class _WatchedFolder(Folder):
    folder: Folder
    cancelled: Callable[[], bool]

    def names(self, most: int) -> list[str]:
        return self.folder.names(most)

    @contextmanager
    def open(self, name: str) -> Iterator[File]:
        with self.folder.open(name) as file:
            yield _WatchedFile(file.size, file, self.cancelled)

    def unchanged(self) -> bool:
        return self.folder.unchanged()

    def stamp(self) -> Stamp:
        return self.folder.stamp()


@dataclass(slots=True)
class _WatchedFile(File):
    size: int
    file: File
    cancelled: Callable[[], bool]

    def read(self, size: int) -> np.ndarray:
        pieces = []
        while size > 0:
            if self.cancelled():
                raise _Unwanted("nobody waits for it any more")
            pieces.append(self.file.read(min(size, PIECE)))
            size -= len(pieces[-1])
            if not len(pieces[-1]):
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint8), *pieces])


def _go_on(answer: Future) -> None:
    """Ends the caller's work if nobody waits for its answer any more."""
    if answer.cancelled():
        raise CancelledError
