"""jlora's own policy: the least predicted time, of the request itself and of those that it slows down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jlora.cluster.routing.costs import Costs, joined
from jlora.cluster.routing.policy import Ask, load_s, up
from jlora.cluster.view import ReplicaView, View


@dataclass(frozen=True, slots=True)
class Jlora:
    """The replica where the request adds the least time to all answers, its own included.

    Own time: the step under way, the prompts before it and its own without the cached part, the adapter's way to
    the device, then every token at the pace of the batch that it joins. Time of the others: each of them waits
    for its prefill, and decodes more slowly from then on. All terms are seconds of answers, so none needs a weight.

    Attributes:
        slo_s: of a decode step; a replica that would exceed it costs `penalty_s` more.
        outputs: mean tokens of an answer.
        tiers: seconds of an adapter's way to the device, per rank, by its tier at the replica.
    """

    costs: Costs
    slo_s: float
    outputs: float = 64.0
    penalty_s: float = 1e3
    tiers: Mapping[str, float] = field(default_factory=dict)

    def choose(self, view: View, ask: Ask, now: float) -> str | None:
        best = min(up(view), key=lambda replica: self.cost(replica, ask), default=None)
        return None if best is None else best.name

    def cost(self, replica: ReplicaView, ask: Ask) -> float:
        """Seconds."""
        held, costs, outputs = replica.held, self.costs, self.outputs
        exist = joined(held.running, held.waiting)
        both = joined(exist, {ask.rank: 1})
        context = held.context + held.tokens
        computed = ask.prompt - ask.cached.get(replica.name, 0)
        before, after = costs.step_s(exist, context), costs.step_s(both, context + ask.prompt)
        first = costs.step_s(both, context + ask.prompt, held.tokens + computed)
        slower = first - costs.step_s(exist, context, held.tokens)
        load = load_s(self.tiers, replica, ask)
        mine = max(load, 0.5 * before if exist else 0.0) + first + outputs * after
        # How long an answer still is does not depend on how long it has been.
        theirs = held.count * (slower + outputs * (after - before))
        return mine + theirs + (self.penalty_s if after > self.slo_s else 0.0)
