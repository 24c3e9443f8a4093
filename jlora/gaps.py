"""The longest gap of the last minute: how long a thread kept everything else waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60


class Gaps:
    """A sliding maximum, kept by the second. Not thread-safe; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seconds: deque[tuple[int, float]] = deque(maxlen=WINDOW_S + 1)  # a second, and its longest gap

    def note(self, seconds: float) -> None:
        """A gap of `seconds` has just ended."""
        now = int(self._clock())
        if self._seconds and self._seconds[-1][0] == now:
            seconds = max(seconds, self._seconds.pop()[1])
        self._seconds.append((now, seconds))

    def longest(self) -> float:
        """In seconds; 0 if none was noted."""
        since = self._clock() - WINDOW_S
        return max((seconds for at, seconds in self._seconds if at >= since), default=0.0)
