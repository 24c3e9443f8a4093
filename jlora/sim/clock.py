"""Virtual seconds."""

from __future__ import annotations

import math

START_S = 1.0  # the clock at the start: 0 means "never" in the cache's records


class VirtualClock:
    """Seconds that only grow, when a model moves them on.

    Attributes:
        now: the present.
        horizon: an idle replica must not sleep past this moment: something happens outside then.
    """

    def __init__(self, now: float = START_S):
        self.now = now
        self.horizon = math.inf

    def __call__(self) -> float:
        return self.now

    def advance(self, to: float) -> None:
        """Moves on to `to`, if that is later."""
        self.now = max(self.now, to)
