"""CaraServe's rank-aware scheduling (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from jlora.cluster.routing.costs import Costs, joined
from jlora.cluster.routing.others import all_held
from jlora.cluster.routing.policy import Ask, Bookless, cheapest
from jlora.cluster.view import ReplicaView, View


@dataclass(frozen=True, slots=True)
class CaraServe(Bookless):
    """The replica where the request adds the least time per token, over all requests there.

    Attributes:
        slo_s: of a decode step; a replica that would exceed it costs `penalty_s` more.
        outputs: mean tokens of an answer, before the router has measured them.
    """

    costs: Costs
    slo_s: float
    outputs: float = 64.0
    penalty_s: float = 1e3

    def choose(self, view: View, ask: Ask) -> str | None:
        return cheapest(view, lambda replica: self.cost(replica, ask))

    def cost(self, replica: ReplicaView, ask: Ask) -> float:
        """`total_cost` of the algorithm. The empty replica's cost is 0 there, whatever the request."""
        held, costs, own = all_held(replica, ask), self.costs, {ask.rank: 1}
        prefill = costs.prefill_s(joined(held.waiting, own), held.tokens + ask.prompt)
        prefill -= costs.prefill_s(held.waiting, held.tokens)
        exist = joined(held.running, held.waiting)
        after = costs.step_s(joined(exist, own))
        score = prefill / (ask.outputs or self.outputs) + after - costs.step_s(exist)
        if after > self.slo_s:
            score += self.penalty_s
        return score * held.count
