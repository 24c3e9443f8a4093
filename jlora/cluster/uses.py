"""Who still needs a version that is no longer current: this router's requests, and those of other routers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Old:
    """A version that was replaced or unloaded at `epoch`; `then` runs once nobody needs it."""

    epoch: int
    then: Callable[[], None]


class Uses:
    """Counts, by a version's key. Any thread may call; `then` runs on the thread that ends the last use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._routers: dict[str, tuple[int, frozenset[str]]] = {}  # the table's epoch there, and the keys in use
        self._old: dict[str, _Old] = {}

    def begin(self, key: str) -> None:
        with self._lock:
            self._requests[key] += 1

    def end(self, key: str) -> None:
        with self._lock:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
            due = self._due()
        _run(due)

    def count(self, key: str) -> int:
        """Requests of this router."""
        return self._requests[key]

    def keys(self) -> list[str]:
        """What requests of this router use."""
        with self._lock:
            return list(self._requests)

    def saw(self, router: str, epoch: int, keys: Iterable[str]) -> None:
        """Another router knows the table of `epoch`, and its requests use these versions."""
        with self._lock:
            self._routers[router] = epoch, frozenset(keys)
            due = self._due()
        _run(due)

    def left(self, router: str) -> None:
        """It has gone: replicas end its requests."""
        with self._lock:
            self._routers.pop(router, None)
            due = self._due()
        _run(due)

    def retire(self, key: str, epoch: int, then: Callable[[], None]) -> None:
        """Calls `then` once nobody needs the version, which is not current any more from `epoch` on."""
        with self._lock:
            self._old[key] = _Old(epoch, then)
            due = self._due()
        _run(due)

    def holds(self, key: str) -> bool:
        """Whether a request may need the version, or what follows its last one is yet to run."""
        with self._lock:
            return key in self._old or key in self._requests or any(key in keys for _, keys in self._routers.values())

    def _due(self) -> list[Callable[[], None]]:
        routers = self._routers.values()
        free = [
            key
            for key, old in self._old.items()
            if key not in self._requests and all(epoch >= old.epoch and key not in keys for epoch, keys in routers)
        ]
        return [self._old.pop(key).then for key in free]


def _run(due: Iterable[Callable[[], None]]) -> None:
    for then in due:
        then()
