"""Observers of a simulated replica: they look after every event and change nothing. No jax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from jlora.cache import inspect
from jlora.cache.manager import CacheManager
from jlora.cache.tree import Node
from jlora.sim.replica import Replica

SPARSE = 10  # of so many samples one counts invalid KV where that walks the whole tree


class Observer(Protocol):
    """Is called after every event of a replay."""

    def look(self, replica: Replica) -> None:
        """The replica has made a step, or a round of its monitor."""
        ...


class Integrity:
    """Checks every invariant of the cache after every event. O(nodes + blocks) each: for tests."""

    def look(self, replica: Replica) -> None:
        """Raises AssertionError if an invariant is broken."""
        inspect.check_integrity(replica.manager)


@dataclass(slots=True)
class Series:
    """The device over time, every `every_s` seconds from `start` of the clock on.

    Attributes:
        most: so many samples at most: every other one is dropped, and they come half as often from then on.
        at: seconds since `start`.
        adapters, history_kv, running_kv, invalid_kv: shares of the device's blocks; invalid KV is
            history whose prefix or adapter is not on the device. Under an ablation without dependencies
            every `SPARSE`th sample counts it, and stands for those until the next.
        running, waiting: sequences.
    """

    start: float
    every_s: float
    most: float = math.inf
    at: list[float] = field(default_factory=list)
    adapters: list[float] = field(default_factory=list)
    history_kv: list[float] = field(default_factory=list)
    running_kv: list[float] = field(default_factory=list)
    invalid_kv: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def look(self, replica: Replica) -> None:
        """Takes a sample if one is due; a long event gives one, not many."""
        at = replica.clock.now - self.start
        if at < 0 or (self.at and at < self.at[-1] + self.every_s):
            return
        manager = replica.manager
        device, total = manager.device, manager.total
        self.at.append(at)
        self.adapters.append(device.adapters / total)
        self.history_kv.append(device.history_kv / total)
        self.running_kv.append(device.running_kv / total)
        self.invalid_kv.append(self._invalid(manager))
        self.running.append(len(replica.scheduler.running))
        self.waiting.append(replica.scheduler.waiting)
        if len(self.at) > self.most:
            self.every_s *= 2
            for column in self.describe().values():
                del column[1::2]

    def _invalid(self, manager: CacheManager) -> float:
        """The share of invalid KV; the last one where counting it again would take too long."""
        policy = manager.policy
        if policy.binds(manager.base):  # there is none
            return 0.0
        walks = not policy.binds(Node(manager.base, b""))
        if walks and len(self.invalid_kv) % SPARSE:
            return self.invalid_kv[-1]
        return inspect.invalid_kv(manager) / manager.total

    def describe(self) -> dict[str, Any]:
        """Plain lists."""
        names = ("at", "adapters", "history_kv", "running_kv", "invalid_kv", "running", "waiting")
        return {name: getattr(self, name) for name in names}

    def mean(self, name: str) -> float:
        """The mean of a column."""
        values = getattr(self, name)
        return sum(values) / len(values) if values else 0.0
