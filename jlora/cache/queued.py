"""What the queue needs, and what of it may leave first. Plain Python, no jax.

For what nobody has asked for yet, policies guess when it will be used. For what a queued sequence
needs the order of service tells, so all policies share this: it leaves after everything else. Of
adapters, and of KV, what is needed last leaves first (Belady, A study of replacement algorithms,
1966); of these two the one whose loading saves less for each place until it is needed,

    worth_i = load_i / blocks_i / (place_i - served)

When requests come faster than they are served nearly all idle blocks are of this kind.

Of a prefix only the ends are kept here (`Want`): they keep what is above them. When an end has left
the rest is history like any other, and costs nobody's time to spare: its copy has to be waited for
anyway. Priorities are far apart in places (`Sequence.place`), so across them only the order counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from jlora.cache.order import Order
from jlora.cache.transfer import Meter
from jlora.cache.tree import Node


class Queued:
    """The places in the order of service at which nodes are needed, smaller ones sooner.

    Args:
        valid: whether a node is a candidate now.

    Attributes:
        served: the place of the sequence that was admitted last.
    """

    def __init__(self, valid: Callable[[Node], bool], meter: Meter):
        self.served = 0
        self._meter = meter
        self._places: dict[Node, list[int]] = {}
        self._latest = (Order(valid, sign=-1), Order(valid, sign=-1))  # by kind

    def add(self, node: Node, place: int) -> bool:
        """One more sequence needs the node; whether nobody did so soon."""
        places = self._places.setdefault(node, [])
        bisect.insort(places, place)
        return places[0] == place

    def remove(self, node: Node, place: int) -> bool:
        """One sequence less; whether it was the first in line."""
        places = self._places[node]
        at = bisect.bisect_left(places, place)
        del places[at]
        if not places:
            del self._places[node]
        return at == 0

    def count(self, node: Node) -> int:
        """Sequences that need the node."""
        return len(self._places.get(node, ()))

    def __len__(self) -> int:
        """Nodes that somebody needs."""
        return len(self._places)

    def push(self, node: Node) -> None:
        """The node has become a candidate, or is needed at another time than before."""
        self._latest[node.kind].push(node, self._places[node][0])

    def worst(self, kind: int | None) -> Node | None:
        """The candidate worth least."""
        orders = self._latest if kind is None else (self._latest[kind],)
        return min((node for order in orders for node in order.first(1)), key=self._worth, default=None)

    def load_s(self, node: Node) -> float:
        """Seconds that bringing the node back will take, or computing it again."""
        return self._meter.density(node.kind, node.size) * node.size

    def _worth(self, node: Node) -> float:
        return self._meter.density(node.kind, node.size) / max(1, self._places[node][0] - self.served)
