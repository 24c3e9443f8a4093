"""Adapters that are on the disk only, and their way into memory. Plain Python, no jax.

             open               begin              arrive
    DISK ──────────▶ expected ─────────▶ read ────────────▶ HOST ──▶ HBM
      ▲                  │                 │                 │
      └──nobody waits────┴─────────────────┴──host is full───┘

Requests queue for an adapter as soon as it is expected, and are admitted once it has arrived; others
overtake them meanwhile. Loader threads read, a bounded number at once: first what requests wait for, in
the order of service, then hints. Room on the host is taken before an adapter is read, so what is read is
never held twice. If there is none, the reading waits until a request ends, and the later ones behind it. An
adapter larger than what stays of the host (`CacheManager.host_room`) waits alone, for an unpin, say.

Adapters that always have requests would keep their memory for ever. So once `OVERTAKES` requests have been
admitted while a reading waited, idle adapters make way for it although later requests wait for them, and
later requests are not admitted where they would keep another one in memory. A request that has answered in part
keeps its adapter, and is admitted: it ends.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from dataclasses import dataclass, field

from jlora.adapters.registry import Record
from jlora.cache.tree import AdapterNode
from jlora.engine.admission import OVERTAKES
from jlora.engine.ports import Parts
from jlora.errors import FailedPrecondition

log = logging.getLogger(__name__)

HINTS = 16  # adapters that hints may have on their way from the disk


@dataclass(slots=True, eq=False)
class Reading:
    """One adapter on its way from the disk to the host tier.

    Attributes:
        hinted: it is worth reading although no request waits for it.
        blocks: of the host, once it is being read.
        cancelled: nobody waits for it any more: the thread that reads it may stop.
        then: pins that wait until it has arrived, or its name means another version.
        since: leases that had been granted when the host had no room for it first; -1 before.
    """

    record: Record
    node: AdapterNode
    hinted: bool = False
    blocks: tuple[int, ...] = ()
    cancelled: bool = False
    then: list[Future[None]] = field(default_factory=list)
    since: int = -1

    @property
    def wanted(self) -> bool:
        return bool(self.node.wanted or self.then or self.hinted) and not self.node.gone

    @property
    def place(self) -> float:
        """In the order of service, of the first request that waits for it. A command waits for no other; hints last."""
        return -math.inf if self.then else next(iter(self.node.wanted), math.inf)


class Shelf:
    """The readings of one engine, at most `readers` at a time. All methods belong to the engine's thread."""

    def __init__(self, parts: Parts):
        self._manager = parts.scheduler.manager
        self._registry = parts.registry
        self._most = parts.readers
        self._readings: dict[AdapterNode, Reading] = {}
        self._under_way: set[Reading] = set()
        self._refused = -1  # the cache's epoch when the host tier had no room

    @property
    def reading(self) -> int:
        """Adapters on their way, those too that wait for a reader or for host memory."""
        return sum(node.reading and not node.gone for node in self._readings)

    def open(self, record: Record) -> Reading:
        """Expects the adapter in memory; requests may queue for `record.node` from now on."""
        self._refused = -1  # it may be smaller, or wanted more, than what was refused
        if record.node.gone:
            record.node = self._manager.expect_adapter(record.node.uid, record.node.size, record.node)
            self._readings[record.node] = Reading(record, record.node)
        return self._readings[record.node]

    def hint(self, record: Record) -> bool:
        """Reads the adapter when the readers have nothing else to do; whether it is on its way."""
        if not record.node.reading and sum(reading.hinted for reading in self._readings.values()) >= HINTS:
            return False
        self.open(record).hinted = True
        return True

    def unpin(self, name: str) -> None:
        """Ends the pins that wait for an adapter of this name: the last word counts."""
        for reading in self._readings.values():
            if reading.record.name == name:
                for future in reading.then:
                    future.set_exception(FailedPrecondition(f"adapter {name!r} was unpinned before it was read"))
                reading.then.clear()

    def begin(self) -> list[Reading]:
        """The readings to start now; each ends with `take` or `drop`."""
        if not self._readings:
            return []
        self._cancel_unwanted()
        if len(self._under_way) >= self._most or self._refused == self._manager.epoch:
            return []
        self._manager.give_way_to = math.inf  # until one has waited too long again
        begun: list[Reading] = []
        idle = [reading for reading in self._readings.values() if not reading.blocks]
        while idle and len(self._under_way) < self._most:
            reading = min(idle, key=lambda reading: reading.place)
            blocks = self._reserve(reading)
            if blocks is None:
                self._refused = self._manager.epoch
                room = self._manager.host_room
                if reading.node.size <= room:
                    break
                idle = [reading for reading in idle if reading.node.size <= room]
                continue
            idle.remove(reading)
            reading.blocks = blocks
            self._under_way.add(reading)
            begun.append(reading)
        return begun

    def _reserve(self, reading: Reading) -> tuple[int, ...] | None:
        """Host blocks for the adapter, also those of others if it has waited too long; None if there is no room."""
        manager, size, place = self._manager, reading.node.size, reading.place
        blocks = manager.reserve(size)
        if blocks is not None or place == math.inf or size > manager.host_room:
            return blocks
        if reading.since < 0:
            reading.since = manager.grants
        if manager.grants - reading.since < OVERTAKES:
            return None
        while blocks is None and (node := manager.make_way(size, place)) is not None:
            self._readings[node] = Reading(self._registry.by_uid(node.uid), node)
            blocks = manager.reserve(size)
        if blocks is None and size <= manager.host_room - len(manager.reserved):  # a read may hang on its mount
            manager.give_way_to = place
        return blocks

    def take(self, reading: Reading) -> bool:
        """The adapter's data is in its blocks: it is in memory now. False if nobody waits for it any more."""
        self._under_way.remove(reading)
        if reading.node.gone:
            self._manager.cancel(reading.blocks)
            return False
        del self._readings[reading.node]
        self._manager.arrive(reading.node, reading.blocks, visited=not reading.node.wanted)
        return True

    def drop(self, reading: Reading) -> None:
        """It could not be read; the caller has ended the requests for it."""
        self._under_way.discard(reading)
        self._manager.cancel(reading.blocks)
        self._forget(reading)

    def abandon(self, error: Exception) -> None:
        """The engine is gone: pins that wait for the disk get the error."""
        for reading in self._readings.values():
            reading.cancelled = True
            for future in reading.then:
                if not future.done():
                    future.set_exception(error)

    def _cancel_unwanted(self) -> None:
        for reading in [reading for reading in self._readings.values() if not reading.wanted]:
            log.info("adapter %s is not read: nobody waits for it any more", reading.record.name)
            self._forget(reading)

    def _forget(self, reading: Reading) -> None:
        """If it is being read, its blocks are free when the thread has ended."""
        reading.cancelled = True
        self._readings.pop(reading.node, None)
        self._manager.give_way_to, self._refused = math.inf, -1  # `begin` asks again
        if not reading.node.gone:
            self._manager.give_up(reading.node)
        for future in reading.then:
            if not future.done():
                future.set_result(None)
