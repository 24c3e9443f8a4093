"""A session stays where its KV is, as long as its replica is not much busier than the others.

A request without such a home goes where most of its prompt is cached, of the replicas that are not much busier either.
Among equals, as where a system prompt is cached everywhere, the least loaded one gets it.
"""

from __future__ import annotations

from jlora.cluster.routing.least_loaded import least
from jlora.cluster.routing.policy import Ask, up
from jlora.cluster.routing.sessions import Sessions
from jlora.cluster.routing.simple import load
from jlora.cluster.view import View

SLACK = 4  # sequences by which a home may be busier than the least loaded replica
RATIO = 2  # or how many times as busy


class SessionSticky:
    """See `jlora.cluster.routing.policy.Policy`."""

    def __init__(self, sessions: Sessions | None = None) -> None:
        self._sessions = Sessions() if sessions is None else sessions

    def choose(self, view: View, ask: Ask) -> str | None:
        chosen = self.peek(view, ask)
        if chosen is not None:
            self._sessions.served(ask.session, chosen)
        return chosen

    def peek(self, view: View, ask: Ask) -> str | None:
        bearing, home = _bearing(view), self._sessions.home(ask.session)
        if home in bearing:
            return home
        most = max((ask.cached.get(name, 0) for name in bearing), default=0)
        best = least({name: seen for name, seen in bearing.items() if ask.cached.get(name, 0) == most}, ask.adapter)
        return None if best is None else best.name


def _bearing(view: View) -> View:
    """The replicas that take one more."""
    loads = {replica.name: load(replica) for replica in up(view)}
    fewest = min(loads.values(), default=0)
    most = max(fewest + SLACK, RATIO * fewest)
    return {name: view[name] for name, count in loads.items() if count <= most}
