"""The virtual clock."""

from __future__ import annotations

import math

START_S = 1.0  # time at the start; 0 means "never" in the cache's records


class VirtualClock:
    """Seconds that a model advances. A pause ends at `horizon`, the next outside event, at the latest."""

    def __init__(self, now: float = START_S):
        self.now = now
        self.horizon = math.inf

    def __call__(self) -> float:
        return self.now

    def advance(self, to: float) -> None:
        """Moves to `to`, unless that is in the past."""
        self.now = max(self.now, to)
