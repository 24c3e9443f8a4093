"""The one reading of a trace's times: which turn may be asked when, and with which prompt.

    take(now)       turns that are due by now, each with its due time; their users are then busy
    prompt(turn)    everything its session said and heard, then what the turn adds
    answered(...)   the answer joins the context, and the user's next turn gets its due time
    next_due()      when something is due next, of what can be known now

A real replay calls these with the wall clock, a simulation with a virtual one: both ask the same
questions in the same order. Turns before time 0 are the history: `take(HISTORY)` gives them until
there are no more; answer them with a time before 0.
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
    """Plays `turns`, in the order of their trace, `speed` times as fast.

    Times given and returned are seconds of the replay; 0 is the start of the trace.
    """

    def __init__(self, turns: Iterable[Turn], speed: float = 1.0):
        self._speed = speed
        self._count = itertools.count()  # ties go in the order of the trace
        self._coming: dict[int, deque[Turn]] = {}
        self._contexts: dict[int, list[int]] = {}
        self._due: list[tuple[float, int, Turn]] = []
        for turn in turns:
            self._coming.setdefault(who(turn), deque()).append(turn)
        for queue in self._coming.values():
            self._push(queue.popleft(), -float("inf"))
        self._left = sum(map(len, self._coming.values())) + len(self._due)

    def __len__(self) -> int:
        """Turns not taken yet."""
        return self._left

    def next_due(self) -> float | None:
        """When the next turn is due; None if all that is left waits for answers, or nothing is left."""
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> list[tuple[float, Turn]]:
        """The turns due by `now`, earliest first, with their due times."""
        taken = []
        while self._due and self._due[0][0] <= now:
            due, _, turn = heapq.heappop(self._due)
            taken.append((due, turn))
        self._left -= len(taken)
        return taken

    def rest(self) -> list[Turn]:
        """The turns not taken yet."""
        return [*(turn for _, _, turn in self._due), *itertools.chain(*self._coming.values())]

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Token ids; of a taken turn, before it is answered."""
        return (*self._contexts.get(turn.session, ()), *turn.adds)

    def answered(self, turn: Turn, tokens: Sequence[int], now: float) -> tuple[float, Turn] | None:
        """`tokens` answered a taken turn (none: it failed, and its question stays); its user may go on.

        Returns:
            The user's next turn and its due time; None if that was the last.
        """
        if not turn.aside:
            self._contexts.setdefault(turn.session, []).extend((*turn.adds, *tokens))
        queue = self._coming[who(turn)]
        return self._push(queue.popleft(), now) if queue else None

    def _push(self, turn: Turn, answered: float) -> tuple[float, Turn]:
        if turn.after is not None and answered >= 0:
            due = answered + turn.after / self._speed
        else:
            due = max(turn.at / self._speed, answered)
        heapq.heappush(self._due, (due, next(self._count), turn))
        return due, turn


def who(turn: Turn) -> int:
    """The number of a turn's user; a session without one is its own."""
    return turn.session if turn.user is None else turn.user
