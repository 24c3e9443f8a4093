"""Places adapters on simulated replicas by the controller's own `Homes` and `Asking`. No jax."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from jlora.cluster.asking import Asking
from jlora.cluster.demand import Load, Recent, Told, Trend
from jlora.cluster.homes import HOST, Homes, Kind, Room, Rule, Todo
from jlora.cluster.placement import Wanted, moves
from jlora.cluster.routing.table import Table
from jlora.sim.member import Member

Place = Kind | Literal[""]


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
        loads = {str(adapter): load for adapter, load in placed.loads.items()}
        sizes = zip(placed.ranks, placed.sizes, strict=True)
        self._adapters = [Wanted(str(i), rank, 0.0, size) for i, (rank, size) in enumerate(sizes)]
        self._load = Load(Recent(loads) if placed.rule.kind == "dlora" else Trend())
        self._homes = Homes(placed.rule)
        self._asking = Asking()
        self._lacking = False  # homes lacked adapters at the last look
        by_name = {member.name: member for member in members}
        self._planned = set(by_name)  # the replicas of the last plan
        first = dict.fromkeys(map(str, range(len(placed.ranks))), 1.0)  # LoRAServe does not know them, dLoRA does
        self._rates: Mapping[str, float] = loads if placed.rule.kind == "dlora" and loads else first
        self._homes.begin(self._room(by_name), self._wanted(self._rates))
        self.table = kind(self._homes.parts, placed.rule.seed)
        for key, parts in self._homes.parts.items():
            for name in parts:
                by_name[name].preload(int(key))

    def told(self, adapter: int, told: Told) -> None:
        """What has become of an adapter's requests."""
        self._load.told(str(adapter), told)

    def lost(self, name: str) -> None:
        """A replica has ended, with all that it was asked for."""
        self._asking.lost(name)

    def round(self, there: Mapping[str, Set[str]], now: float, close: bool = False) -> Todo:
        """What to ask replicas for, and what they may drop. Plans anew if replicas have come or gone.

        Args:
            there: replica that is up -> adapters in its memory, as its last message says.
            close: a time step ends now.
        """
        if close:
            self._rates = self._load.close(self._placed.every_s)
        if close or there.keys() != self._planned:
            self._plan(there)
        todo = self._homes.look(there)
        self.table.parts = self._homes.parts
        self._lacking = bool(todo.fetch)
        return Todo(list(self._asking.due(todo.fetch, now)), todo.drop)

    @property
    def settled(self) -> bool:
        """Whether another round has nothing to do, if nothing changes."""
        return self._homes.settled and not self._lacking

    def _plan(self, names: Collection[str]) -> None:
        self._planned = set(names)
        if self._placed.rule.kind not in ("loraserve", "dlora") or not self._planned:  # the others are placed once
            return
        last = self._homes.wanted
        self._homes.plan(self._room(names), self._wanted(self._rates))
        self.moved += len(moves(last, self._homes.wanted)[0])
        self._asking.begin()

    def _room(self, names: Collection[str]) -> Room:
        placed = self._placed
        return Room(dict.fromkeys(names, placed.room), dict.fromkeys(names, int(HOST * placed.host)), placed.points)

    def _wanted(self, rates: Mapping[str, float]) -> list[Wanted]:
        return [replace(one, rate=rates[one.key]) if one.key in rates else one for one in self._adapters]
