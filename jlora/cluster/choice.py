"""Where an attempt at a request may go. For the event loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jlora.cluster.attach import Attached
from jlora.cluster.books import Books
from jlora.cluster.requests import Routed
from jlora.cluster.routing.policy import Ask, Policy
from jlora.cluster.view import THERE, ReplicaView, View


@dataclass(slots=True)
class Choice:
    """The policy's choice among the replicas that have room."""

    policy: Policy
    books: Books
    links: Mapping[str, Attached]

    def choose(self, ask: Ask, avoid: str = "", among: View | None = None) -> Attached | None:
        """Where a request goes now, of all replicas or some; to `avoid` only if no other one is up."""
        return self._chosen(self.policy.choose, ask, avoid, among)

    def peek(self, ask: Ask) -> Attached | None:
        """Where a request would go now. It does not, so the policy's books stay as they are."""
        return self._chosen(self.policy.peek, ask)

    def _chosen(
        self, choose: Callable[[View, Ask], str | None], ask: Ask, avoid: str = "", among: View | None = None
    ) -> Attached | None:
        some = self.books.view if among is None else among
        view = {name: seen for name, seen in some.items() if self.has_room(seen)}
        others = {name: seen for name, seen in view.items() if name != avoid} if avoid in view else view
        name = choose(others, ask)
        if name is None and others is not view:
            name = choose(view, ask)
        return None if name is None else self.links[name]

    def has_room(self, seen: ReplicaView) -> bool:
        """Whether the replica has not all the requests of this router yet that it can queue and run."""
        one = self.links.get(seen.name)  # None: it leaves the service just now
        if one is None or one.info is None:
            return False
        return seen.sent < one.info.config.engine.max_queue + one.info.config.engine.max_seqs

    def among(self, routed: Routed) -> View | None:
        """The replicas that are up and may go on with its weights; None if none was found with others.

        If the weights of its adapter have changed, these are replicas that have the adapter in memory.
        """
        others, strange = routed.others, routed.strange
        if not (others or strange):
            return None
        up = {name: seen for name, seen in self.books.view.items() if seen.health == "up" and name not in strange}
        if not others or routed.version is None:
            return up
        key = routed.version.key
        return {name: seen for name, seen in up.items() if name not in others and seen.tiers.get(key) in THERE}
