"""The pauses between two messages of many streams: those that end at nearly the same time share a timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PARTS = 4  # of a pause; all pauses that end in the same part of time end together, at its beginning


class Pauses:
    """Pauses of `pause_s` seconds, or up to a quarter less. For the event loop's thread only."""

    def __init__(self, pause_s: float):
        self._part_s = pause_s / PARTS
        self._ends: dict[int, list[Callable[[], None]]] = {}  # by the part of time

    @classmethod
    def of(cls, coalesce_s: float) -> Pauses | None:
        """As `serve.coalesce_s` says; 0: none."""
        return cls(coalesce_s) if coalesce_s else None

    def begin(self, end: Callable[[], None]) -> None:
        """Calls `end` after a pause."""
        loop = asyncio.get_running_loop()
        part = int(loop.time() / self._part_s) + PARTS
        if part not in self._ends:
            self._ends[part] = []
            loop.call_at(part * self._part_s, self._end, part)
        self._ends[part].append(end)

    def _end(self, part: int) -> None:
        for end in self._ends.pop(part):
            end()
