"""Watches the adapters' files on a thread of its own: those that come, change and go. No jax.

a new directory in adapters.dir       registered; the first request has it read
a change before the first read        registered anew
a change after it                     read and compared; if other weights have come, what is in memory is served, as
                                      long as its share of the host tier lasts; a read from the disk fails
gone                                  what is in memory is served; once it is on the disk only, its name is unknown,
                                      unless all are gone, as if the disk were not mounted
back                                  read and compared; what is in memory may leave it again

Polling is enough: a round takes a few microseconds of system calls for each adapter, and at most a
fiftieth of the time. inotify would need a watch for every directory, and network file systems have none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from jlora.adapters.names import check_name, removed
from jlora.adapters.registry import Record
from jlora.engine.built import Built
from jlora.engine.futures import BetweenSteps, failure_of
from jlora.engine.loading import Compared
from jlora.engine.sources import check_version, pinned_as, read_adapter, scan_adapter
from jlora.errors import InvalidArgument, JloraError, NotFound, ResourceExhausted, Unavailable
from jlora.ports import Stamp, System
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

POLL_S = 5.0  # between two rounds
READ_S = 0.1  # of a round: after so long it reads no further adapter
AGAIN_S = 600.0  # before files that were not an adapter's own, or could not be read, are read again
MOST_REFUSED = 10_000  # paths that are remembered, beside those of adapters.dir
SHARE = 50  # times its last round's time that it pauses at least


class Watch:
    """The watch of one engine. `look` makes a round; `run` repeats it until `close`."""

    def __init__(self, built: Built, system: System, between_steps: BetweenSteps):
        directory = built.info.config.adapters.dir
        self._system = system
        self._adapters = built.engine.adapters
        self._reader = replace(built.reader, wait_s=0.0)  # the next round reads what finds no memory in this one
        self._catalogue = built.catalogue
        self._directory = os.path.abspath(directory) if directory else ""
        self._between_steps = between_steps
        self._ended = system.threads.event()
        self._known = {record.path for record in self._adapters.records()}
        self._refused: dict[str, Stamp] = {}  # directories that are no adapters as they are, or were unloaded
        self._waits: dict[str, Stamp] = {}  # those for which there is no room; the log has named them
        # uid of an adapter in memory -> the files at its path, which are not its own (None: there are none)
        self._others: dict[int, Stamp | None] = {}
        self._read_s = 0.0  # that this round has read for
        self._again = 0.0  # when all are read again

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
        records = [record for record in self._adapters.records() if record.path]
        known = {record.path for record in records}
        for path in self._known - known:
            if (stamp := self._reader.stamp(path)) is not None:
                self._refused[path] = stamp  # unloaded: it comes back when its files change, or with a restart
        self._known = known
        self._resident([record for record in records if not (record.node.gone or record.node.reading)])
        resting = [(record, self._reader.stamp(record.path)) for record in records if record.node.gone]
        gone = removed(self._directory, known) if any(stamp is None for _, stamp in resting) else set()
        for record, stamp in resting:
            if record.path in gone:
                log.info("adapter %s is not known any more: its files are gone", record.name)
                self._known.discard(record.path)
                self._now(partial(self._adapters.forget, record))
            elif stamp not in (None, record.stamp) and not record.digest:
                self._register(record.name, record.path, record)
        names, found = {record.name for record in records}, list(self._found())
        there = {path for _, path in found}
        self._waits = {path: stamp for path, stamp in self._waits.items() if path in there}
        if len(self._refused) > MOST_REFUSED:
            self._refused = {path: stamp for path, stamp in self._refused.items() if path in there}
        for name, path in found:
            if path not in self._known and name not in names:
                self._register(name, path)

    def _resident(self, records: list[Record]) -> None:
        """Says of adapters in memory whether the disk has them, all between two steps."""
        self._read_s, now = 0.0, self._system.clock()
        if now >= self._again:
            self._others, self._again = {}, now + AGAIN_S
        uids = {record.node.uid for record in records}
        self._others = {uid: stamp for uid, stamp in self._others.items() if uid in uids}
        compared = [found for record in records if (found := self._compared(record, self._reader.stamp(record.path)))]
        if compared:
            self._now(lambda: self._adapters.compared(compared))

    def _compared(self, record: Record, stamp: Stamp | None) -> Compared | None:
        """None if nothing has changed."""
        uid = record.node.uid
        if stamp is not None and stamp == record.stamp:
            self._others.pop(uid, None)
            own = True
        elif self._others.get(uid, ()) == stamp:
            own = False
        elif stamp is None:
            log.warning("adapter %s: its files are gone; it is served from memory", record.name)
            self._others[uid] = None
            own = False
        elif self._read_s < READ_S and (found := self._recognise(record, stamp)) is not None:
            return found
        else:  # a copy of another replica's may leave until it is known whether the disk has it
            own = not record.stamp and record.node.backed
        return None if own == record.node.backed else Compared(record, stamp, own)

    def _recognise(self, record: Record, stamp: Stamp) -> Compared | None:
        """Reads what has come to the adapter's path: files may be touched, copied or restored without a change.

        None if there is no memory to read it now.
        """
        began = self._system.clock()
        try:
            new = read_adapter(record.name, record.path, self._reader)
            check_version(record, new.digest, new.header)
        except MemoryError:
            return None
        except JloraError as e:
            self._others[record.node.uid] = stamp
            log.warning(
                "adapter %s is served from memory: its files have changed or cannot be read: %s", record.name, e
            )
            return Compared(record, stamp, own=False)
        finally:
            self._read_s += self._system.clock() - began
        return Compared(record, new.stamp, own=True)

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

    def _register(self, name: str, path: str, old: Record | None = None) -> None:
        stamp = self._reader.stamp(path)
        if stamp is None or self._refused.get(path) == stamp:
            return
        try:
            check_name(name)
        except InvalidArgument as e:
            self._leave_out(name, path, stamp, e)
            return
        row, adapters = self._catalogue.row(name), self._adapters  # its errors are not the adapter's
        try:
            new = pinned_as(row, scan_adapter(name, path, self._reader))
        except JloraError as e:
            self._leave_out(name, path, stamp, e)
            return
        try:
            self._now(lambda: adapters.register(new) if old is None else adapters.renew(old, new))
        except Unavailable:
            raise
        except ResourceExhausted as e:  # pins leave no room, or the engine is busy: the next round tries again
            if self._waits.get(path) != stamp:
                log.warning("adapter %r is left out for now: %s", name, e)
            self._waits[path] = stamp
        except JloraError as e:
            self._leave_out(name, path, stamp, e)
        else:
            self._known.add(path)
            log.info("adapter %s is found in adapters.dir", name)
            if old is None and row is not None and row.pinned and row.path == new.path:  # the last start had no disk
                self._pin(name)

    def _leave_out(self, name: str, path: str, stamp: Stamp, error: JloraError) -> None:
        log.warning("adapter %r is left out as it is: %s", name, error)
        self._refused[path] = stamp

    def _pin(self, name: str) -> None:
        """Pins an adapter again once it is read."""
        try:
            self._now(lambda: self._adapters.pin_again(name).add_done_callback(partial(_told, name)))
        except (NotFound, Unavailable):
            log.debug("adapter %s was unloaded just now, or the engine ends", name)
        except ResourceExhausted as e:
            log.warning("adapter %s is not pinned: %s", name, e)


def _told(name: str, pinned: Future[AdapterInfo]) -> None:
    if (error := failure_of(pinned)) is not None:
        log.warning("adapter %s is not pinned: %s", name, error)
