"""A placement in a live service: it moves adapters between replicas while requests run.

A time step, on a thread of the controller's process:

demand    what the requests of all routers ask of each adapter (`jlora.cluster.demand`)
plan      homes for those that are asked for, on the replicas that are up (`jlora.cluster.homes`)
fetch     each home that lacks its adapter brings it in, from a peer or its path
switch    each new home that has its adapter gets its part of the requests; the parts of the others stay with the old
drop      if requests go only to homes, a replica that is not a home drops the adapter when two looks in a row find it

No request waits for any of it: an adapter that does not come, or that nobody asks for, keeps its homes. A request that
reaches a replica after the drop brings its adapter with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jlora.cluster import demand
from jlora.cluster.asking import LOOK_S, Asking
from jlora.cluster.controller import Controller
from jlora.cluster.demand import Load, Recent, Trend
from jlora.cluster.directory import Member
from jlora.cluster.directory_server import BEAT_S
from jlora.cluster.found import Found
from jlora.cluster.homes import HOST, Homes, Pair, Room, Rule
from jlora.cluster.placement import LEAST, Wanted
from jlora.cluster.registry import key_of
from jlora.cluster.routing.costs import Costs
from jlora.cluster.routing.table import Table
from jlora.cluster.view import THERE
from jlora.ports import System

log = logging.getLogger(__name__)

# Further routers hear of a switch within a beat: one look later no router asks the old homes any more, and they drop.
assert LOOK_S > BEAT_S


@dataclass(frozen=True, slots=True)
class Steps:
    """When and by what a placement is made.

    Attributes:
        costs: predicts times, for LoRAServe's operating points; None: dLoRA's preload needs none.
        every_s: length of a time step.
        slo_s: objective of a decode step.
    """

    costs: Costs | None
    rule: Rule = Rule()
    every_s: float = 60.0
    slo_s: float = 0.0


def points_of(load: Load, steps: Steps, ranks: set[int]) -> Mapping[int, float]:
    """Operating points by rank: the file's, else of sequences like those so far."""
    if steps.costs is None:
        return {}
    prompt, answer = load.prompt / max(1, load.requests), load.answer
    context = max(1, round(prompt + answer / 2))
    return demand.points_of(steps.costs, ranks, steps.slo_s, context, prompt / max(1.0, answer))


