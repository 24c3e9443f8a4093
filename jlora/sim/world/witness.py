"""Says which requests a failed copy, or an adapter that cannot be read, may end: those that need it, and no others."""

from __future__ import annotations

from typing import Any

from jlora.cache.transfer import Copy
from jlora.engine.ports import Parts
from jlora.engine.shelf import Reading
from jlora.sim.world.disk import Disk
from jlora.sim.world.sites import Planted, Shortage
from jlora.sim.world.struck import Struck
from jlora.types import TokenEvent


class Witness:
    """Watches the parts of an engine, on its thread, where the product catches errors: `found` keeps what is wrong."""

    def __init__(self, parts: Parts, disk: Disk, struck: Struck, found: list[AssertionError]):
        self._scheduler: Any = parts.scheduler  # the world looks behind the protocol
        self._disk, self._struck, self._found = disk, struck, found
        self._begun: dict[Reading, float] = {}
        self._now = parts.clock
        fail_copy, remove, registry = self._scheduler.fail_copy, parts.registry.remove, parts.registry

        def watched(copy: Copy, error: Exception, now: float) -> list[TokenEvent]:
            self._copy(copy, error)
            return fail_copy(copy, error, now)

        def removed(name: str) -> Any:
            struck.gone(name)
            return remove(name)

        vars(self._scheduler)["fail_copy"] = watched
        vars(registry)["remove"] = removed

    def watch(self, shelf: Any) -> None:
        """Looks when readings begin."""
        begin = shelf.begin

        def begun() -> list[Reading]:
            readings = begin()
            self._begun |= dict.fromkeys(readings, self._now())
            return readings

        vars(shelf)["begin"] = begun

    def unread(self, reading: Reading, error: Exception) -> None:
        """An adapter could not be read."""
        began, record, struck = self._begun.pop(reading), reading.record, self._struck
        waiting = [s for s in self._scheduler.queue if s.adapter is reading.node]
        cause = error.__cause__ if isinstance(error.__cause__, Shortage) else error
        if reading.cancelled:
            excused = not waiting
        elif isinstance(cause, Planted | Shortage):
            excused = struck.reaches(cause, record.name)
        else:
            changed = self._disk.digest(record.path) != record.digest
            excused = changed or struck.disturbed(record.path, began)
        if not excused:
            self._found.append(
                AssertionError(f"adapter {record.name} could not be read, and nothing was wrong: {error}")
            )
        struck.unread(record.name)
        for sequence in waiting:
            struck.request(sequence.handle)

    def _copy(self, copy: Copy, error: Exception) -> None:
        if not self._struck.failed(copy, error):
            self._found.append(AssertionError(f"a copy has failed, and nothing was wrong with it: {error}"))
        nodes, scheduler = set(copy.nodes), self._scheduler
        for sequence in (*scheduler.running, *scheduler.loading):
            lease = sequence.lease
            if lease is not None and (lease.adapter in nodes or not nodes.isdisjoint(lease.path)):
                self._struck.request(sequence.handle)
