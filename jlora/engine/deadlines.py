"""When requests expire. Plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from typing import Protocol

SPARE = 64  # entries of ended requests, beside twice the live ones, before the heap is rebuilt


class Live(Container[int], Protocol):
    """The handles of live requests."""

    def __len__(self) -> int: ...


class Deadlines:
    """The deadlines of requests by handle. Those of ended requests stay until they pass, or are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, handle: int) -> None:
        heapq.heappush(self._heap, (deadline, handle))

    def passed(self, now: float) -> Iterator[int]:
        """Takes out the handles whose deadline has passed."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    def forget(self, live: Live) -> None:
        """Drops the others, once most are of requests that have ended."""
        if len(self._heap) > 2 * len(live) + SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
