"""What routers know and use: who still needs a version that is no longer current, and who lacks the present table.

A router's requests go on while its link to the controller is broken, or another controller takes over. So what it
has said counts for a while after its stream has ended, and at the start every router may need every version.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

HOLD_S = 30.0  # that a router may take to come back


@dataclass(slots=True)
class _Router:
    """What one stream of a router has said.

    Attributes:
        epoch: of the table that it has.
        keys: versions that are not current in that table and that its requests use.
        until: when it stops to count.
    """

    name: str
    epoch: int = 0
    keys: frozenset[str] = frozenset()
    until: float = math.inf


@dataclass(slots=True)
class _Old:
    """A version that was replaced or unloaded at `epoch`; `then` runs once nobody needs it."""

    epoch: int
    then: Callable[[], None]


class Uses:
    """Counts, by a version's key. Any thread may call; `then` runs on the thread that ends the last use."""

    def __init__(self, last: int = 0, hold_s: float = HOLD_S, clock: Callable[[], float] = time.monotonic):
        """`last`: routers may use versions up to this number already, and have not said so."""
        self._lock = threading.Lock()
        self._last, self._hold_s, self._clock = last, hold_s, clock
        self._began = clock()
        self._requests: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self._routers: dict[object, _Router] = {}  # by stream
        self._old: dict[str, _Old] = {}
        self._unknown: list[tuple[int, Callable[[], None]]] = []  # epochs that a router lacks, and what waits for it

    def begin(self, key: str) -> None:
        with self._lock:
            self._requests[key] += 1
            self._begun[key] += 1

    def end(self, key: str) -> None:
        with self._lock:
            self._requests[key] -= 1
            if self._requests[key]:
                return
            del self._requests[key]
            due = self._freed([key])  # every request ends here: a walk through all old versions would hold up the rest
        _run(due)

    def count(self, key: str) -> int:
        """Requests of this router."""
        return self._requests[key]

    def begun(self, key: str) -> int:
        """Requests of this router since its start."""
        return self._begun[key]

    def keys(self) -> list[str]:
        """What requests of this router use."""
        with self._lock:
            return list(self._requests)

    def saw(self, stream: object, router: str, epoch: int, keys: Iterable[str]) -> None:
        """Another router knows the table of `epoch`, and its requests use these versions."""
        with self._lock:
            self._routers[stream] = _Router(router, epoch, frozenset(keys))
            if epoch:  # it has said all that it uses: its earlier streams count no more
                for old in [s for s, r in self._routers.items() if r.name == router and r.until < math.inf]:
                    del self._routers[old]
            due = self._due()
        _run(due)

    def left(self, stream: object) -> None:
        """The stream has ended. The router's requests may go on, and it may come back."""
        with self._lock:
            if (router := self._routers.get(stream)) is not None:
                router.until = self._clock() + self._hold_s
        self.look()

    def leaves(self, router: str) -> None:
        """The router stops, and none of its requests goes on."""
        with self._lock:
            self._routers = {stream: one for stream, one in self._routers.items() if one.name != router}
        self.look()

    def look(self) -> None:
        """Forgets routers that have been away for too long; call it again and again."""
        with self._lock:
            now = self._clock()
            for stream in [stream for stream, router in self._routers.items() if router.until <= now]:
                del self._routers[stream]
            due = self._due()
        _run(due)

    def retire(self, key: str, epoch: int, then: Callable[[], None]) -> None:
        """Calls `then` once nobody needs the version, which is not current any more from `epoch` on."""
        with self._lock:
            self._old[key] = _Old(epoch, then)
            due = self._freed([key])
        _run(due)

    def tell(self, epoch: int, then: Callable[[], None]) -> None:
        """Calls `then` once every router that follows has the table of `epoch`.

        One whose stream has ended does not count: it begins again with the whole table.
        """
        with self._lock:
            self._unknown.append((epoch, then))
            due = self._known()
        _run(due)

    def holds(self, key: str) -> bool:
        """Whether a request may need the version, or what follows its last one is yet to run."""
        with self._lock:
            used = any(key in router.keys for router in self._routers.values())
            return key in self._old or key in self._requests or used or self._begins()

    def _begins(self) -> bool:
        """Whether routers of an earlier controller may not have come back yet."""
        return self._clock() < self._began + self._hold_s

    def _due(self) -> list[Callable[[], None]]:
        return [*self._freed(list(self._old)), *self._known()]

    def _freed(self, keys: Iterable[str]) -> list[Callable[[], None]]:
        """What follows for those of the old versions that nobody needs any more."""
        free = [key for key in keys if key in self._old and self._is_free(key, self._old[key].epoch)]
        for key in free:
            self._begun.pop(key, None)
        return [self._old.pop(key).then for key in free]

    def _known(self) -> list[Callable[[], None]]:
        """What waits for epochs that every router has by now."""
        known = min((router.epoch for router in self._routers.values() if router.until == math.inf), default=math.inf)
        told = [then for epoch, then in self._unknown if epoch <= known]
        self._unknown = [one for one in self._unknown if one[0] > known]
        return told

    def _is_free(self, key: str, epoch: int) -> bool:
        if key in self._requests or (int(key.rpartition("@")[2]) <= self._last and self._begins()):
            return False
        return all(router.epoch >= epoch and key not in router.keys for router in self._routers.values())


def _run(due: Iterable[Callable[[], None]]) -> None:
    for then in due:
        then()
