"""Places adapters on simulated replicas, time step by time step (LoRAServe). No jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jlora.cluster.balance import preload
from jlora.cluster.demand import Demand
from jlora.cluster.placement import Placement, Wanted, contiguous, loraserve, moves, random_placement
from jlora.cluster.routing.table import Table
from jlora.sim.member import Member

Place = Literal["", "loraserve", "dlora", "random", "contiguous"]
PLACES: tuple[Place, ...] = ("loraserve", "dlora", "random", "contiguous")
LOOK_S = 0.1  # between two looks for adapters that have come


@dataclass(frozen=True, slots=True)
class Placed:
    """What a placement needs to know.

    Attributes:
        points: tokens per second of a replica by rank.
        every_s: length of a time step.
        ahead: requests go to a new place when the adapter has come; else at once, and the first one fetches it.
        loads: requests of each adapter over a long time, by index, for dLoRA's preload; empty: equal.
        room: blocks of a replica's pool.
    """

    kind: Place
    ranks: Sequence[int]
    sizes: Sequence[int]
    points: Mapping[int, float]
    every_s: float = 60.0
    ahead: bool = True
    seed: int = 0
    loads: Mapping[int, float] = field(default_factory=dict)
    room: int = 0


class Placing:
    """The controller of a simulated service. `table` routes by the placement that holds."""

    def __init__(self, placed: Placed, members: Sequence[Member]):
        self.moved = 0  # fetches that it asked for
        self.most = 0  # adapters of the replica that has had most
        self._placed = placed
        self._members = {member.name: member for member in members}
        self._demand = Demand()
        self._next: Placement = self._place(dict.fromkeys(map(str, range(len(placed.ranks))), 1.0), {})
        self._pending: dict[str, Mapping[str, float]] = {}  # adapters whose new places have not got them yet
        self._leaving: list[tuple[str, str]] = []  # adapters, and replicas that no longer serve them
        self.table = Table(dict(self._next), placed.seed)
        for key, parts in self._next.items():
            for name in parts:
                self._members[name].preload(int(key))

    def served(self, adapter: int, tokens: int) -> None:
        """A request has ended."""
        self._demand.served(str(adapter), tokens)

    def lost(self, name: str) -> None:
        """A replica has ended. Its adapters are placed elsewhere with the next time step."""
        del self._members[name]
        self._next = {key: parts for key, all in self._next.items() if (parts := _without(all, name))}
        self._pending = {key: parts for key, all in self._pending.items() if (parts := _without(all, name))}

    def back(self, member: Member) -> None:
        """A replica begins anew, with nothing."""
        self._members[member.name] = member

    def step(self) -> None:
        """Ends a time step, and plans the next."""
        rates = self._demand.close(self._placed.every_s)
        self.most = max([self.most, *(member.stored for member in self._members.values())])
        if self._placed.kind != "loraserve" or not self._members:  # the others are placed once
            return
        last, self._next = self._next, self._place(rates, self._next)
        for key, name in moves(last, self._next)[0]:
            self.moved += 1
            if self._placed.ahead:
                self._members[name].ask(int(key))
        self._pending = {key: parts for key, parts in self._next.items() if self.table.parts.get(key) != parts}

    def look(self) -> bool:
        """Switches the adapters whose new places have them, and drops them elsewhere at the next look.

        By then, what was sent to the old places has arrived there. Returns whether to look again.
        """
        parts = dict(self.table.parts)
        for key, name in self._leaving:
            if name not in parts[key] and name in self._members:
                self._members[name].forget(int(key))
        self._leaving.clear()
        for key, new in list(self._pending.items()):
            if self._placed.ahead and not all(self._members[name].has(int(key)) for name in new):
                continue
            self._leaving += [(key, name) for name in parts[key] if name not in new]
            parts[key] = new
            del self._pending[key]
        self.table.parts = parts
        return bool(self._pending or self._leaving)

    def _place(self, rates: Mapping[str, float], last: Placement) -> Placement:
        placed, names = self._placed, list(self._members)
        wanted = [
            Wanted(str(i), rank, rates.get(str(i), 0.0), size)
            for i, (rank, size) in enumerate(zip(placed.ranks, placed.sizes, strict=True))
        ]
        if placed.kind == "random":
            return random_placement(names, wanted, placed.seed)
        if placed.kind == "contiguous":
            return contiguous(names, wanted)
        if placed.kind == "dlora":
            return self._preloaded(names)
        return loraserve(names, wanted, placed.points, last)

    def _preloaded(self, names: Sequence[str]) -> Placement:
        """dLoRA's preload, in equal parts; an adapter that has no place by it gets one in turn."""
        placed = self._placed
        wanted = [
            Wanted(str(i), rank, placed.loads.get(i, 0.0) if placed.loads else 1.0, size)
            for i, (rank, size) in enumerate(zip(placed.ranks, placed.sizes, strict=True))
        ]
        found = preload(dict.fromkeys(names, placed.room), wanted)
        homes = {one.key: found.get(one.key) or [names[i % len(names)]] for i, one in enumerate(wanted)}
        return {key: dict.fromkeys(home, 1 / len(home)) for key, home in homes.items()}


def _without(parts: Mapping[str, float], name: str) -> dict[str, float]:
    return {each: part for each, part in parts.items() if each != name}
