"""The nodes that queued sequences need, and which of them leaves first. Plain Python, no jax.

A policy estimates when an idle node will be used. For a node that a queued sequence needs, the order
of service gives the answer. So under every policy such nodes leave after all others. The candidates
are the adapter and the KV node that are needed last (Belady, A study of replacement algorithms,
1966). Of these two, the one with the smaller worth leaves: the load time that it saves, per block and
per place in the queue until it is needed:

    worth_i = load_i / blocks_i / (place_i - served)

A sequence marks only the last nodes of its prefix (`Want`), and these keep the nodes above them on
the device. When a marked node has left, the rest of the prefix is ordinary history, because the
sequence must wait for a copy anyway. Sequences of different priority are far apart in places
(`Sequence.place`), so between priorities only the order counts.
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
    if isinstance(node.wanted, list):
        node.wanted.insert(at, place)  # in place: thousands may need one adapter
    else:
        node.wanted = [place]
    return at == 0


def unwant(node: Node, place: int) -> bool:
    """One sequence less needs the node; whether it was the first in line."""
    at = bisect.bisect_left(node.wanted, place)
    assert isinstance(node.wanted, list) and node.wanted[at] == place, "a sequence wants the node no longer"
    del node.wanted[at]
    if not node.wanted:
        node.wanted = ()  # most nodes share it: a list for each would cost memory
    return at == 0
