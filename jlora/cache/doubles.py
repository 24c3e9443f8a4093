"""Which host copies to give up first: those of KV that is on the device anyway. Plain Python, no jax.

KV in both tiers takes two places. It loses nothing with the host copy as long as it stays on the
device; it has to be copied out again only before it leaves. So when the host is full, KV in use goes
first: a request needs it now, and the link has time until it is idle. Of idle KV, the node goes that
leaves the device last, if that is later than the node to be saved in its place: otherwise the two
would take turns.
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
