"""Where sessions are at home: the replicas that have served them last."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import count

MOST = 65_536  # sessions: some 10 MB


class Sessions:
    """Remembers the `most` sessions that were used last."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._homes: OrderedDict[str, str] = OrderedDict()  # the least recently used first
        self._counts: Counter[str] = Counter()  # by replica
        self._turns = count(1)
        self._last: dict[str, int] = {}  # by replica: the turn of its last request

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: str) -> str:
        """The session's replica; "" without one."""
        return self._homes.get(session, "")

    def order(self, replica: str) -> tuple[int, int]:
        """Sorts replicas that are equal otherwise: first the home of the fewest sessions, which will ask again."""
        return self._counts[replica], self._last.get(replica, 0)

    def served(self, session: str, replica: str) -> None:
        """The session is at home there from now on; "" is none."""
        self._last[replica] = next(self._turns)
        if not session:
            return
        self._left(self._homes.pop(session, ""))
        self._homes[session] = replica
        self._counts[replica] += 1
        if len(self._homes) > self._most:
            self._left(self._homes.popitem(last=False)[1])

    def _left(self, replica: str) -> None:
        if replica:
            self._counts[replica] -= 1
            if not self._counts[replica]:
                del self._counts[replica]
