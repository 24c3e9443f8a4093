"""Places adapters on simulated replicas, time step by time step, as the controller's own `Homes` say. No jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jlora.cluster.demand import Load, Recent, Told, Trend
from jlora.cluster.homes import HOST, Homes, Kind, Pair, Room, Rule
from jlora.cluster.placement import Wanted, moves
from jlora.cluster.routing.table import Table
from jlora.sim.member import Member

Place = Kind | Literal[""]
LOOK_S = 0.1  # between two looks for adapters that have come


@dataclass(frozen=True, slots=True)
class Placed:
    """What a placement needs to know.

    Attributes:
        points: tokens per second of a replica by rank.
        room: blocks of a replica's pool; host: of its host tier.
        every_s: length of a time step.
        loads: requests per second of each adapter over a long time before, by index, for dLoRA's preload; empty: equal.
    """

    rule: Rule
    ranks: Sequence[int]
    sizes: Sequence[int]
    points: Mapping[int, float]
    room: int
    host: int
    every_s: float = 60.0
    loads: Mapping[int, float] = field(default_factory=dict)


class Placing:
    """The controller of a simulated service. `table`, of this kind, routes by the placement that holds."""

    def __init__(self, placed: Placed, members: Sequence[Member], kind: type[Table] = Table):
        self.moved = 0  # new homes
        self._placed = placed
        self._members = {member.name: member for member in members}
        loads = {str(adapter): load for adapter, load in placed.loads.items()}
        sizes = zip(placed.ranks, placed.sizes, strict=True)
        self._adapters = [Wanted(str(i), rank, 0.0, size) for i, (rank, size) in enumerate(sizes)]
        self._load = Load(Recent(loads) if placed.rule.kind == "dlora" else Trend())
        self._homes = Homes(placed.rule)
        self._asked: set[Pair] = set()  # to fetch, since the last plan
        self._planned = set(self._members)  # the replicas of that plan
        first = dict.fromkeys(map(str, range(len(placed.ranks))), 1.0)  # LoRAServe does not know them, dLoRA does
        self._rates: Mapping[str, float] = loads if placed.rule.kind == "dlora" and loads else first
        self._homes.begin(self._room(), self._wanted(self._rates))
        self.table = kind(self._homes.parts, placed.rule.seed)
        for key, parts in self._homes.parts.items():
            for name in parts:
                self._members[name].preload(int(key))

    def told(self, adapter: int, told: Told) -> None:
        """What has become of an adapter's requests."""
        self._load.told(str(adapter), told)

    def lost(self, name: str) -> None:
        """A replica has ended, with all that it was asked for."""
        del self._members[name]
        self._asked = {pair for pair in self._asked if pair[1] != name}

    def back(self, member: Member) -> None:
        """A replica begins anew, with nothing."""
        self._members[member.name] = member

    def step(self) -> None:
        """Ends a time step, and plans the next."""
        self._rates = self._load.close(self._placed.every_s)
        self._plan()

    def look(self) -> bool:
        """Plans anew if replicas have come or gone. Fetches, switches and drops as the homes say.

        Returns whether to look again.
        """
        if self._members.keys() != self._planned:
            self._plan()
        todo = self._homes.look({name: member.held() for name, member in self._members.items()})
        for pair in todo.fetch:
            if pair not in self._asked:
                self._asked.add(pair)
                self._members[pair[1]].ask(int(pair[0]))
        for key, name in todo.drop:
            self._members[name].forget(int(key))
        self.table.parts = self._homes.parts
        return not self._homes.settled

    def _plan(self) -> None:
        self._planned = set(self._members)
        if self._placed.rule.kind not in ("loraserve", "dlora") or not self._members:  # the others are placed once
            return
        last = self._homes.wanted
        self._homes.plan(self._room(), self._wanted(self._rates))
        self.moved += len(moves(last, self._homes.wanted)[0])
        self._asked.clear()

    def _room(self) -> Room:
        placed, names = self._placed, self._members
        return Room(dict.fromkeys(names, placed.room), dict.fromkeys(names, int(HOST * placed.host)), placed.points)

    def _wanted(self, rates: Mapping[str, float]) -> list[Wanted]:
        return [replace(one, rate=rates[one.key]) if one.key in rates else one for one in self._adapters]
