"""When the turns of a trace are due, and with which prompts.

The load generator calls these with the wall clock, the simulator with a virtual one, so both send the
same turns in the same order. Turns before time 0 are the history: call `take(HISTORY)` until it
returns nothing, and answer with a time before 0.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence

from jlora.sim.trace import Turn

HISTORY = -math.ulp(0.0)  # the last moment before 0


class Script:
    """Plays `turns` in the order of their trace. Times are seconds from its start."""

    def __init__(self, turns: Iterable[Turn]):
        self._count = itertools.count()  # ties go in the order of the trace
        self._coming: dict[int, deque[Turn]] = {}
        self._contexts: dict[int, list[int]] = {}
        self._due: list[tuple[float, int, Turn]] = []
        for turn in turns:
            self._coming.setdefault(user_of(turn), deque()).append(turn)
        for queue in self._coming.values():
            self._push(queue.popleft(), -math.inf)
        self._left = sum(map(len, self._coming.values())) + len(self._due)

    def __len__(self) -> int:
        """Turns not taken yet."""
        return self._left

    def next_due(self) -> float | None:
        """When the next turn is due; None if every remaining turn waits for an answer, or none remains."""
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> list[tuple[float, Turn]]:
        """The turns due by `now`, earliest first, with their due times."""
        taken = []
        while self._due and self._due[0][0] <= now:
            due, _, turn = heapq.heappop(self._due)
            taken.append((due, turn))
        self._left -= len(taken)
        return taken

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Token ids of a turn that was taken and not answered yet."""
        return (*self._contexts.get(turn.session, ()), *turn.adds)

    def answered(self, turn: Turn, tokens: Sequence[int], now: float) -> tuple[float, Turn] | None:
        """Records the answer to a taken turn, empty if it failed. Returns the user's next turn and its due time."""
        if not turn.aside:
            self._contexts.setdefault(turn.session, []).extend((*turn.adds, *tokens))
        queue = self._coming[user_of(turn)]
        return self._push(queue.popleft(), now) if queue else None

    def _push(self, turn: Turn, answered: float) -> tuple[float, Turn]:
        if turn.after is not None and answered >= 0:
            due = answered + turn.after
        else:
            due = max(turn.at, answered)
        heapq.heappush(self._due, (due, next(self._count), turn))
        return due, turn


def user_of(turn: Turn) -> int:
    """The number of a turn's user, by default the session's."""
    return turn.session if turn.user is None else turn.user
