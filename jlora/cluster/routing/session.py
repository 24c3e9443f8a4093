"""A session stays where its KV is, as long as its replica is not much busier than the others.

A request without a session goes where most of its prompt is cached. The table of homes is bounded, and the session
that was used least recently leaves it.
"""

from __future__ import annotations

from collections import OrderedDict

from jlora.cluster.routing.least_loaded import least
from jlora.cluster.routing.policy import Ask
from jlora.cluster.routing.simple import load
from jlora.cluster.view import View

HOMES = 65_536
SLACK = 4  # sequences by which a home may be busier than the least loaded replica
RATIO = 2  # or how many times as busy


class SessionSticky:
    """See `jlora.cluster.routing.policy.Policy`."""

    def __init__(self, homes: int = HOMES) -> None:
        self._most = homes
        self._homes: OrderedDict[str, str] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._homes)

    def choose(self, view: View, ask: Ask, now: float) -> str | None:
        best = least(view, ask.adapter)
        if best is None:
            return None
        home = self._homes.get(ask.session, "")
        if not home and any(ask.cached.values()):
            home = max(ask.cached, key=lambda name: (ask.cached[name], name))
        chosen = home if _bears(view, home, load(best)) else best.name
        if ask.session:
            self._homes[ask.session] = chosen
            self._homes.move_to_end(ask.session)
            if len(self._homes) > self._most:
                self._homes.popitem(last=False)
        return chosen


def _bears(view: View, home: str, least_load: int) -> bool:
    """Whether the home takes one more."""
    replica = view.get(home)
    if replica is None or replica.health != "up":
        return False
    return load(replica) <= max(least_load + SLACK, RATIO * least_load)
