"""Where the adapters of a service live, as it changes. The controller and the simulator have the same one.

plan   a time step has ended: homes for the adapters that are asked for; the others stay where they are
look   what replicas have now: which homes lack their adapter, which adapters' requests go to new homes from now on,
       and which replicas have copies too many

It knows only what it is told, reads no clock and makes no calls. Its owner fetches and drops as it says.

A look walks only the adapters that are not where they belong. Differences of sets find them: of each replica, what
lives there and what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from jlora.cluster.balance import preload
from jlora.cluster.placement import LEAST, SLACK, Placement, Wanted, contiguous, fitted, loraserve, random_placement

Kind = Literal["loraserve", "dlora", "random", "contiguous"]
KINDS: tuple[Kind, ...] = ("loraserve", "dlora", "random", "contiguous")
Pair = tuple[str, str]  # an adapter and a replica
HOST = 0.75  # of a replica's host tier that a plan may fill; the rest is for KV and for what the plan does not know


@dataclass(frozen=True, slots=True)
class Rule:
    """How homes are chosen and used.

    Attributes:
        ahead: requests go to a new home when it has the adapter; until then its part of them stays with the old homes.
            Else at once, and the first one fetches it.
        routed: requests go to homes alone, so copies elsewhere are dropped. Else replicas' caches say what they keep.
        slack: LoRAServe's homes stay while no replica has this much more to do than the mean; see `loraserve`.
    """

    kind: Kind = "loraserve"
    ahead: bool = True
    routed: bool = True
    seed: int = 0
    slack: float = SLACK


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
        self.wanted: dict[str, Mapping[str, float]] = {}
        self.parts: dict[str, Mapping[str, float]] = {}
        self._rule = rule
        self._old: dict[str, Mapping[str, float]] = {}  # the parts before the switch that is under way
        self._placed: Mapping[str, int] = {}  # adapters that the last plan has given homes, in its order
        self._moving: set[str] = set()  # adapters of other parts than wanted
        self._at: dict[str, set[str]] = {}  # replica -> adapters that it is a home of, old or new
        self._surplus: Set[Pair] = frozenset()  # copies that the last look found to be too many

    def begin(self, room: Room, adapters: Sequence[Wanted]) -> None:
        """Gives every adapter its first homes, which the owner must fill. Leftovers go to the replicas in turn."""
        found, names = place(self._rule, room, adapters, {}), list(room.blocks)
        parts = {one.key: found.get(one.key) or {names[i % len(names)]: 1.0} for i, one in enumerate(adapters)}
        self.become(parts, parts)

    def plan(self, room: Room, adapters: Sequence[Wanted]) -> None:
        """A time step has ended. `adapters`: all that the service has; others have no homes from now on.

        Those that nobody asks for, or that have no room, stay where they are.
        """
        asked = [adapter for adapter in adapters if adapter.rate > LEAST]
        found = place(self._rule, room, asked, self.wanted) if asked and room.blocks else {}
        stay = {a.key: parts for a in adapters if a.key not in found and (parts := self.parts.get(a.key))}
        self.become({**stay, **found}, self.parts, found)

    def become(self, wanted: Placement, parts: Placement, placed: Iterable[str] = ()) -> None:
        """Replaces all homes. `placed`: those that a look fetches, switches and keeps on replicas that are up."""
        self.wanted = dict(wanted)
        self.parts = {key: homes for key, homes in parts.items() if key in wanted}
        self._old = dict(self.parts)
        self._placed = {key: i for i, key in enumerate(placed)}
        self._moving = {key for key in self._placed if self.parts.get(key) != wanted[key]}
        self._at = {}
        for key in self.wanted:
            self._index(key)

    def look(self, there: Mapping[str, Set[str]]) -> Todo:
        """What to do. `there`: replica that is up -> adapters in its memory."""
        amiss = set(self._moving)
        for name, keys in self._at.items():
            amiss |= self._placed.keys() & (keys - there.get(name, frozenset()))
        fetch: list[Pair] = []
        for key in sorted(amiss, key=self._placed.__getitem__):
            fetch += self._switch(key, there)
        return Todo(fetch, self._too_many(there))

    @property
    def settled(self) -> bool:
        """Whether another look has nothing to do, if replicas have what they had at the last one."""
        return not self._moving and not self._surplus

    def _switch(self, key: str, there: Mapping[str, Set[str]]) -> Sequence[Pair]:
        """Sends an adapter's requests to those of its new homes that have it; what to fetch for the others."""
        for name in self._names(key):
            self._at[name].discard(key)
        old = _within(self._old.get(key, {}), there)
        new = _within(self.wanted[key], there) or old
        lacking = [name for name in new if key not in there[name]] if self._rule.ahead else []
        homes = _mixed(new, old, lacking) if lacking and old != new else new
        for placement, found in ((self.wanted, new), (self.parts, homes)):
            if found:
                placement[key] = found
            else:
                placement.pop(key, None)
        self._index(key)
        if homes == new:
            self._moving.discard(key)
            self._old[key] = new
        else:
            self._moving.add(key)
        return [(key, name) for name in lacking]

    def _names(self, key: str) -> Set[str]:
        """An adapter's homes, old and new."""
        return self.parts.get(key, {}).keys() | self.wanted.get(key, {}).keys()

    def _index(self, key: str) -> None:
        for name in self._names(key):
            self._at.setdefault(name, set()).add(key)

    def _too_many(self, there: Mapping[str, Set[str]]) -> Sequence[Pair]:
        """Copies to drop: those that two successive looks find superfluous.

        None while a home, old or new, lacks its adapter. By the second look, what was sent before a switch has arrived.
        """
        if not self._rule.routed:
            return ()
        strays = ((key, name) for name, keys in there.items() for key in keys - self._at.get(name, set()))
        surplus = {(key, name) for key, name in strays if key in self.parts and self._whole(key, there)}
        drop = surplus & self._surplus
        self._surplus = surplus - drop
        return sorted(drop)

    def _whole(self, key: str, there: Mapping[str, Set[str]]) -> bool:
        """Whether every home of the adapter has it."""
        return all(key in there.get(name, ()) for name in self._names(key))


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
        found = loraserve(names, adapters, room.points, last, rule.slack)
    return fitted(found, adapters, room.host)


def _within(parts: Mapping[str, float], there: Mapping[str, Set[str]]) -> Mapping[str, float]:
    """The homes that are up."""
    return {name: part for name, part in parts.items() if name in there}


def _mixed(new: Mapping[str, float], old: Mapping[str, float], lacking: Sequence[str]) -> Mapping[str, float]:
    """Parts while some new homes lack the adapter: theirs stay with the old homes, or without any go to the others."""
    ready = {name: part for name, part in new.items() if name not in lacking}
    stay = old or ready
    if not ready:
        return stay
    each = sum(new[name] for name in lacking) / sum(stay.values())
    return {name: ready.get(name, 0.0) + each * stay.get(name, 0.0) for name in {**ready, **stay}}
