"""What all routers together have at a replica. Its messages give only the number of requests."""

from __future__ import annotations

from jlora.cluster.routing.costs import joined
from jlora.cluster.routing.policy import Ask
from jlora.cluster.view import Held, ReplicaView


def others(replica: ReplicaView) -> int:
    """Requests of other routers there, as far as the last message shows more than this router has."""
    return max(0, replica.running + replica.waiting - replica.sent)


def all_held(replica: ReplicaView, ask: Ask) -> Held:
    """This router's requests there, and as many like them as other routers have; like `ask` if it has none there."""
    own, more = replica.held, others(replica)
    if not more:
        return own
    ranks = joined(own.running, own.waiting)
    rank = round(sum(rank * count for rank, count in ranks.items()) / own.count) if own.count else ask.rank
    tokens = round((own.tokens + own.context) / own.count) if own.count else ask.prompt
    running = min(more, max(0, replica.running - sum(own.running.values())))
    waiting = more - running
    return Held(
        joined(own.waiting, {rank: waiting} if waiting else {}),
        joined(own.running, {rank: running} if running else {}),
        own.tokens + waiting * tokens,
        own.context + running * tokens,
        own.uncached + waiting * tokens,
        own.wanted,
    )
