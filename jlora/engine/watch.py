"""Watches the adapters' files on a thread of its own: those that come, change and go. No jax.

a new directory in adapters.dir       registered; the first request has it read
a change before the first read        registered anew
a change after it                     what is in memory stays there and is served; a read from the disk fails
gone                                  likewise; once it is on the disk only, its name is unknown
back, and it came from a peer         read and compared; what is in memory may leave it again

Polling is enough: a round takes a few microseconds of system calls for each adapter, and at most a
fiftieth of the time. inotify would need a watch for every directory, and network file systems have none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from jlora.adapters.names import check_name
from jlora.adapters.registry import Record
from jlora.engine.built import Built
from jlora.engine.futures import BetweenSteps
from jlora.engine.sources import check_version, read_adapter, scan_adapter
from jlora.errors import JloraError, Unavailable
from jlora.ports import Stamp, System

log = logging.getLogger(__name__)

POLL_S = 5.0  # between two rounds
SHARE = 50  # times its last round's time that it pauses at least


class Watch:
    """The watch of one engine. `look` makes a round; `run` repeats it until `close`."""

    def __init__(self, built: Built, system: System, between_steps: BetweenSteps):
        directory = built.info.config.adapters.dir
        self._system = system
        self._adapters = built.engine.adapters
        self._reader = built.reader
        self._directory = os.path.abspath(directory) if directory else ""
        self._between_steps = between_steps
        self._ended = system.threads.event()
        self._known = {record.path for record in self._adapters.records()}
        self._refused: dict[str, Stamp] = {}  # directories that are no adapters as they are, or were unloaded

    def run(self) -> None:
        pause, clock = POLL_S, self._system.clock
        while not self._ended.wait(pause):
            began = clock()
            try:
                self.look()
            except Unavailable:  # the replica has stopped
                return
            except Exception:
                log.exception("the watch of the adapters' files has failed; it goes on")
            pause = max(POLL_S, SHARE * (clock() - began))

    def close(self) -> None:
        self._ended.set()

    def look(self) -> None:
        """Compares the disk with what is registered."""
        records = {record.path: record for record in self._adapters.records() if record.path}
        for path in self._known - set(records):
            if (stamp := self._reader.stamp(path)) is not None:
                self._refused[path] = stamp  # unloaded: it comes back when its files change, or with a restart
        self._known = set(records)
        for path, record in records.items():
            self._compare(record, self._reader.stamp(path))
        names = {record.name for record in records.values()}
        for name, path in self._found():
            if path not in self._known and name not in names:
                self._register(name, path)

    def _compare(self, record: Record, stamp: Stamp | None) -> None:
        intact, node = stamp == record.stamp, record.node
        if not (node.gone or node.reading or record.stamp or stamp is None):
            self._recognise(record, stamp)
        elif not node.gone:
            if node.backed != intact and not node.reading:
                if not intact:
                    log.warning("adapter %s: its files have changed or are gone; it stays in memory", record.name)
                self._now(lambda: self._adapters.back(record, intact))
        elif stamp is None:
            if record.path.startswith(self._directory + os.sep) and self._directory:
                log.info("adapter %s is not known any more: its files are gone", record.name)
                self._known.discard(record.path)
                self._now(lambda: self._adapters.forget(record))
        elif not intact and not record.digest:
            self._register(record.name, record.path, replace=True)

    def _recognise(self, record: Record, stamp: Stamp) -> None:
        """Files have come to the path of an adapter that was copied without any."""
        if self._refused.get(record.path) == stamp:
            return
        try:
            new = read_adapter(record.name, record.path, self._reader)
            check_version(record, new.digest, new.header)
        except JloraError as e:
            log.warning("adapter %s: the files at its path are not its own; it stays in memory: %s", record.name, e)
            self._refused[record.path] = stamp
            self._now(lambda: self._adapters.back(record, False))
        else:
            self._now(lambda: self._adapters.found(record, new.stamp))

    def _found(self) -> Iterator[tuple[str, str]]:
        if not self._directory:
            return
        try:
            with os.scandir(self._directory) as entries:
                found = sorted(entry.name for entry in entries)
        except OSError as e:
            log.warning("adapters.dir cannot be read: %s", e.strerror)
            return
        yield from ((name, os.path.join(self._directory, name)) for name in found)

    def _now(self, command: Callable[[], object]) -> None:
        self._system.threads.wait(done := self._between_steps(command))
        done.result()

    def _register(self, name: str, path: str, replace: bool = False) -> None:
        stamp = self._reader.stamp(path)
        if stamp is None or self._refused.get(path) == stamp:
            return
        try:
            check_name(name)
            new = scan_adapter(name, path, self._reader)
            self._now(lambda: self._adapters.register(new, replace))
        except Unavailable:
            raise
        except JloraError as e:
            log.warning("adapter %s is left out as it is: %s", name, e)
            self._refused[path] = stamp
        else:
            self._known.add(path)
            log.info("adapter %s is found in adapters.dir", name)
