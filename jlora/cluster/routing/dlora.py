"""dLoRA's dispatch (section 5.1): the least estimated pending time, of the adapter's load and of the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jlora.cluster.routing.costs import Costs, joined
from jlora.cluster.routing.policy import Ask, load_s, up
from jlora.cluster.view import ReplicaView, View


@dataclass(frozen=True, slots=True)
class DLora:
    """The replica that would begin the request soonest.

    The paper does not say how it estimates the queue. Its published code counts a replica's requests in batches;
    here a batch takes as long as its answers do.

    Attributes:
        outputs: mean tokens of an answer; batch: sequences that a replica runs at once.
        tiers: seconds of an adapter's way to the device, per rank, by its tier at the replica.
    """

    costs: Costs
    outputs: float = 64.0
    batch: int = 64
    tiers: Mapping[str, float] = field(default_factory=dict)

    def choose(self, view: View, ask: Ask, now: float) -> str | None:
        best = min(up(view), key=lambda replica: self.pending_s(replica, ask), default=None)
        return None if best is None else best.name

    def pending_s(self, replica: ReplicaView, ask: Ask) -> float:
        """Seconds until the request begins."""
        held = replica.held
        load = load_s(self.tiers, replica, ask)
        step = self.costs.step_s(joined(held.running, held.waiting), held.context + held.tokens)
        return load + held.count / self.batch * self.outputs * step
