"""jlora's own policy: the least predicted time, of the request itself and of those that it slows down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jlora.cluster.routing.costs import Costs, joined
from jlora.cluster.routing.policy import Ask, up
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
        held, costs = replica.held, self.costs
        own = {ask.rank: 1}
        exist = joined(held.running, held.waiting)
        before, after = costs.decode_s(exist), costs.decode_s(joined(exist, own))
        ahead = costs.prefill_s(held.waiting, held.tokens)
        computed = ask.prompt - ask.cached.get(replica.name, 0)
        whole = costs.prefill_s(joined(held.waiting, own), held.tokens + computed)
        load = 0.0 if ask.adapter is None else ask.rank * self.tiers.get(replica.tiers.get(ask.adapter, "DISK"), 0.0)
        others = held.count
        running = others - sum(held.waiting.values())
        mine = max(load, whole + (0.5 * before if running else 0.0)) + self.outputs * after
        # Those that run are on average half done; those that wait have all their tokens ahead.
        left = self.outputs * (others - 0.5 * running)
        theirs = (whole - ahead) * running + (after - before) * left
        return mine + theirs + (self.penalty_s if after > self.slo_s else 0.0)
