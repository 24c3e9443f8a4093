"""Where a replica's adapters are, told to a router change by change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from jlora.adapters.registry import Record
from jlora.cluster.proto import link_pb2 as link
from jlora.ports import Clock

LOOK_S = 0.1  # between two looks
SHARE = 50  # times its last look's time that it pauses at least: a look at 10,000 adapters takes milliseconds
MOST = 1024  # changes in one message

Records = Callable[[], Iterable[Record]]


class Tiers:
    """What one router has been told. For one event loop."""

    def __init__(self, records: Records, clock: Clock = time.monotonic):
        self._records = records
        self._clock = clock
        self._told: dict[str, str] = {}
        self._seen: dict[str, Record] = {}  # at the last look
        self._due = 0.0

    def record(self, key: str | None) -> Record | None:
        """Of an adapter that a request uses; None for the base."""
        if key is None or key in self._seen:
            return self._seen.get(key or "")
        return next((record for record in self._records() if record.name == key), None)

    def changes(self) -> list[link.Residency]:
        """What has changed since the last call; the rest of too many comes with the next one."""
        began = self._clock()
        if began < self._due:
            return []
        now = self._seen = {record.name: record for record in self._records()}
        changes = [
            link.Residency(key=key, tier=record.tier, rank=max(record.ranks.values(), default=0))
            for key, record in now.items()
            if self._told.get(key) != record.tier
        ][:MOST]
        changes += [link.Residency(key=key) for key in self._told.keys() - now.keys()]
        for change in changes:
            self._told[change.key] = change.tier
            if not change.tier:
                del self._told[change.key]
        ended = self._clock()
        self._due = ended + max(LOOK_S, SHARE * (ended - began))
        return changes
