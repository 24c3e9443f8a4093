"""dLoRA's dispatch (section 5.1): the least estimated pending time, of the adapter's load and of the queue."""

from __future__ import annotations

from dataclasses import dataclass

from jlora.cluster.routing.costs import Costs, joined
from jlora.cluster.routing.others import all_held
from jlora.cluster.routing.policy import Ask, Bookless, cheapest
from jlora.cluster.routing.ways import Ways, held
from jlora.cluster.view import ReplicaView, View


@dataclass(frozen=True, slots=True)
class DLora(Bookless):
    """The replica that would begin the request soonest.

    The paper does not say how it estimates the queue. Its published code counts a replica's requests in batches;
    here a batch takes as long as its answers do.

    Attributes:
        outputs: mean tokens of an answer, before the router has measured them.
        batch: sequences that a replica runs at once.
        ways: of adapters to the device.
    """

    costs: Costs
    outputs: float = 64.0
    batch: int = 64
    ways: Ways = Ways()

    def choose(self, view: View, ask: Ask) -> str | None:
        peer = held(view, ask.adapter)
        return cheapest(view, lambda replica: self.pending_s(replica, ask, peer))

    def pending_s(self, replica: ReplicaView, ask: Ask, peer: bool = False) -> float:
        """Seconds until the request begins. `peer`: see `Ways.seconds`."""
        held, outputs = all_held(replica, ask), ask.outputs or self.outputs
        load = self.ways.seconds(replica, ask, peer)
        step = self.costs.step_s(joined(held.running, held.waiting), held.context + held.tokens)
        return load + held.count / self.batch * outputs * step
