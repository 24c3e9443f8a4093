"""jlora's own policy: the least predicted time, of the request itself and of those that it slows down."""

from __future__ import annotations

from dataclasses import dataclass, field

from jlora.cluster.routing.costs import Costs, joined
from jlora.cluster.routing.others import all_held
from jlora.cluster.routing.policy import Ask, cheapest
from jlora.cluster.routing.sessions import Sessions
from jlora.cluster.routing.ways import Ways, held
from jlora.cluster.view import ReplicaView, View


@dataclass(frozen=True, slots=True)
class Jlora:
    """The replica where the request adds the least time to all answers, its own included.

    Own time: the longest of the step under way, the adapter's way to the device behind those of the requests before
    it, and the wait for a place in a full batch; the prompts before it and its own without the cached part; then every
    token at the pace of the batch that it joins. Time of the others: each of them waits for its prefill, and decodes
    more slowly from then on. All terms are seconds of answers, so none needs a weight.

    A session's home costs less by the prefill of the prompt: elsewhere the next turn would compute it again. Among
    equals, as idle replicas are, the order is that of `Sessions`.

    Attributes:
        slo_s: of a decode step; a replica that would exceed it costs `penalty_s` more.
        outputs: mean tokens of an answer, before the router has measured them.
        batch: sequences that a replica runs at once.
        ways: of adapters to the device.
    """

    costs: Costs
    slo_s: float
    outputs: float = 64.0
    batch: int = 64
    penalty_s: float = 1e3
    ways: Ways = Ways()
    sessions: Sessions = field(default_factory=Sessions)

    def choose(self, view: View, ask: Ask) -> str | None:
        best = self.peek(view, ask)
        if best is not None:
            self.sessions.served(ask.session, best)
        return best

    def peek(self, view: View, ask: Ask) -> str | None:
        peer, home = held(view, ask.adapter), self.sessions.home(ask.session)

        def cost(replica: ReplicaView) -> tuple[float, tuple[int, int]]:
            saved = self.saved_s(ask) if replica.name == home else 0.0
            return self.cost(replica, ask, peer) - saved, self.sessions.order(replica.name)

        return cheapest(view, cost)

    def cost(self, replica: ReplicaView, ask: Ask, peer: bool = False) -> float:
        """Seconds. `peer`: see `Ways.seconds`."""
        held, costs, outputs = all_held(replica, ask), self.costs, ask.outputs or self.outputs
        exist = joined(held.running, held.waiting)
        both = joined(exist, {ask.rank: 1})
        context = held.context + held.tokens
        computed = ask.prompt - ask.cached.get(replica.name, 0)
        before, after = costs.step_s(exist, context), costs.step_s(both, context + ask.prompt)
        first = costs.step_s(both, context + ask.prompt, held.uncached + computed)
        slower = first - costs.step_s(exist, context, held.uncached)
        load = self.ways.behind_s(replica, ask, peer)
        # A batch takes as long as its answers do, and lets as many in meanwhile as it holds.
        queue = max(0, held.count + 1 - self.batch) / self.batch * outputs * before
        mine = max(load, queue, 0.5 * before if exist else 0.0) + first + outputs * after
        # How long an answer still is does not depend on how long it has been.
        theirs = held.count * (slower + outputs * (after - before))
        return mine + theirs + (self.penalty_s if after > self.slo_s else 0.0)

    def saved_s(self, ask: Ask) -> float:
        """Seconds of computing the prompt again, beyond those of any prefill."""
        own = {ask.rank: 1}
        return self.costs.prefill_s(own, ask.prompt) - self.costs.prefill_s(own, 1)
