"""The replica with the least to do, and among equals one that has the adapter at hand."""

from __future__ import annotations

from jlora.cluster.routing.policy import Ask, Bookless, up
from jlora.cluster.routing.simple import load
from jlora.cluster.view import ReplicaView, View

# The better a tier, the sooner the adapter can act.
TIERS = {"HBM": 0, "LOADING": 1, "HOST": 2, "DISK": 3}


def least(view: View, adapter: str | None) -> ReplicaView | None:
    """The least loaded replica that is up."""

    def cost(replica: ReplicaView) -> tuple[int, int, int, str]:
        tier = 0 if adapter is None else TIERS.get(replica.tiers.get(adapter, ""), len(TIERS))
        return load(replica), tier, -replica.free_blocks, replica.name

    return min(up(view), key=cost, default=None)


class LeastLoaded(Bookless):
    """See `jlora.cluster.routing.policy.Policy`."""

    def choose(self, view: View, ask: Ask) -> str | None:
        chosen = least(view, ask.adapter)
        return None if chosen is None else chosen.name
