"""Plays a trace to many replicas behind one router, on one virtual clock. No jax.

Every replica has a clock of its own, which is at most one step ahead. An event happens when all replicas have
come to its time, so a router sees exactly the messages that have reached it.

    turn     due: the policy chooses a replica from the router's books
    start    the request reaches the replica, `delay_s` later
    wake     the replica steps, or tends its idle cache; tell: one that sleeps may have news
    place    a time step of the placement ends; look: adapters may have come to their new places
    fetch    a replica is asked for an adapter; drop: it may drop one
    balance  the router plans moves; move: a plan is solved, or an adapter may have come to where a request moves
    cancel   a request that has moved leaves its old replica
    message  a step's tokens and the replica's state reach the router, `delay_s` after the step
    kill     a replica ends, with all that it has; lost: the router hears of it
    back     a killed replica begins anew; pump: requests without a replica are sent, as in a live router
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jlora.cluster.balance import ARRIVE_S, Balancer, Job, Plan, Terms
from jlora.cluster.books import Books
from jlora.cluster.demand import Told
from jlora.cluster.prefixes import Prefixes
from jlora.cluster.requests import PATIENCE_S, Table
from jlora.cluster.routing import policy as routing
from jlora.cluster.view import THERE, ReplicaView
from jlora.errors import ResourceExhausted
from jlora.sim.device import answer
from jlora.sim.losses import Loss
from jlora.sim.member import Member
from jlora.sim.parts import Live, Moves, Side
from jlora.sim.placing import Placing
from jlora.sim.replay import Ask, Pass, request_of, seed_of
from jlora.sim.trace import Trace, Turn
from jlora.sim.wires import Balance, Wires
from jlora.types import Request, TokenEvent

LOOK_S, AGAIN_S = 0.05, 1.0  # of a live balance: between two looks for adapters, and before it asks for one again
STATE_S = 0.1  # a replica without tokens to send tells its state so often
PUMP_S = 0.05  # between two looks at requests without a replica
# In this order, of those at one time.
MESSAGE, TURN, START, WAKE, TELL, FETCH, DROP, PLACE, LOOK, CANCEL, BALANCE, MOVE, KILL, LOST, BACK, PUMP = range(16)


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
        self._table = Table()
        self._lives: dict[int, Live] = {}  # by handle
        terms = wires.balance.terms if wires.balance is not None else Terms()
        self._balancer = Balancer(terms, members[0].spec.sizes.block_tokens, ways=wires.ways)
        self.plans: list[Plan] = []
        self._bound: dict[int, str] = {}  # by handle: where a move whose adapter is on its way goes
        self.moved = self.resumed = 0  # requests: by a plan, and after a loss
        self.dead: list[Member] = []
        self._up_at = self._start  # when a replica was last up
        self._pumps = -math.inf  # the last one in the heap
        self._looks = False  # one is in the heap
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        self._happens: Mapping[int, Callable[..., None]] = {
            MESSAGE: self._hear, START: self._begin, WAKE: self._wake, TELL: self._news, FETCH: self._fetch,
            DROP: self._drop, PLACE: self._close, LOOK: self._look, CANCEL: self._cancel, BALANCE: self._plan,
            MOVE: self._move, KILL: self._kill, LOST: self._lost, BACK: self._back, PUMP: self._pump,
        }  # fmt: skip
        for side in self._sides.values():
            self._books.heard(side.member.seen(self._start))
            self._sleep(side)
        if wires.placing is not None:
            self._put(self._start + wires.every_s, PLACE, wires.placing)
        if wires.balance is not None:
            self._put(self._start + wires.balance.every_s, BALANCE, wires.balance)
        for loss in wires.losses:
            self._put(self._start + loss.at, KILL, loss)

    @property
    def members(self) -> Mapping[str, Member]:
        """The replicas that run."""
        return {name: side.member for name, side in self._sides.items() if side.up}

    def until(self, end: float) -> None:
        stop = self._start + end
        while self._lives or self._script:
            due = self._script.next_due()
            at = math.inf if due is None else self._start + due
            if self._heap and self._heap[0][:2] < (at, TURN):
                at, kind, _, what = self._heap[0]
                if at >= stop or (self._lives and at - self._moved > self._patience):
                    self.now = min(at, stop) - self._start
                    return
                heapq.heappop(self._heap)
                assert at - self._start > self.now - 1e-6, "an event lies in the past"
                self.now = at - self._start
                self._happens[kind](at, *what)
            elif at >= stop or due is None:
                return
            else:
                self.now = due
                for asked, turn in self._script.take(due):
                    self._send(turn, asked)

    def _put(self, at: float, kind: int, *what: Any) -> None:
        heapq.heappush(self._heap, (at, kind, next(self._order), what))

    def _close(self, at: float, placing: Placing) -> None:
        """A time step of the placement ends."""
        self._put(at + self._wires.every_s, PLACE, placing)
        self._place(at, placing, close=True)

    def _look(self, at: float, placing: Placing) -> None:
        self._looks = False
        self._place(at, placing)

    def _place(self, at: float, placing: Placing, close: bool = False) -> None:
        """The controller sees what the last messages say; what it asks for reaches the replicas later."""
        there = {
            name: {key for key, tier in seen.tiers.items() if tier in THERE}
            for name, seen in self._books.view.items()
            if seen.health == "up"
        }
        todo, later = placing.round(there, at - self._start, close), at + self._wires.delay_s
        for kind, pairs in ((FETCH, todo.fetch), (DROP, todo.drop)):
            for adapter, name in pairs:
                self._put(later, kind, self._sides[name], int(adapter))
        if not placing.settled:
            self._look_later(at + self._wires.look_s)

    def _look_later(self, due: float) -> None:
        """One look is planned at a time."""
        if self._wires.placing is not None and not self._looks:
            self._looks = True
            self._put(due, LOOK, self._wires.placing)

    # -- the router -------------------------------------------------------------------------

    def _send(self, turn: Turn, due: float) -> None:
        prompt, at = self._script.prompt(turn), self._start + due
        ask = Ask(turn, due)
        self.asks.append(ask)
        chain = self._chain(turn, prompt)
        routed = self._table.add(request_of(turn, prompt), None, _nowhere, at - self._start)
        live = self._lives[routed.handle] = Live(turn, ask, routed, chain, self._asked(turn, routed.request, chain))
        self._moved = at
        if self._wires.placing is not None and turn.adapter is not None:
            self._wires.placing.told(turn.adapter, Told(requests=1, prompt=len(prompt)))
        if not self._choose(live, at):
            self._pump_later(at)

    def _chain(self, turn: Turn, prompt: Sequence[int], told: Sequence[int] = ()) -> Sequence[int]:
        """What the router remembers of a prompt and its answer: of an activated LoRA, the base's part."""
        at = turn.activation(len(prompt))
        if at is not None:
            return self._prefixes.chain(prompt[:at], (None, turn.tenant))
        return self._prefixes.chain((*prompt, *told), (turn.adapter, turn.tenant))

    def _asked(self, turn: Turn, request: Request, chain: Sequence[int]) -> routing.Ask:
        """What a policy knows of a request."""
        adapter = turn.adapter
        return routing.Ask(
            None if adapter is None else str(adapter),
            0 if adapter is None else self._wires.ranks[adapter],
            len(request.prompt) + sum(len(done.tokens) for done in request.done),
            str(turn.session),
            self._prefixes.cached(chain),
            self._balancer.pace.outputs,
        )

    def _choose(self, live: Live, at: float) -> bool:
        """Sends a request where the policy says, to the replica that has lost it only if no other one is up."""
        view, avoid = self._books.view, live.routed.avoid
        others = {name: seen for name, seen in view.items() if name != avoid} if avoid else view
        name = self._policy.choose(others, live.asked)
        if name is None and avoid:
            name = self._policy.choose(view, live.asked)
        if name is not None:
            self._attempt(live, name, at)
        return name is not None

    def _attempt(self, live: Live, name: str, at: float) -> None:
        """Sends a request to a replica, with what it has got elsewhere."""
        routed = live.routed
        request = routed.again(at - self._start)
        self._books.sent(name, live.asked)
        self._prefixes.sent(name, live.chain)
        self._table.begin(routed, name, at - self._start)
        self._put(at + self._wires.delay_s, START, self._sides[name], live, replace(request, id=live.name))

    def _hear(self, at: float, side: Side, events: Sequence[TokenEvent], seen: ReplicaView) -> None:
        if at - self._wires.delay_s > side.killed:  # it would have been sent later
            return
        now, self._up_at = at - self._start, at
        for event in events:
            live = side.names.get(event.request_id)
            if live is None:  # it has moved
                continue
            self._moved = at
            self._take(live, live.routed.deliver(event, now), now)
            if event.usage is not None:
                del side.names[event.request_id]
                side.handles.pop(event.request_id, None)
        attached = self._books.view[seen.name].health != "up"
        self._books.heard(seen)
        if attached:
            self._pump(at)
            self._look_later(at)

    def _take(self, live: Live, event: TokenEvent, now: float) -> None:
        """A token of a request, or its end."""
        replica, ask = live.routed.replica, live.ask
        if live.outputs is None:
            live.outputs, ask.first, ask.replica = 0, min(ask.first, now), ask.replica or replica
            self._books.began(replica, live.asked)
        live.outputs += 1
        self._books.told(replica, 1)
        if event.usage is not None and event.timing is not None:
            ask.usage, ask.timing = event.usage, event.timing
            timing = event.timing if live.routed.measured(event.index) else None
            self._balancer.pace.served(live.asked.adapter, event.usage, timing)
            told = answer(seed_of(live.turn), event.usage.prompt_tokens, event.usage.completion_tokens)
            self._ended(live, told, now)

    def _ended(self, live: Live, told: Sequence[int], now: float) -> None:
        replica, prompt = live.routed.replica, live.routed.request.prompt
        self._books.ended(replica, live.asked, live.outputs)
        self._table.end(live.routed)
        del self._lives[live.routed.handle]
        if told and not live.turn.aside:  # the session's next turn begins with it
            self._prefixes.sent(replica, self._chain(live.turn, prompt, told))
        if self._wires.placing is not None and live.turn.adapter is not None and told:
            self._wires.placing.told(live.turn.adapter, Told(ended=1, output=len(told)))
        self._script.answered(live.turn, told, now)

    # -- balance ----------------------------------------------------------------------------

    def _plan(self, at: float, balance: Balance) -> None:
        now = at - self._start
        plan = self._balancer.plan(self._books.view, [self._job(live, now) for live in self._lives.values()])
        self.plans.append(plan)
        if plan.moves:
            self._put(at + balance.solve_s, MOVE, Moves(plan.moves, at + balance.solve_s + ARRIVE_S))
        self._put(at + balance.solve_s + balance.every_s, BALANCE, balance)

    def _job(self, live: Live, now: float) -> Job:
        waited = now - live.routed.sent if live.outputs is None else 0.0
        tokens = live.asked.prompt + (live.outputs or 0)
        asked, routed, sizes = live.asked, live.routed, self._wires.sizes
        size = sizes[live.turn.adapter] if sizes and live.turn.adapter is not None else 0
        where = routed.handle, routed.replica, asked.adapter
        job = Job(*where, tokens, waited, asked.cached, routed.movable, size, asked.rank)
        target = self._bound.get(routed.handle)
        return job if target is None else job.bound(target)

    def _move(self, at: float, moves: Moves) -> None:
        """Requests go when the adapter that they need is there; the rest is looked at again."""
        waiting, due = [], at >= moves.asked + AGAIN_S
        for move in moves.moves:
            self._bound.pop(move.key, None)
            live, target = self._lives.get(move.key), self._books.view[move.target]
            if live is None or live.routed.replica != move.source:
                continue
            if target.health != "up" or not live.routed.movable:
                continue
            if move.adapter is None or target.tiers.get(move.adapter) in THERE:
                self._migrate(at, live, move.target)
                continue
            waiting.append(move)
            if due:
                self._put(at + self._wires.delay_s, FETCH, self._sides[move.target], int(move.adapter))
        if waiting and at < moves.until:
            self._bound.update((move.key, move.target) for move in waiting)
            self._put(at + LOOK_S, MOVE, Moves(waiting, moves.until, at if due else moves.asked))

    def _migrate(self, at: float, live: Live, target: str) -> None:
        """The router's own path: the old attempt is cancelled, and the next one goes on behind its tokens."""
        old = self._sides[live.routed.replica]
        old.names.pop(live.name, None)
        self._put(at + self._wires.delay_s, CANCEL, old, live.name)
        self._books.ended(old.member.name, live.asked, live.outputs)
        self._table.lose(live.routed, at - self._start, moved=True)
        live.asked, live.outputs = self._asked(live.turn, live.routed.resumed(), live.chain), None
        self._policy.choose({target: self._books.view[target]}, live.asked)  # it keeps books of its choices
        self._attempt(live, target, at)
        self.moved += 1

    # -- losses -----------------------------------------------------------------------------

    def _kill(self, at: float, loss: Loss) -> None:
        name = f"r{loss.replica}"
        side = self._sides[name]
        side.killed, side.wakes = at, math.inf
        side.handles.clear()
        self.dead.append(side.member)
        side.member.killed(at)
        for other in self._sides.values():
            if other.up:
                other.member.lost(side.member, at)
                if not other.member.busy:  # what it fetches may come sooner now
                    self._sleep(other)
        self._put(at + self._wires.delay_s, LOST, side)
        if not math.isinf(loss.down_s):
            self._put(at + max(loss.down_s, 2 * self._wires.delay_s), BACK, name)  # when the router knows

    def _lost(self, at: float, side: Side) -> None:
        """The router's own path: its requests wait for another replica, and go on behind what they have."""
        name, now = side.member.name, at - self._start
        self._books.heard(replace(self._books.view[name], health="down"))
        self._prefixes.left(name)
        if self._wires.placing is not None:
            self._wires.placing.lost(name)
        side.names.clear()
        for routed in self._table.at(name):
            live = self._lives[routed.handle]
            self._books.ended(name, live.asked, live.outputs)
            self._table.lose(routed, now)
            live.asked, live.outputs = self._asked(live.turn, routed.resumed(), live.chain), None
            self.resumed += 1
            if routed.given_up:
                self._give_up(live, now)
        self._pump(at)
        self._look_later(at)

    def _back(self, at: float, name: str) -> None:
        assert self._wires.again is not None
        member = self._wires.again(name)
        member.clock.advance(at)
        side = self._sides[name] = Side(member)
        self._put(at + self._wires.delay_s, MESSAGE, side, (), member.seen(at))
        self._sleep(side)

    def _pump(self, at: float) -> None:
        """Sends what waits for a replica and is due, or ends what has waited for too long."""
        now = at - self._start
        for routed in self._table.waiting():
            live = self._lives[routed.handle]
            if now > max(routed.since, self._up_at - self._start) + PATIENCE_S:
                self._give_up(live, now)
            elif routed.due <= now:
                self._choose(live, at)
        if self._table.waiting():
            self._pump_later(at)

    def _pump_later(self, at: float) -> None:
        if at >= self._pumps:
            self._pumps = at + PUMP_S
            self._put(self._pumps, PUMP)

    def _give_up(self, live: Live, now: float) -> None:
        """No answer; its session goes on."""
        self._table.end(live.routed)
        del self._lives[live.routed.handle]
        self._script.answered(live.turn, (), now)

    # -- the replicas -----------------------------------------------------------------------

    def _begin(self, at: float, side: Side, live: Live, request: Request) -> None:
        member = side.member
        if not side.up:
            return
        _bring(member, at)
        if request.id != live.name:  # it has moved meanwhile
            return
        try:
            side.handles[request.id] = member.submit(request, at)
        except ResourceExhausted:
            live.ask.refused = True
            self._ended(live, (), at - self._start)
            return
        side.names[request.id] = live
        if side.wakes > member.clock.now:
            self._wake_at(side, member.clock.now)

    def _cancel(self, at: float, side: Side, name: str) -> None:
        handle = side.handles.pop(name, None)
        if handle is None:
            return
        _bring(side.member, at)
        side.member.engine.abort(handle)
        if side.wakes > side.member.clock.now:
            self._wake_at(side, side.member.clock.now)

    def _fetch(self, at: float, side: Side, adapter: int) -> None:
        self._reach(at, side, side.member.ask, adapter)

    def _drop(self, at: float, side: Side, adapter: int) -> None:
        self._reach(at, side, side.member.forget, adapter)

    def _reach(self, at: float, side: Side, act: Callable[[int], None], adapter: int) -> None:
        """What a controller asks for reaches a replica; one that sleeps wakes up."""
        if not side.up:
            return
        if asleep := not side.member.busy:
            _bring(side.member, at)
        act(adapter)
        if asleep:
            self._wake_at(side, at)

    def _wake(self, at: float, side: Side) -> None:
        member = side.member
        if side.wakes != at:  # a later wake has taken its place
            return
        if not member.busy:
            member.idle(at)
            self._tell(side, ())
            self._sleep(side)
            return
        due = self._script.next_due()
        events = member.step(math.inf if due is None else self._start + due)
        self._tell(side, events)
        if member.busy:
            self._wake_at(side, member.clock.now)
        else:
            self._sleep(side)

    def _tell(self, side: Side, events: Sequence[TokenEvent]) -> None:
        """A message, if there are tokens or the last one was a while ago."""
        now = side.member.clock.now
        if events or now >= side.spoke + STATE_S:
            self._say(now, side, events)

    def _news(self, at: float, side: Side) -> None:
        """A message of a replica that sleeps, if adapters may have come or gone."""
        if side.up and side.member.news:
            self._say(at, side, ())

    def _say(self, at: float, side: Side, events: Sequence[TokenEvent]) -> None:
        side.spoke = at
        self._put(at + self._wires.delay_s, MESSAGE, side, events, side.member.seen(at))

    def _sleep(self, side: Side) -> None:
        member = side.member
        self._wake_at(side, member.wakes)
        if member.news:
            self._put(max(member.clock.now, member.looks), TELL, side)

    def _wake_at(self, side: Side, at: float) -> None:
        side.wakes = at
        if not math.isinf(at):
            self._put(at, WAKE, side)


def _bring(member: Member, at: float) -> None:
    """A replica that sleeps comes to this time."""
    while at > member.clock.now:
        member.idle(at)


def _nowhere(events: list[TokenEvent]) -> None:
    """The sink of requests whose events the fleet takes itself."""
