"""Where the adapters of a service live, as it changes. The controller and the simulator have the same one.

plan   a time step has ended: homes for the adapters that are asked for; the others stay where they are
look   what replicas have now: which homes lack their adapter, which adapters' requests go to new homes from now on,
       and which replicas have copies too many

It knows only what it is told, reads no clock and makes no calls. Its owner fetches and drops as it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from jlora.cluster.balance import preload
from jlora.cluster.placement import LEAST, Placement, Wanted, contiguous, fitted, loraserve, random_placement

Kind = Literal["loraserve", "dlora", "random", "contiguous"]
KINDS: tuple[Kind, ...] = ("loraserve", "dlora", "random", "contiguous")
Pair = tuple[str, str]  # an adapter and a replica
HOST = 0.75  # of a replica's host tier that a plan may fill; the rest is for KV and for what the plan does not know


@dataclass(frozen=True, slots=True)
class Rule:
    """How homes are chosen and used.

    Attributes:
        ahead: requests go to new homes when these have the adapter; else at once, and the first one fetches it.
        routed: requests go to homes alone, so copies elsewhere are dropped. Else replicas' caches say what they keep.
    """

    kind: Kind = "loraserve"
    ahead: bool = True
    routed: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What a placement may use.

    Attributes:
        blocks: of each replica's pool, for adapters and KV.
        host: blocks of each replica's host tier, for the adapters that it is a home of.
        points: tokens per second of a replica by rank.
    """

    blocks: Mapping[str, int]
    host: Mapping[str, int]
    points: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Todo:
    """What follows from a look: homes that lack their adapter, and copies that may go."""

    fetch: Sequence[Pair] = ()
    drop: Sequence[Pair] = ()


class Homes:
    """The homes of one service.

    Attributes:
        parts: adapter -> replica -> its share of the adapter's requests, now.
        wanted: the same, as the last plan wants it.
    """

    def __init__(self, rule: Rule):
        self.wanted: Placement = {}
        self.parts: Placement = {}
        self._rule = rule
        self._placed: Set[str] = frozenset()  # adapters that the last plan has given homes
        self._surplus: Set[Pair] = frozenset()  # copies that the last look found to be too many

    def begin(self, room: Room, adapters: Sequence[Wanted]) -> None:
        """Gives every adapter its first homes, which the owner must fill. Leftovers go to the replicas in turn."""
        found, names = place(self._rule, room, adapters, {}), list(room.blocks)
        self.wanted = {one.key: found.get(one.key) or {names[i % len(names)]: 1.0} for i, one in enumerate(adapters)}
        self.parts = self.wanted

    def plan(self, room: Room, adapters: Sequence[Wanted]) -> None:
        """A time step has ended. `adapters`: all that the service has; others have no homes from now on.

        Those that nobody asks for, or that have no room, stay where they are.
        """
        asked = [adapter for adapter in adapters if adapter.rate > LEAST]
        found = place(self._rule, room, asked, self.wanted) if asked and room.blocks else {}
        self._placed = found.keys()
        stay = {a.key: parts for a in adapters if a.key not in found and (parts := self.parts.get(a.key))}
        self.wanted = {**stay, **found}
        self.parts = {key: parts for key, parts in self.parts.items() if key in self.wanted}

    def look(self, there: Mapping[str, Set[str]]) -> Todo:
        """What to do. `there`: replica that is up -> adapters in its memory."""
        fetch: list[Pair] = []
        wanted, parts = {}, {}
        for key in self.wanted:
            if key not in self._placed:  # a replica that is back has its adapters again
                wanted[key] = parts[key] = self.parts.get(key, self.wanted[key])
                continue
            old = _within(self.parts.get(key, {}), there)
            new = _within(self.wanted[key], there) or old
            lacking = [(key, name) for name in new if key not in there[name]]
            if self._rule.ahead:
                fetch += lacking
            if new:
                wanted[key] = new
            if homes := old if lacking and self._rule.ahead else new:
                parts[key] = homes
        self.wanted, self.parts = wanted, parts
        return Todo(fetch, self._too_many(there))

    @property
    def settled(self) -> bool:
        """Whether another look has nothing to do, if replicas have what they had at the last one."""
        return self.parts == self.wanted and not self._surplus

    def _too_many(self, there: Mapping[str, Set[str]]) -> Sequence[Pair]:
        """Copies to drop: those that two successive looks find superfluous.

        None while a home, old or new, lacks its adapter. By the second look, what was sent before a switch has arrived.
        """
        if not self._rule.routed:
            return ()
        homes = {key: parts.keys() | self.wanted.get(key, {}).keys() for key, parts in self.parts.items()}
        whole = {key for key, names in homes.items() if all(key in there.get(name, ()) for name in names)}
        copies = ((key, name) for name, keys in there.items() for key in keys & whole)
        surplus = {(key, name) for key, name in copies if name not in homes[key]}
        drop = surplus & self._surplus
        self._surplus = surplus - drop
        return sorted(drop)


def place(rule: Rule, room: Room, adapters: Sequence[Wanted], last: Placement) -> Placement:
    """Homes for the adapters by the rule's algorithm, as far as the replicas' host tiers have room for them."""
    names = list(room.blocks)
    if rule.kind == "random":
        found = random_placement(names, adapters, rule.seed)
    elif rule.kind == "contiguous":
        found = contiguous(names, adapters)
    elif rule.kind == "dlora":
        homes = preload(room.blocks, adapters)
        found = {key: dict.fromkeys(at, 1 / len(at)) for key, at in homes.items() if at}
    else:
        found = loraserve(names, adapters, room.points, last)
    return fitted(found, adapters, room.host)


def _within(parts: Mapping[str, float], there: Mapping[str, Set[str]]) -> Mapping[str, float]:
    """The homes that are up."""
    return {name: part for name, part in parts.items() if name in there}
