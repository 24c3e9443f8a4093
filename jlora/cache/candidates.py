"""Which node to evict, prefetch or drop next: nodes in the order of a policy's keys. No jax.

victims   on the device, nothing uses or needs them        evicted, least valuable first
queued    the same, but a queued sequence needs them       evicted when there are no victims left
doubles   KV in both tiers                                 their host copies go when the host is full
drops     KV leaves on the host only                       dropped for good after that
roots     on the host, all that they need on the device    prefetched, most valuable first
shelf     adapters that the disk has, too                  leave memory when the host is full
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jlora.cache.doubles import Doubles
from jlora.cache.order import Order
from jlora.cache.policies import Policy
from jlora.cache.queued import Queued
from jlora.cache.tree import IDLE, KV, AdapterNode, Node, adapter_of

Values = dict[Node, float]  # at one moment; kept from one question to the next


class Candidates:
    """The orders of one cache. Whatever changes a node offers it again."""

    def __init__(self, policy: Policy, clock: Callable[[], float]):
        self._policy = policy
        self.clock = clock
        self._victims = (Order(self.evictable), Order(self.evictable))
        self._roots = (Order(_is_root, sign=-1), Order(_is_root, sign=-1))
        self._drops = (Order(_droppable), Order(_droppable))
        self._shelf = (Order(_shelvable), Order(_shelvable))
        self.queued = Queued(self.evictable, policy.meter)
        self.doubles = Doubles(policy, clock)

    def evictable(self, node: Node) -> bool:
        """Whether the node is on the device and nothing uses it, copies it or depends on it."""
        return node.standing >= IDLE and (not node.resident or not self._policy.binds(node))

    def offer(self, node: Node) -> None:
        """Enters the node in the orders it belongs to, in place of its older entries."""
        node.stamp += 1
        if node.moving:
            return
        if _shelvable(node):
            heap, key = self._policy.key(node)
            self._shelf[heap].push(node, key)
        if node.device:
            if self.evictable(node):
                if node.wanted:
                    self.queued.push(node)
                else:
                    heap, key = self._policy.key(node)
                    self._victims[heap].push(node, key)
            self.doubles.push(node)
        elif node.host:
            heap, key = self._policy.key(node)
            if self._policy.lower and _is_root(node):
                self._roots[heap].push(node, key)
            if _droppable(node):
                self._drops[heap].push(node, key)

    def victim(self, kind: int | None = None, known: Values | None = None) -> Node | None:
        """The least valuable node that may be evicted and that the queue does not need.

        With `kind`, only of this kind, under a policy whose keys keep kinds apart.
        """
        return _least(*self._tops(self._victims, kind, known))

    def drop(self) -> Node | None:
        """The least valuable KV leaf that is on the host only."""
        return _least(*self._tops(self._drops))

    def shelved(self) -> tuple[AdapterNode | None, float]:
        """The adapter whose host copy is worth least, of those that may go to the disk, and its worth."""
        now, worth = self.clock(), self._policy.shelf_value
        tops = [node for heap in self._shelf for node in heap.first(self._policy.lookahead)]
        values = {node: worth(node, now) for node in tops if isinstance(node, AdapterNode)}
        node = min(values, key=values.__getitem__, default=None)
        return node, values[node] if node is not None else math.inf

    def root(self, kind: int | None = None) -> Node | None:
        """The most valuable node on the host whose prefix and adapter are on the device or coming."""
        while True:
            tops, values = self._tops(self._roots, kind)
            root = max(tops, key=values.__getitem__, default=None)
            if root is None or not adapter_of(root).dying:
                return root
            root.stamp += 1  # no request will ask for it
            if _droppable(root):
                heap, key = self._policy.key(root)
                self._drops[heap].push(root, key)

    def coldest(self, count: int) -> list[Node]:
        """KV without a host copy that will leave next, coldest first: leaves, and the nodes that become leaves then."""
        found: dict[Node, None] = {}
        for leaf in (leaf for heap in self._victims for leaf in heap.first(count)):
            node: Node | None = leaf
            for _ in range(count):
                if node is None or node.kind != KV or node.users or node.moving:
                    break
                if node is not leaf and node.resident > 1:
                    break
                if not node.host and node.device:
                    found[node] = None
                node = node.parent
        return sorted(found, key=self.value)[:count]

    def value(self, node: Node) -> float:
        return self._policy.value(node, self.clock())

    def _tops(
        self, orders: tuple[Order, Order], kind: int | None = None, known: Values | None = None
    ) -> tuple[list[Node], Values]:
        """The first nodes of each heap, and their values."""
        values = {} if known is None else known
        now, ahead, value = self.clock(), self._policy.lookahead, self._policy.value
        heaps = orders if kind is None else (orders[kind],)
        tops = [node for heap in heaps for node in heap.first(ahead)]
        for node in tops:
            if node not in values:
                values[node] = value(node, now)
        return tops, values


def _least(tops: list[Node], values: Values) -> Node | None:
    return min(tops, key=values.__getitem__, default=None)


def _is_root(node: Node) -> bool:
    """On the host only, and nothing that it needs is missing."""
    return node.on_host and not node.device and all(needed.device or not needed.size for needed in node.needs)


def _shelvable(node: Node) -> bool:
    return isinstance(node, AdapterNode) and node.droppable


def _droppable(node: Node) -> bool:
    """KV on the host only that nothing uses or waits for and nothing lies below."""
    alone = not node.children and not node.users and not node.wanted
    return node.kind == KV and node.on_host and not node.device and alone
