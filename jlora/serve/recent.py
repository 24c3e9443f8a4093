"""Times of the requests that ended in the last minute: to the first token, and per output token after it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

WINDOW_S = 60.0
MOST = 10_000  # requests; a busier minute keeps its latest


class Spread(NamedTuple):
    """A distribution in seconds: the number of values, their mean and percentiles (0 if there are none)."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class Summary(NamedTuple):
    """The time to the first token, and the mean time per output token of requests with more than one."""

    ttft: Spread
    tpot: Spread


class Recent:
    """A sliding window. Not thread-safe; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ended: deque[tuple[float, float, float]] = deque(maxlen=MOST)

    def add(self, ttft_s: float, tpot_s: float) -> None:
        self._ended.append((self._clock(), ttft_s, tpot_s))

    def summary(self) -> Summary:
        while self._ended and self._ended[0][0] < self._clock() - WINDOW_S:
            self._ended.popleft()
        return Summary(
            _spread([ttft for _, ttft, _ in self._ended]), _spread([tpot for _, _, tpot in self._ended if tpot])
        )


def _spread(values: Sequence[float]) -> Spread:
    times = sorted(values) or [0.0]
    return Spread(len(values), fmean(times), *(times[math.ceil(p * len(times)) - 1] for p in (0.5, 0.9, 0.99)))
