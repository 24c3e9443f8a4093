"""The table of current versions as other routers follow it: an epoch, and what has changed since an earlier one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jlora.cluster.directory import Version
from jlora.cluster.registry import Registry

KEPT = 4096  # changes; a router that missed more gets the whole table


@dataclass(frozen=True, slots=True)
class Change:
    """What leads from an earlier table to that of `epoch`; the whole of it if `whole`."""

    epoch: int
    whole: bool
    versions: tuple[Version, ...]
    gone: tuple[str, ...] = ()


class Table:
    """The epoch of a registry. Any thread may call; watchers are told on the thread of the change."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._lock = threading.Lock()
        self._epoch = 1
        self._changes: deque[tuple[int, str]] = deque()
        self._forgotten = 1  # the epoch of the latest change that is not kept; of the first table, none is
        self._watchers: list[Callable[[], None]] = []

    @property
    def epoch(self) -> int:
        return self._epoch

    def changed(self, names: Iterable[str]) -> int:
        """The registry has changed at these names; the new epoch."""
        with self._lock:
            self._epoch += 1
            self._changes.extend((self._epoch, name) for name in names)
            while len(self._changes) > KEPT:
                self._forgotten, _ = self._changes.popleft()
            epoch, watchers = self._epoch, list(self._watchers)
        for told in watchers:
            told()
        return epoch

    def since(self, epoch: int) -> Change:
        """What a router misses that has the table of `epoch` (0: none)."""
        with self._lock:
            now = self._epoch
            known = epoch >= self._forgotten
            names = list(dict.fromkeys(name for at, name in self._changes if at > epoch))
        if not known:
            return Change(now, True, tuple(self._registry.versions()))
        here = self._registry.known(names)
        return Change(now, False, tuple(here.values()), tuple(name for name in names if name not in here))

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Calls `told` after every change; the answer ends that."""
        with self._lock:
            self._watchers.append(told)

        def end() -> None:
            with self._lock:
                self._watchers.remove(told)

        return end
