"""A router's balance: it plans moves from its view every so often, and carries them out.

A request goes when its new replica has its adapter, and runs where it is until then. A move is the router's way to
go on after a loss: the old attempt is cancelled, and the next one begins behind the tokens that the client has.
Moves that wait for an adapter hold up neither others nor the next plan.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from jlora.cluster import wire
from jlora.cluster.balance import ARRIVE_S, Balancer, Job, Move, Terms
from jlora.cluster.dispatch import Dispatcher
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.routing.ways import Ways
from jlora.cluster.view import THERE

log = logging.getLogger(__name__)

LOOK_S = 0.05  # between two looks for adapters that have come
AGAIN_S = 1.0  # before a replica is asked again: it refuses hints in silence while many adapters are on their way


class Balancing:
    """Moves the requests of a router. For its event loop's thread.

    Attributes:
        moved: requests.
        solve_s, candidates: the longest time of a plan, and the candidates of the largest.
    """

    def __init__(self, dispatcher: Dispatcher, every_s: float, terms: Terms | None = None, ways: Ways | None = None):
        self.moved = 0
        self.solve_s = 0.0
        self.candidates = 0
        self._dispatcher = dispatcher
        self._every_s = every_s
        self._terms = terms or Terms()
        self._ways = ways
        self._waiting: dict[int, tuple[Move, float]] = {}  # by request: until when a move waits for its adapter
        self._asked: dict[tuple[str, str | None], float] = {}  # when a target was asked for its adapter last

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(self._plans(), self._arrivals())

    async def _plans(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self.begin(await self._plan())
            except Exception:
                log.exception("a plan of moves has failed")

    async def _arrivals(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                log.exception("moves have failed")

    async def _plan(self) -> Sequence[Move]:
        """Solved on a thread, from a view of now."""
        dispatcher = self._dispatcher
        if dispatcher.info is None:
            return ()
        balancer = Balancer(self._terms, dispatcher.info.block_tokens, dispatcher.pace, self._ways)
        problem = balancer.problem(dispatcher.books.view, self._jobs())
        if problem is None:
            return ()
        plan = await asyncio.to_thread(balancer.solution, problem)
        self.solve_s, self.candidates = max(self.solve_s, plan.solve_s), max(self.candidates, plan.candidates)
        if plan.moves:
            log.info(
                "%d requests move: the busiest replica is done in %.2f s instead of %.2f s; planned in %.3f s",
                len(plan.moves), plan.after_s, plan.before_s, plan.solve_s,
            )  # fmt: skip
        return plan.moves

    def begin(self, moves: Sequence[Move]) -> None:
        """Begins the moves of a plan."""
        until = self._dispatcher.terms.clock() + ARRIVE_S
        for move in moves:
            if self._there(move) or self._ask(move):
                self._waiting[move.key] = move, until
        self.look()

    def look(self) -> None:
        """Moves the requests whose adapters have come, and asks again for those that have not."""
        now, dispatcher = self._dispatcher.terms.clock(), self._dispatcher
        for key, (move, until) in list(self._waiting.items()):
            routed, there = dispatcher.table.get(key), self._there(move)
            if there or now > until or routed is None or routed.replica != move.source:
                del self._waiting[key]
                self.moved += there and dispatcher.migrate(move)
            else:
                self._ask(move)
        waiting = {(move.target, move.adapter) for move, _ in self._waiting.values()}
        self._asked = {where: at for where, at in self._asked.items() if where in waiting}

    def _there(self, move: Move) -> bool:
        """Whether the target has the adapter."""
        seen = self._dispatcher.books.view.get(move.target)
        return move.adapter is None or (seen is not None and seen.tiers.get(move.adapter) in THERE)

    def _jobs(self) -> list[Job]:
        """The requests that are at replicas; one whose move waits for its adapter counts where it goes."""
        dispatcher, found = self._dispatcher, []
        now, info = dispatcher.terms.clock(), dispatcher.info
        for routed in dispatcher.table.all():
            entry = dispatcher.entries[routed.handle]
            if entry.ask is not None:
                waited = now - routed.sent if entry.outputs is None else 0.0
                ask, tokens = entry.ask, entry.ask.prompt + (entry.outputs or 0)
                size = 0 if routed.version is None or info is None else -(-routed.version.bytes // info.block_bytes)
                where = routed.handle, routed.replica, ask.adapter
                job = Job(*where, tokens, waited, ask.cached, routed.movable, size, ask.rank)
                move, _ = self._waiting.get(routed.handle, (None, 0.0))
                found.append(job if move is None else job.bound(move.target))
        return found

    def _ask(self, move: Move) -> bool:
        """Asks the target for the adapter, unless it has been asked just now; False as in `_fetch`."""
        where, now = (move.target, move.adapter), self._dispatcher.terms.clock()
        if now - self._asked.get(where, -math.inf) < AGAIN_S:
            return True
        if not self._fetch(move):
            return False
        self._asked[where] = now
        return True

    def _fetch(self, move: Move) -> bool:
        """Brings the adapter of a move to its target; False if its request has ended, and names no version."""
        dispatcher = self._dispatcher
        routed, to = dispatcher.table.get(move.key), dispatcher.links.get(move.target)
        if routed is None or routed.version is None or to is None:
            return False
        hint = wire.fetch(routed.version, dispatcher.directory.peers(routed.version, to.name))
        to.send(link.ToReplica(fetch=hint))
        return True
