"""Candidates in order of worth, without scanning the tree. Plain Python, no jax.

A policy gives every candidate a *static* key: one that stays right while no request touches the node,
however much time passes. So a heap with lazy deletion keeps the order: a touch pushes a new entry
and makes the old one stale, and a decision compares the tops.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable

from jlora.cache.tree import Node

Entry = tuple[float, int, int, Node]  # key, tie, stamp of the node when it was pushed, node


class Order:
    """A heap of nodes; `valid` says whether a node is still a candidate."""

    __slots__ = ("_front", "_heap", "_valid", "_sign", "_ties", "_limit")
    FRONT = 32  # entries kept in order, unless more are asked for at once

    def __init__(self, valid: Callable[[Node], bool], sign: int = 1):
        self._front: list[Entry] = []  # in order; no entry of the heap comes before the last of these
        self._heap: list[Entry] = []
        self._valid = valid
        self._sign = sign  # 1 to take the smallest keys first, -1 the largest
        self._ties = 0
        self._limit = 64

    def push(self, node: Node, key: float) -> None:
        """Adds the node; an entry pushed for an earlier stamp becomes stale."""
        self._ties += 1
        entry = (self._sign * key, self._ties, node.stamp, node)
        if self._front and entry < self._front[-1]:
            bisect.insort(self._front, entry)
            if len(self._front) <= self.FRONT:
                return
            entry = self._front.pop()
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._limit:  # drop stale entries; amortised O(1)
            self._heap = [entry for entry in self._heap if self._current(entry)]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def first(self, count: int) -> list[Node]:
        """The first candidates, at most `count`, left in place.

        They are kept in `_front`. Making room asks again after every eviction, and then takes one entry
        from the heap instead of `count`.
        """
        front, heap = self._front, self._heap
        found: list[Node] = []
        at = 0
        while len(found) < count:
            if at == len(front):
                if not heap:
                    break
                front.append(heapq.heappop(heap))
            if self._current(front[at]):
                found.append(front[at][3])
                at += 1
            else:
                del front[at]
        return found

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._front) + len(self._heap)

    def _current(self, entry: Entry) -> bool:
        return entry[2] == entry[3].stamp and self._valid(entry[3])
