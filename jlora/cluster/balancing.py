"""A router's balance: it plans moves from its view every so often, and carries them out.

A request goes when its new replica has its adapter, and runs where it is until then. A move is the router's way to
go on after a loss: the old attempt is cancelled, and the next one begins behind the tokens that the client has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from jlora.cluster import wire
from jlora.cluster.balance import Balancer, Job, Move, Terms
from jlora.cluster.dispatch import Dispatcher
from jlora.cluster.proto import link_pb2 as link

log = logging.getLogger(__name__)

LOOK_S = 0.05  # between two looks for adapters that have come
ARRIVE_S = 10.0  # that a move waits for its adapter
THERE = ("HBM", "HOST")  # tiers from which a request soon begins


class Balancing:
    """Moves the requests of a router. For its event loop's thread.

    Attributes:
        moved: requests; solve_s: of the last plan.
    """

    def __init__(self, dispatcher: Dispatcher, every_s: float, terms: Terms | None = None):
        self.moved = 0
        self.solve_s = 0.0
        self._dispatcher = dispatcher
        self._every_s = every_s
        self._terms = terms or Terms()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._carry_out(await self._plan())
            except Exception:
                log.exception("a plan of moves has failed")

    async def _plan(self) -> Sequence[Move]:
        """Solved on a thread, from a view of now."""
        dispatcher = self._dispatcher
        if dispatcher.info is None:
            return ()
        balancer = Balancer(self._terms, dispatcher.info.block_tokens, dispatcher.pace)
        problem = balancer.problem(dispatcher.books.view, self._jobs())
        if problem is None:
            return ()
        began = time.perf_counter()
        plan = await asyncio.to_thread(balancer.solution, problem)
        self.solve_s = time.perf_counter() - began
        if plan.moves:
            log.info(
                "%d requests move: the busiest replica is done in %.2f s instead of %.2f s; planned in %.3f s",
                len(plan.moves), plan.after_s, plan.before_s, self.solve_s,
            )  # fmt: skip
        return plan.moves

    async def _carry_out(self, moves: Sequence[Move]) -> None:
        dispatcher, left = self._dispatcher, list(moves)
        asked: set[tuple[str, str | None]] = set()
        for move in moves:
            where = move.target, move.adapter
            if where not in asked and not self._there(move) and self._fetch(move):
                asked.add(where)
        for _ in range(round(ARRIVE_S / LOOK_S)):
            self.moved += sum(dispatcher.migrate(move) for move in left if self._there(move))
            left = [move for move in left if not self._there(move)]
            if not left:
                return
            await asyncio.sleep(LOOK_S)

    def _there(self, move: Move) -> bool:
        """Whether the target has the adapter."""
        seen = self._dispatcher.books.view.get(move.target)
        return move.adapter is None or (seen is not None and seen.tiers.get(move.adapter) in THERE)

    def _jobs(self) -> list[Job]:
        """The requests that are at replicas."""
        dispatcher, found = self._dispatcher, []
        now = dispatcher.terms.clock()
        for routed in dispatcher.table.all():
            entry = dispatcher.entries[routed.handle]
            if entry.ask is not None:
                waited = now - routed.sent if entry.outputs is None else 0.0
                tokens = entry.ask.prompt + (entry.outputs or 0)
                ask = entry.ask
                found.append(Job(routed.handle, routed.replica, ask.adapter, tokens, waited, ask.cached))
        return found

    def _fetch(self, move: Move) -> bool:
        """Brings the adapter of a move to its target; False if its request has ended, and names no version."""
        dispatcher = self._dispatcher
        routed, to = dispatcher.table.get(move.key), dispatcher.links.get(move.target)
        if routed is None or routed.version is None or to is None:
            return False
        hint = wire.fetch(routed.version, dispatcher.directory.peers(routed.version, to.name))
        to.send(link.ToReplica(fetch=hint))
        return True
