"""What the queue needs, and which of it may leave first. Plain Python, no jax.

For nodes that no request has asked for yet, policies guess when they will be used. For nodes that a
queued sequence needs, the order of service tells, so all policies share this: such nodes leave after
all others. Of each kind, the node that is needed last leaves first (Belady, A study of replacement
algorithms, 1966). Of these two, the one leaves whose loading saves less per block, for each place
until it is needed:

    worth_i = load_i / blocks_i / (place_i - served)

A sequence marks only the last nodes of its prefix (`Want`); they keep the nodes above them. When such
a node has left, the rest of the prefix is history like any other: its copy has to be waited for
anyway. Priorities are far apart in places (`Sequence.place`), so across them only the order counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from jlora.cache.order import Order
from jlora.cache.transfer import Meter
from jlora.cache.tree import Node


class Queued:
    """The candidates among the nodes that the queue needs, the latest needed first."""

    def __init__(self, valid: Callable[[Node], bool], meter: Meter):
        self.served = 0  # the place of the sequence that was admitted last
        self._meter = meter
        self._latest = (Order(valid, sign=-1), Order(valid, sign=-1))  # by kind

    def push(self, node: Node) -> None:
        """The node has become a candidate, or is needed at another time than before."""
        self._latest[node.kind].push(node, node.wanted[0])

    def worst(self, kind: int | None = None) -> Node | None:
        """The candidate worth least; with `kind`, of that kind."""
        orders = self._latest if kind is None else (self._latest[kind],)
        return min((node for order in orders for node in order.first(1)), key=self._worth, default=None)

    def load_s(self, node: Node) -> float:
        """Seconds that bringing the node back will take, or computing it again."""
        return self._meter.density(node.kind, node.size) * node.size

    def _worth(self, node: Node) -> float:
        return self._meter.density(node.kind, node.size) / max(1, node.wanted[0] - self.served)


def want(node: Node, place: int) -> bool:
    """One more sequence needs the node; whether it is the first in line."""
    at = bisect.bisect_left(node.wanted, place)
    node.wanted = (*node.wanted[:at], place, *node.wanted[at:])
    return at == 0


def unwant(node: Node, place: int) -> bool:
    """One sequence less needs the node; whether it was the first in line."""
    at = bisect.bisect_left(node.wanted, place)
    assert node.wanted[at] == place, "a sequence wants the node no longer"
    node.wanted = (*node.wanted[:at], *node.wanted[at + 1 :])
    return at == 0