class Placing:
    """The placement of one controller, from `start` to `close`. `table` routes by it."""

    def __init__(self, controller: Controller, found: Found, table: Table, steps: Steps, system: System):
        self._controller = controller
        self._found = found
        self._table = table
        self._steps = steps
        self._clock, self._threads = system.clock, system.threads
        self._load = Load(Recent() if steps.rule.kind == "dlora" else Trend())
        controller.told = self._load.told
        self._ended = threading.Event()
        self._stepped = system.clock()
        self._rates: Mapping[str, float] = {}
        self._members: set[str] = set()  # at the last time step
        self._planned = False
        self._homes = Homes(steps.rule)  # by name
        self._asking = Asking()

    def start(self) -> None:
        self._threads.start("jlora-placing", self._run)

    def close(self) -> None:
        self._ended.set()

    def places(self) -> Mapping[str, Mapping[str, float]] | None:
        """Where requests go, by the addresses of replicas: further routers name them so.

        None before the first plan: until then they keep what an earlier controller has told them.
        """
        if not self._planned:
            return None
        addresses = {member.name: member.address for member in self._controller.members()}
        placed = self._table.parts
        return {key: {addresses.get(n, n): part for n, part in parts.items()} for key, parts in placed.items()}

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.round()
            except Exception:
                log.exception("the placement of adapters has failed; it goes on")

    def round(self) -> None:
        """A time step if one is due, or replicas have come or gone; then a look."""
        members, now = self._controller.up(), self._clock()
        due = now - self._stepped >= self._steps.every_s
        if due or {m.name for m in members if m.blocks} != self._members:
            self.step(members, close=due)
        self.look(members)

    def step(self, members: Sequence[Member], close: bool = True) -> None:
        """Plans homes anew. `close`: a time step ends now, and its demand counts.

        A replica counts once it has reported its blocks.
        """
        told, now = sorted((m for m in members if m.blocks), key=lambda m: m.name), self._clock()
        if not self._planned:
            self._adopt([m for m in told if m.name not in self._members])
        self._members = {m.name for m in told}
        self._asking.begin()
        if close:
            self._rates, self._stepped = self._load.close(max(now - self._stepped, 1e-3)), now
        rows = self._controller.registry.all()
        pinned = sum(row.blocks for row in rows if row.pinned)  # they are at every replica
        wanted = [
            Wanted(row.name, max(row.ranks.values(), default=0), self._rates.get(row.name, 0.0), max(row.blocks, 1))
            for row in rows
            if not row.pinned
        ]
        points = points_of(self._load, self._steps, {one.rank for one in wanted if one.rate > LEAST})
        # An older replica does not tell its host tier, which is as large as its pool or larger.
        host = {m.name: int(HOST * (m.host_blocks or m.blocks)) - pinned for m in told}
        self._homes.plan(Room({m.name: m.blocks - pinned for m in told}, host, points), wanted)
        self._planned = self._planned or (close and bool(told))

    def _adopt(self, come: Sequence[Member]) -> None:
        """What replicas bring along has been placed there by an earlier controller: the first plan starts from it."""
        names = {version.key: version.name for version in self._controller.registry.versions() if not version.pinned}
        at = {name: set(parts) for name, parts in self._homes.wanted.items()}
        for member in come:
            for key in names.keys() & {key for key, tier in member.tiers.items() if tier in THERE}:
                at.setdefault(names[key], set()).add(member.name)
        homes = {name: dict.fromkeys(sorted(where), 1 / len(where)) for name, where in at.items()}
        self._homes.become(homes, homes)

    def look(self, members: Sequence[Member]) -> None:
        """Fetches what is missing, switches what has come, and drops what is left over."""
        rows = {name: row for name in self._homes.wanted if (row := self._controller.registry.find(name)) is not None}
        names = {key_of(row): name for name, row in rows.items() if not row.pinned}
        there = {m.name: {names[k] for k, tier in m.tiers.items() if tier in THERE and k in names} for m in members}
        keys = {name: key for key, name in names.items()}
        todo = self._homes.look(there)
        self._table.parts = {keys[name]: parts for name, parts in self._homes.parts.items() if name in keys}
        self._fetch([(keys[name], replica) for name, replica in todo.fetch if name in keys], members)
        # Those whose files are gone, or others by now, stay where they are.
        intact = [pair for pair in todo.drop if self._found.is_intact(rows[pair[0]])]
        self._drop([(keys[name], replica) for name, replica in intact], members)

    def _fetch(self, pairs: Sequence[Pair], members: Sequence[Member]) -> None:
        """Asks replicas for missing adapters."""
        at = {member.name: member for member in members}
        for pair in self._asking.due(pairs, self._clock()):
            key, name = pair
            self._controller.fetches += 1
            version = self._controller.current(key.rpartition("@")[0])
            answer = self._controller.calls.hold(at[name].address, version, self._controller.peers(version, name))
            answer.future.add_done_callback(lambda done, pair=pair: _told(done, "come to", pair))

    def _drop(self, pairs: Sequence[Pair], members: Sequence[Member]) -> None:
        at = {member.name: member.address for member in members}
        for pair in pairs:
            answer = self._controller.calls.unload(at[pair[1]], pair[0])
            answer.future.add_done_callback(lambda done, pair=pair: _told(done, "leave", pair))


def _told(done: Any, what: str, pair: tuple[str, str]) -> None:
    """The replica has answered."""
    try:
        done.result()
    except Exception as e:
        log.debug("adapter %s does not %s replica %s: %s", pair[0], what, pair[1], e)
