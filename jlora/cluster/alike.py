"""Which replicas a router uses together: those that serve the same model."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from jlora.cluster import merged
from jlora.cluster.attach import HELLO_S, PAUSES_S, Attached
from jlora.cluster.requests import Broken
from jlora.ports import Clock
from jlora.replica import ReplicaInfo

log = logging.getLogger(__name__)

RECENT_S = HELLO_S + PAUSES_S[1]  # a replica that was refused and still lives has asked again by then


class Alike:
    """Refuses a replica unlike those in use. It changes over to the others if they are more and nothing runs.

    If the router has lost all that it used, these have `RECENT_S` to come back before one of another model may begin.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._served: ReplicaInfo | None = None  # what those in use served at the last check
        self._lost_at = -math.inf  # when the last one was lost without a drain
        self._refused: dict[str, tuple[float, ReplicaInfo]] = {}  # by name: when, and what it serves

    def check(self, one: Attached, used: Sequence[Attached], idle: bool) -> dict[str, str]:
        """The replicas that make room for one that has come, and why.

        Args:
            used: are in use now; they serve the same.
            idle: the router has no request.

        Raises Broken if the replica may not be used.
        """
        assert one.info is not None
        unlike = {
            other.name: why
            for other in used
            if other.info is not None and (why := merged.difference(one.info, other.info))
        }
        self._refused.pop(one.name, None)
        if not used:
            self._wait(one.info)
        if not unlike:
            _warn(one, used)
            self._use(one.info)
            return {}
        like = 1 + self._waiting(one.info)
        if idle and like > len(unlike):
            self._use(one.info)
            return {name: f"{like} replicas serve another model than it does: {why}" for name, why in unlike.items()}
        self._refused[one.name] = self._clock(), one.info
        why = next(merged.difference(other.info, one.info) for other in used if other.info and other.name in unlike)
        raise Broken(f"it does not serve what the others do: {why}")

    def lost(self, one: Attached) -> None:
        """A replica in use is lost. One that has drained will not come back as it was."""
        self._lost_at = -math.inf if one.draining else self._clock()

    def _use(self, info: ReplicaInfo) -> None:
        if self._served is not None and (why := merged.difference(self._served, info)):
            log.warning("the service changes its model: %s. If the router has read its tokenizer already, it"
                        " keeps that: restart it unless both models have the same", why)  # fmt: skip
        self._served = info

    def _wait(self, info: ReplicaInfo) -> None:
        """Raises Broken while those in use before, which served another model, may come back."""
        if self._served is None or not (why := merged.difference(self._served, info)):
            return
        if self._clock() - self._lost_at < RECENT_S:
            raise Broken(f"the replicas in use are lost, and it does not serve what they did: {why}")

    def _waiting(self, info: ReplicaInfo) -> int:
        """Replicas that were refused lately, and serve this model."""
        since = self._clock() - RECENT_S
        self._refused = {name: seen for name, seen in self._refused.items() if seen[0] >= since}
        return sum(not merged.difference(other, info) for _, other in self._refused.values())


def _warn(one: Attached, used: Sequence[Attached]) -> None:
    """If answers may end otherwise at this replica than at those in use."""
    first = next((other.info for other in used if other.info is not None), None)
    if first is not None and one.info is not None and (why := merged.rounding(first, one.info)):
        log.warning("replica %s rounds in another way (%s): a request that moves may end otherwise", one.name, why)
