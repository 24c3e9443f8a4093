"""A policy of merging, under a clock of its own."""

from __future__ import annotations

from jlora.cache.tree import AdapterNode
from jlora.engine.merging import BUDGET, AdapterCost, Merging, Times

SWITCH_S = 0.1
PRICE_S = 2 * SWITCH_S  # of a merge
GAIN_S = 0.3 * 0.02  # of a merged step where adapters are 0.3 of it


class Bench:
    """A policy under a clock of its own; what it chooses is merged at once."""

    def __init__(self, share: float = 0.3, starve_s: float = 2.0, policy: Merging | None = None):
        self.now, self.merged = 0.0, None
        self.policy = policy or Merging(8, starve_s, Times(AdapterCost(share)))
        self.saw(False, 0.02)
        self.nodes = [AdapterNode(uid, 4) for uid in range(1, 5)]
        self.waits: list[float] = []
        self.merges = 0
        self.spent = self.latency = 0.0  # request-seconds of switches, and of steps

    def live(self, *counts: int) -> None:
        for node, count in zip(self.nodes, counts, strict=False):
            while self.policy.live[node] < count:
                self.policy.joined(node)
            while self.policy.live[node] > count:
                self.policy.left(node)

    def saw(self, merged: bool, seconds: float) -> None:
        """Many decode steps of eight sequences that took so long."""
        for _ in range(100):
            self.policy.times.observe(merged, 8, 4, seconds)

    def saves(self) -> None:
        """Steps of one request have run for so long that the price of a merge for eight is there."""
        self.policy.joined(self.nodes[0])
        self.policy.ran(0.0, 8 * PRICE_S / BUDGET)
        self.policy.left(self.nodes[0])

    def step(self, times: int = 1, seconds: float = 0.02) -> None:
        waited = 0.0
        for _ in range(times):
            self.now += seconds
            before, self.merged = self.merged, self.policy.choose(self.now, self.merged, SWITCH_S)
            self.merges += self.merged is not None and before is None
            if self.merged is not before:  # each piece keeps those waiting who are there
                self.policy.spent(SWITCH_S)
                self.spent += SWITCH_S * self.policy.live.total()
            self.policy.ran(float(self.merged is not None), seconds)
            self.latency += seconds * self.policy.live.total()
            waited = waited + seconds if self.merged and len(self.policy.live) > 1 else 0.0
            self.waits.append(waited)
