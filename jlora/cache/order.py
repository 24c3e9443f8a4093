"""Candidates in order of what they are worth, without ever scanning the tree.

A policy gives every candidate a *static* key: one that stays right while the node is left alone,
however much time passes. So a heap with lazy deletion keeps the order: a touch pushes a new entry
and makes the old one stale, and a decision compares the tops. Plain Python, no jax.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from jlora.cache.tree import Node

Entry = tuple[float, int, int, Node]  # key, tie, stamp of the node when it was pushed, node


class Order:
    """A heap of nodes; `valid` says whether a node is still a candidate.

    Args:
        sign: 1 to take the smallest keys first, -1 the largest.
    """

    __slots__ = ("_heap", "_valid", "_sign", "_ties", "_limit")

    def __init__(self, valid: Callable[[Node], bool], sign: int = 1):
        self._heap: list[Entry] = []
        self._valid = valid
        self._sign = sign
        self._ties = 0
        self._limit = 64

    def push(self, node: Node, key: float) -> None:
        """Adds the node; an entry pushed for an earlier stamp becomes stale."""
        self._ties += 1
        heapq.heappush(self._heap, (self._sign * key, self._ties, node.stamp, node))
        if len(self._heap) > self._limit:  # drop stale entries; amortised O(1)
            self._heap = [entry for entry in self._heap if self._current(entry)]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def top(self) -> Node | None:
        """The first candidate, left in place."""
        heap = self._heap
        while heap:
            if self._current(heap[0]):
                return heap[0][3]
            heapq.heappop(heap)
        return None

    def first(self, count: int) -> list[Node]:
        """The first candidates, at most `count`, left in place. O(count log n)."""
        if count == 1:
            node = self.top()
            return [] if node is None else [node]
        taken = list(self._take(count))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [entry[3] for entry in taken]

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._heap)

    def _take(self, count: int) -> Iterator[Entry]:
        while self._heap and count:
            entry = heapq.heappop(self._heap)
            if self._current(entry):
                count -= 1
                yield entry

    def _current(self, entry: Entry) -> bool:
        return entry[2] == entry[3].stamp and self._valid(entry[3])
