"""Times to first token of the requests that ended in the last minute: what an operator looks at first."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

WINDOW_S = 60.0
MOST = 10_000  # of a busier minute the latest


class Summary(NamedTuple):
    """How many requests, and their time to first token in seconds (0 if there are none)."""

    count: int
    mean_s: float
    p99_s: float


class Recent:
    """A sliding window; used on one event loop. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ended: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, ttft_s: float) -> None:
        """A request has ended that had its first token after `ttft_s`."""
        self._ended.append((self._clock(), ttft_s))

    def summary(self) -> Summary:
        """Of the last minute. O(n log n) in its requests, on demand only."""
        while self._ended and self._ended[0][0] < self._clock() - WINDOW_S:
            self._ended.popleft()
        times = sorted(ttft for _, ttft in self._ended)
        if not times:
            return Summary(0, 0.0, 0.0)
        return Summary(len(times), sum(times) / len(times), times[math.ceil(0.99 * len(times)) - 1])
