"""A session stays where its KV is, as long as its replica is not much busier than the others.

A request without a session goes where most of its prompt is cached.
"""

from __future__ import annotations

from jlora.cluster.routing.least_loaded import least
from jlora.cluster.routing.policy import Ask
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
        best = least(view, ask.adapter)
        if best is None:
            return None
        home = self._sessions.home(ask.session)
        if not home and any(ask.cached.values()):
            home = max(ask.cached, key=lambda name: (ask.cached[name], name))
        chosen = home if _bears(view, home, load(best)) else best.name
        self._sessions.served(ask.session, chosen)
        return chosen


def _bears(view: View, home: str, least_load: int) -> bool:
    """Whether the home takes one more."""
    replica = view.get(home)
    if replica is None or replica.health != "up":
        return False
    return load(replica) <= max(least_load + SLACK, RATIO * least_load)
