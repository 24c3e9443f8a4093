"""Which host copies to drop first: those of KV that is also on the device. Plain Python, no jax.

KV in both tiers takes two blocks. While it stays on the device, it does not need its host copy; it
must be copied out again only before it is evicted. So a full host first drops the copies of KV that
running requests use: the link has time to copy it again until it is idle. Of idle KV, it drops the
copy of the node that will leave the device last. That node must leave later than the node that needs
the room, or the two would replace each other again and again.
"""

from __future__ import annotations

from collections.abc import Callable

from jlora.cache.order import Order
from jlora.cache.policies import Policy
from jlora.cache.tree import KV, Node


class Doubles:
    """KV in both tiers, in the order in which its host copies are given up."""

    def __init__(self, policy: Policy, clock: Callable[[], float]):
        self._policy = policy
        self._clock = clock
        self._in_use: dict[Node, None] = {}  # a dict as an ordered set
        self._idle = (Order(_idle, sign=-1), Order(_idle, sign=-1))

    def push(self, node: Node) -> None:
        """Enters the node by its use now; ignores a node that is not in both tiers."""
        self._in_use.pop(node, None)
        if not _in_both(node):
            return
        if node.users:
            self._in_use[node] = None
        else:
            heap, key = self._policy.key(node)
            self._idle[heap].push(node, key)

    def first(self, saved: Node | None) -> Node | None:
        """The first node whose copy can go.

        Args:
            saved: KV that is to be saved in its place; None: something that needs the place whatever goes.
        """
        while self._in_use:
            node, _ = self._in_use.popitem()
            if node.users and _in_both(node):
                self._in_use[node] = None
                return node
        tops = [node for heap in self._idle for node in heap.first(1)]
        able = [node for node in tops if saved is None or self._outstays(node, saved)]
        return max(able, key=lambda node: self._policy.value(node, self._clock()), default=None)

    def _outstays(self, node: Node, other: Node) -> bool:
        """Whether `node` leaves the device after `other`; what the queue needs leaves after all else."""
        if bool(node.wanted) != bool(other.wanted):
            return bool(node.wanted)
        now, policy = self._clock(), self._policy
        (heap, key), (others, least) = policy.key(node), policy.key(other)
        return key > least if heap == others else policy.value(node, now) > policy.value(other, now)


def _in_both(node: Node) -> bool:
    return node.kind == KV and bool(node.device) and bool(node.host) and not node.moving


def _idle(node: Node) -> bool:
    return not node.users and _in_both(node)
