"""Observers of a simulated replica. They read its state after every event and change nothing. No jax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jlora.cache import inspect
from jlora.cache.manager import CacheManager
from jlora.cache.tree import Node
from jlora.sim.replica import Replica

SPARSE = 10  # samples per count of invalid KV, where a count walks the whole tree

# Called after every step of a replay, and after every round of the idle replica's monitor.
Observer = Callable[[Replica], None]


@dataclass(slots=True)
class Series:
    """Samples of the device, every `every_s` seconds after the clock's time `start`.

    Attributes:
        most: most samples. At this number every other sample is dropped, and the interval doubles.
        at: seconds since `start`.
        adapters, history_kv, running_kv, invalid_kv: shares of the device's blocks. Invalid KV is
            history whose prefix or adapter is not on the device. For a policy without dependencies,
            every `SPARSE`th sample counts it, and the samples between repeat that count.
        running, waiting: number of sequences.
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

    def __call__(self, replica: Replica) -> None:
        """Takes a sample if one is due; a long event gives a single one."""
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
        """The share of invalid KV, or the last one if counting again would take too long."""
        policy = manager.policy
        if policy.binds(manager.base):  # no invalid KV
            return 0.0
        walks = not policy.binds(Node(manager.base, b""))
        if walks and len(self.invalid_kv) % SPARSE:
            return self.invalid_kv[-1]
        return inspect.invalid_kv(manager) / manager.total

    def describe(self) -> dict[str, Any]:
        names = ("at", "adapters", "history_kv", "running_kv", "invalid_kv", "running", "waiting")
        return {name: getattr(self, name) for name in names}

    def mean(self, name: str) -> float:
        values = getattr(self, name)
        return sum(values) / len(values) if values else 0.0
