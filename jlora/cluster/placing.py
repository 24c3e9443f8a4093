"""LoRAServe's placement in a live service: it moves adapters between replicas while requests run.

A time step, on a thread of the controller's process:

demand    tokens per second of each adapter, of the requests of all routers that have ended
place     Algorithm 1 (`jlora.cluster.placement`) over the replicas that are up
fetch     each new place of an adapter that is asked for brings it in, from a peer or its path
switch    requests go to an adapter's new places once all of these have it
drop      a replica that an adapter's requests no longer go to gives it up, at the second look that finds it there

No request waits for any of it: an adapter that does not come keeps its old places, and one that nobody asks for has
none. A request that reaches a replica
after the drop brings its adapter with it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jlora.cluster.controller import Controller, key_of
from jlora.cluster.demand import Demand, operating_points
from jlora.cluster.directory import Member, Version
from jlora.cluster.found import Found
from jlora.cluster.placement import LEAST, Placement, Wanted, loraserve
from jlora.cluster.routing.costs import Costs
from jlora.cluster.routing.table import Table
from jlora.ports import System

log = logging.getLogger(__name__)

LOOK_S = 0.5
AGAIN_S = 10.0  # before a replica is asked again for what has not come
COMING = 8  # adapters that a replica is asked for at once
POINT = 1.5  # without an objective: an operating point's step, over a step without adapters
THERE = ("HBM", "HOST")


@dataclass(frozen=True, slots=True)
class Steps:
    """When and by what a placement is made: `every_s` is a time step, `slo_s` the objective of a decode step."""

    costs: Costs
    every_s: float = 60.0
    slo_s: float = 0.0


@dataclass(slots=True)
class Load:
    """What has been served: the demand of this time step, and all requests. Any thread may add."""

    demand: Demand = field(default_factory=Demand)
    requests: int = 0
    prompt: int = 0
    output: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def served(self, name: str, prompt: int, output: int, requests: int = 1) -> None:
        """Requests for an adapter have ended."""
        with self.lock:
            self.demand.served(name, prompt + output)
            self.requests += requests
            self.prompt += prompt
            self.output += output

    def close(self, seconds: float) -> Mapping[str, float]:
        """Ends a time step; the forecast of the next one, in tokens per second."""
        with self.lock:
            return self.demand.close(seconds)

    def points(self, steps: Steps, ranks: set[int]) -> Mapping[int, float]:
        """Operating points by rank, of sequences like those so far."""
        slo_s = steps.slo_s or POINT * steps.costs.step_s({})
        context = round((self.prompt + self.output / 2) / max(1, self.requests))
        return operating_points(steps.costs, ranks, slo_s, context, self.prompt / max(1, self.output))


class Placing:
    """The placement of one controller, from `start` to `close`. `table` routes by it.

    Attributes:
        moved: fetches that it asked for.
    """

    def __init__(self, controller: Controller, found: Found, table: Table, steps: Steps, system: System):
        self.moved = 0
        self._controller = controller
        self._found = found
        self._table = table
        self._steps = steps
        self._clock, self._threads = system.clock, system.threads
        self._load = Load()
        controller.served = self._load.served
        self._ended = threading.Event()
        self._stepped = system.clock()
        self._rates: Mapping[str, float] = {}
        self._members: set[str] = set()  # at the last time step
        self._next: Placement = {}  # by name, what the last time step wants
        self._placed: Mapping[str, Mapping[str, float]] = {}  # by key, where requests go
        self._asked: dict[tuple[str, str], float] = {}  # (key, replica), and until when it is not asked again
        self._surplus: set[tuple[str, str]] = set()  # (key, replica) that the last look has found

    def start(self) -> None:
        self._threads.start("jlora-placing", self._run)

    def close(self) -> None:
        self._ended.set()

    def places(self) -> Mapping[str, Mapping[str, float]]:
        """Where requests go, by the addresses of replicas: further routers name them so."""
        addresses = {member.name: member.address for member in self._controller.members()}
        placed = self._placed
        return {key: {addresses.get(n, n): part for n, part in parts.items()} for key, parts in placed.items()}

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.round()
            except Exception:
                log.exception("the placement of adapters has failed; it goes on")

    def round(self) -> None:
        """A time step if one is due, or replicas have come or gone; then a look."""
        members, now = self._controller.members(), self._clock()
        due = now - self._stepped >= self._steps.every_s
        if due or {m.name for m in members} != self._members:
            self.step(members, close=due)
        self.look(members)

    def step(self, members: Sequence[Member], close: bool = True) -> None:
        """Places what is asked for anew; `close`: by the demand of the time step that ends now."""
        now, self._members = self._clock(), {m.name for m in members}
        if close:
            self._rates, self._stepped = self._load.close(max(now - self._stepped, 1e-3)), now
        rates = {name: rate for name, rate in self._rates.items() if rate > LEAST}
        versions = [v for v in self._controller.registry.versions() if v.name in rates and not v.pinned]
        if not members or not versions:
            self._next = {}
            return
        wanted = [Wanted(v.name, v.rank, rates[v.name], max(v.bytes, 1)) for v in versions]
        points = self._load.points(self._steps, {one.rank for one in wanted})
        self._next = loraserve(sorted(self._members), wanted, points, self._next)

    def look(self, members: Sequence[Member]) -> None:
        """Fetches what is missing, switches what has come, and drops what is left over."""
        now, there = self._clock(), {m.name: {k for k, tier in m.tiers.items() if tier in THERE} for m in members}
        self._asked = {
            (key, name): until
            for (key, name), until in self._asked.items()
            if until > now and key not in there.get(name, ())
        }
        versions = {v.name: v for v in self._controller.registry.versions() if not v.pinned}
        placed: dict[str, Mapping[str, float]] = {}
        for name, parts in self._next.items():
            if (version := versions.get(name)) is None:
                continue
            old = self._placed.get(version.key)
            if lacking := {place for place in parts if version.key not in there.get(place, ())}:
                self._fetch(version, [m for m in members if m.name in lacking])
            else:
                placed[version.key] = parts
            if lacking and old is not None and old.keys() <= there.keys():  # without its replicas it has no places
                placed[version.key] = old
        self._placed = placed
        self._table.parts = placed
        self._drop(members, there)

    def _fetch(self, version: Version, members: Sequence[Member]) -> None:
        coming = Counter(name for _, name in self._asked)
        for member in members:
            pair = version.key, member.name
            if pair not in self._asked and coming[member.name] < COMING:
                self._asked[pair] = self._clock() + AGAIN_S
                self.moved += 1
                peers = self._controller.peers(version, member.name)
                answer = self._controller.calls.hold(member.address, version, peers)
                answer.future.add_done_callback(lambda done, pair=pair: _told(done, "come to", pair))

    def _drop(self, members: Sequence[Member], there: Mapping[str, set[str]]) -> None:
        """Nothing while a place lacks its adapter. What was sent before a switch has arrived by the second look."""
        whole = {key for key, parts in self._placed.items() if all(key in there.get(place, ()) for place in parts)}
        found = {(key, m.name): m.address for m in members for key in there[m.name] & whole}
        surplus = {(key, name) for key, name in found if name not in self._placed[key] and self._may_drop(key)}
        for pair in surplus & self._surplus:
            answer = self._controller.calls.unload(found[pair], pair[0])
            answer.future.add_done_callback(lambda done, pair=pair: _told(done, "leave", pair))
        self._surplus = surplus - self._surplus

    def _may_drop(self, key: str) -> bool:
        """Those whose files are gone, or others by now, stay where they are."""
        row = self._controller.registry.find(key.rpartition("@")[0])
        return row is not None and key_of(row) == key and self._found.is_intact(row)


def _told(done: Any, what: str, pair: tuple[str, str]) -> None:
    """The replica has answered."""
    try:
        done.result()
    except Exception as e:
        log.debug("adapter %s does not %s replica %s: %s", pair[0], what, pair[1], e)
