"""Policies that know no ranks: the baselines of CaraServe's evaluation (section 7.5)."""

from __future__ import annotations

from dataclasses import dataclass

from jlora.cluster.routing.policy import Ask, Bookless, Drawing, cheapest, up
from jlora.cluster.view import ReplicaView, View

FIRST_FIT = 32  # requests of a replica that count as full, as in Punica


def load(replica: ReplicaView) -> int:
    """Requests there: this router's, or those of all routers if the last message told more."""
    return max(replica.sent, replica.running + replica.waiting)


class Random(Drawing):
    """Any replica, with equal chances."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)

    def choose(self, view: View, ask: Ask) -> str | None:
        replicas = up(view)
        return self._random.choice(replicas).name if replicas else None


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, view: View, ask: Ask) -> str | None:
        chosen = self.peek(view, ask)
        self._next += 1
        return chosen

    def peek(self, view: View, ask: Ask) -> str | None:
        replicas = up(view)
        return replicas[self._next % len(replicas)].name if replicas else None


class MostIdle(Bookless):
    """The one with the fewest requests; of equals the first."""

    def choose(self, view: View, ask: Ask) -> str | None:
        return cheapest(view, load)


@dataclass(frozen=True, slots=True)
class FirstFit(Bookless):
    """The first with fewer than `most` requests, which packs them tightly; the most idle one if all are full."""

    most: int = FIRST_FIT

    def choose(self, view: View, ask: Ask) -> str | None:
        for replica in view.values():
            if replica.health == "up" and load(replica) < self.most:
                return replica.name
        return MostIdle().choose(view, ask)
