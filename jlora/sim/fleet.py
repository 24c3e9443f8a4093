"""Plays a trace to many replicas behind one router, on one virtual clock. No jax.

Every replica has a clock of its own, which is at most one step ahead. An event happens when all replicas have
come to its time, so a router sees exactly the messages that have reached it.

    turn     due: the policy chooses a replica from the router's books
    start    the request reaches the replica, `delay_s` later
    wake     the replica steps, or tends its idle cache
    place    a time step of the placement ends; look: adapters may have come to their new places
    message  a step's tokens and the replica's state reach the router, `delay_s` after the step
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jlora.cluster.books import Books
from jlora.cluster.prefixes import Prefixes
from jlora.cluster.routing import policy as routing
from jlora.cluster.view import ReplicaView
from jlora.errors import ResourceExhausted
from jlora.sim.device import answer
from jlora.sim.member import Member
from jlora.sim.placing import LOOK_S, Placing
from jlora.sim.replay import Ask, Pass, request_of, seed_of
from jlora.sim.trace import Trace, Turn
from jlora.types import TokenEvent

STATE_S = 0.1  # a replica without tokens to send tells its state so often
MESSAGE, TURN, START, WAKE, PLACE, LOOK = range(6)  # in this order, of those at one time


@dataclass(slots=True)
class Live:
    """A request that the router has sent and that has not ended. `begun`: its first token has come back."""

    turn: Turn
    ask: Ask
    asked: routing.Ask
    replica: str
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Wires:
    """What a router knows of the service beside its messages.

    Attributes:
        ranks: of the adapters, by index.
        delay_s: of a message, each way.
        placing: moves adapters between the replicas.
        every_s: between two of its time steps.
    """

    ranks: Sequence[int]
    delay_s: float = 0.0
    placing: Placing | None = None
    every_s: float = 60.0


@dataclass(slots=True)
class Side:
    """What the fleet keeps of one replica."""

    member: Member
    wakes: float = math.inf  # the valid one of its wakes in the heap
    spoke: float = -math.inf
    names: dict[str, Live] = field(default_factory=dict)


class Fleet(Pass):
    """One pass of a trace through a service."""

    def __init__(self, members: Sequence[Member], trace: Trace, policy: routing.Policy, wires: Wires):
        super().__init__(trace)
        self.now = 0.0
        self._sides = {member.name: Side(member) for member in members}
        self._policy = policy
        self._wires = wires
        self._moved = self._start
        self._books = Books()
        self._prefixes = Prefixes(members[0].spec.sizes.block_tokens)
        self._live = 0
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        for side in self._sides.values():
            self._books.heard(side.member.seen())
            self._sleep(side)
        if wires.placing is not None:
            self._put(self._start + wires.every_s, PLACE, wires.placing)

    @property
    def members(self) -> Mapping[str, Member]:
        return {name: side.member for name, side in self._sides.items()}

    def _until(self, end: float) -> None:
        stop = self._start + end
        while self._live or self._script:
            due = self._script.next_due()
            at = math.inf if due is None else self._start + due
            if self._heap and self._heap[0][:2] < (at, TURN):
                at, kind, _, what = self._heap[0]
                if at >= stop or (self._live and at - self._moved > self._patience):
                    self.now = min(at, stop) - self._start
                    return
                heapq.heappop(self._heap)
                self.now = at - self._start
                self._happen(kind, at, what)
            elif at >= stop or due is None:
                return
            else:
                self.now = due
                for asked, turn in self._script.take(due):
                    self._send(turn, asked)

    def _put(self, at: float, kind: int, what: Any) -> None:
        heapq.heappush(self._heap, (at, kind, next(self._order), what))

    def _happen(self, kind: int, at: float, what: Any) -> None:
        if kind == MESSAGE:
            self._hear(at, *what)
        elif kind == START:
            self._begin(at, *what)
        elif kind == WAKE:
            if what.wakes == at:
                self._wake(what, at)
        else:
            self._place(at, kind, what)

    def _place(self, at: float, kind: int, placing: Placing) -> None:
        """Replicas that sleep wake up, and begin to fetch."""
        asleep = [side for side in self._sides.values() if not side.member.busy]
        for side in asleep:
            side.member.idle(at)
        if kind == PLACE:
            placing.step()
            self._put(at + self._wires.every_s, PLACE, placing)
        if placing.look():
            self._put(at + LOOK_S, LOOK, placing)
        for side in asleep:
            self._wake_at(side, at)

    # -- the router -------------------------------------------------------------------------

    def _send(self, turn: Turn, due: float) -> None:
        prompt, ranks = self._script.prompt(turn), self._wires.ranks
        ask = Ask(turn, due)
        self.asks.append(ask)
        chain = self._prefixes.chain(prompt, (turn.adapter, turn.tenant))
        adapter = turn.adapter
        asked = routing.Ask(
            None if adapter is None else str(adapter),
            0 if adapter is None else ranks[adapter],
            len(prompt),
            str(turn.session),
            self._prefixes.cached(chain),
        )
        at = self._start + due
        name = self._policy.choose(self._books.view, asked, at)
        assert name is not None, "no replica is up"
        self._books.sent(name, asked)
        self._prefixes.sent(name, chain)
        self._live += 1
        self._moved = at
        live = Live(turn, ask, asked, name)
        self._put(at + self._wires.delay_s, START, (self._sides[name], live, request_of(turn, prompt)))

    def _hear(self, at: float, side: Side, events: Sequence[TokenEvent], seen: ReplicaView) -> None:
        now = at - self._start
        self._books.told(side.member.name, len(events))
        for event in events:
            live = side.names[event.request_id]
            ask = live.ask
            if not live.begun:
                live.begun, ask.first = True, now
                self._books.began(live.replica, live.asked)
            if event.usage is not None:
                ask.usage, ask.timing = event.usage, event.timing
                del side.names[event.request_id]
                told = answer(seed_of(live.turn), event.usage.prompt_tokens, event.usage.completion_tokens)
                self._ended(live, told, now)
        if events:
            self._moved = at
        self._books.heard(seen)

    def _ended(self, live: Live, told: Sequence[int], now: float) -> None:
        self._books.ended(live.replica, live.asked, len(told) if live.begun else None)
        self._live -= 1
        if self._wires.placing is not None and live.turn.adapter is not None and told:
            self._wires.placing.served(live.turn.adapter, live.asked.prompt + len(told))
        self._script.answered(live.turn, told, now)

    # -- the replicas -----------------------------------------------------------------------

    def _begin(self, at: float, side: Side, live: Live, request: Any) -> None:
        member = side.member
        if at > member.clock.now:  # it sleeps
            member.idle(at)
        try:
            member.submit(request, at)
        except ResourceExhausted:
            live.ask.refused = True
            self._ended(live, (), at - self._start)
            return
        side.names[request.id] = live
        if side.wakes > member.clock.now:
            self._wake_at(side, member.clock.now)

    def _wake(self, side: Side, at: float) -> None:
        member = side.member
        if not member.busy:
            member.idle(at)
            self._sleep(side)
            return
        due = self._script.next_due()
        events = member.step(math.inf if due is None else self._start + due)
        now = member.clock.now
        if events or now >= side.spoke + STATE_S:
            side.spoke = now
            self._put(now + self._wires.delay_s, MESSAGE, (side, events, member.seen()))
        if member.busy:
            self._wake_at(side, now)
        else:
            self._sleep(side)

    def _sleep(self, side: Side) -> None:
        self._wake_at(side, side.member.wakes)

    def _wake_at(self, side: Side, at: float) -> None:
        side.wakes = at
        if not math.isinf(at):
            self._put(at, WAKE, side)
