"""How soon conversations and adapters are used again, learned from earlier ones. Plain Python, no jax.

A conversation is silent after an answer. It continues after some seconds, or never. Nobody knows which,
but the table counts how many earlier conversations continued at which age of silence:

    began      silences so far: every request ends one or opens a conversation, and begins another
    back[k]    of these, how many ended at an age between EDGES[k] and EDGES[k + 1]
    left(k)    = began - back[0] - ... - back[k - 1], still silent at age EDGES[k]

    rate(age) = back[k] / seconds spent silent in k,    seconds = width of k * mean of left(k), left(k + 1)

This is the occurrence / exposure rate of an actuary's life table, a hazard rate. Old counts decay, so
the table follows the traffic. It starts with `PRIOR` silences that end by a power law. Measurements
replace all but `LASTING` of them, so ages without measurements keep a rate. The table is a dozen numbers,
whatever the cache holds.

Adapters are few beside conversations, so `Silences` also counts adapters that are still silent. Without
them, a replica that has served for a minute would know only the adapters that came back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

EDGES = (0.0, *(2.0**k for k in range(13)))  # seconds: 0, 1, 2, 4, ... 4096
RECENT = 256.0  # silences that the table remembers, about
PRIOR, LASTING = 32.0, 1.0  # silences it begins with, and how many of them never fade
SHAPE, SCALE_S = 0.25, 5.0  # of the prior: (SCALE_S / (SCALE_S + age)) ** SHAPE of it last longer than `age`
LOOK_S = 1.0  # seconds between looks at all adapters
MEMORY_S = 1000.0  # seconds in which counts of adapters fade to 1/e
LEAST = 0.02  # share of the silences that never end: rates at ages without measurements stay finite


class Returns:
    """The life table of one cache's conversations."""

    def __init__(self) -> None:
        left = [(SCALE_S / (SCALE_S + age)) ** SHAPE for age in EDGES]
        self._prior = [a - b for a, b in pairwise(left)]  # of one silence
        self._weight = PRIOR
        self._began = 0.0
        self._back = [0.0] * len(self._prior)
        self._rates = self._made()

    def add(self, age: float | None) -> None:
        """A request has come, from a conversation that was silent for `age` seconds; None: it opens one."""
        keep = 1 - 1 / RECENT
        self._weight = max(keep * self._weight, LASTING)
        self._back = [keep * count for count in self._back]
        self._began = keep * self._began + 1
        if age is not None and age < EDGES[-1]:
            self._back[_interval(age)] += 1
        self._rates = self._made()

    def rate(self, age: float) -> float:
        """How often a second a conversation that has been silent for `age` seconds continues."""
        if age < EDGES[-1]:
            return self._rates[_interval(age)]
        return self._rates[-1] * EDGES[-1] / age

    def _made(self) -> list[float]:
        began = self._began + self._weight
        rates, left = [], began
        for seen, prior, (begin, end) in zip(self._back, self._prior, pairwise(EDGES), strict=True):
            back = seen + self._weight * prior
            after = max(left - back, LEAST * began)
            rates.append(back / ((end - begin) * (left + after) / 2))
            left = after
        return rates


class Silences:
    """How soon adapters are used again: how many silences ended, over how long adapters were silent.

        rate(age) = ended[k] / seconds that adapters have spent in silences of that age

    It begins with the counts of one adapter that follows the prior of `Returns`; that part never fades.
    """

    def __init__(self) -> None:
        self._seconds = [end - begin for begin, end in pairwise(EDGES)]
        self._ended = [SHAPE * math.log((SCALE_S + end) / (SCALE_S + begin)) for begin, end in pairwise(EDGES)]
        self._prior = [*self._ended], [*self._seconds]
        self._looked = -math.inf

    def end(self, age: float) -> None:
        """An adapter that was idle for `age` seconds is asked for."""
        if age < EDGES[-1]:
            self._ended[_interval(age)] += 1

    def look(self, ages: Iterable[float], now: float) -> None:
        """Takes in the ages of all idle adapters; at most once in `LOOK_S`."""
        spent = now - self._looked
        if spent < LOOK_S:
            return
        self._looked = now
        if math.isinf(spent):  # the first look
            return
        keep = math.exp(-spent / MEMORY_S)
        for counted, prior in zip((self._ended, self._seconds), self._prior, strict=True):
            counted[:] = [first + keep * (count - first) for count, first in zip(counted, prior, strict=True)]
        for age in ages:
            if age < EDGES[-1]:
                self._seconds[_interval(age)] += spent

    def rate(self, age: float) -> float:
        """How often a second an adapter that has been idle for `age` seconds is asked for."""
        if age < EDGES[-1]:
            k = _interval(age)
            return self._ended[k] / self._seconds[k]
        return self._ended[-1] / self._seconds[-1] * EDGES[-1] / age


def _interval(age: float) -> int:
    """The interval between two edges that an age below the last edge lies in."""
    return math.frexp(age)[1] if age >= 1 else 0
