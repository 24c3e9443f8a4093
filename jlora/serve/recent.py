"""Times to first token of the requests that ended in the last minute."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

WINDOW_S = 60.0
MOST = 10_000  # requests; a busier minute keeps its latest


class Summary(NamedTuple):
    """The number of requests and their time to first token in seconds (0 if there are none)."""

    count: int
    mean_s: float
    p99_s: float


class Recent:
    """A sliding window. Not thread-safe; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ended: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, ttft_s: float) -> None:
        self._ended.append((self._clock(), ttft_s))

    def summary(self) -> Summary:
        while self._ended and self._ended[0][0] < self._clock() - WINDOW_S:
            self._ended.popleft()
        times = sorted(ttft for _, ttft in self._ended) or [0.0]
        return Summary(len(self._ended), fmean(times), times[math.ceil(0.99 * len(times)) - 1])
