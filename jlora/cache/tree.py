"""The dependency tree: root → adapters → KV (FASTLIBRA, section 4.1). Plain Python, no jax.

The second layer has one node per adapter version, the base model being the adapter of size
zero. Below it every node is one full block of KV, keyed by the tokens it holds. A path from an
adapter down is a conversation; siblings share what is above them. A KV node is on the device
only while its parent is, so whatever may be evicted is a leaf.

Nodes that nothing uses and nothing depends on wait in a heap, least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence


class Node:
    """One block of KV, or (`AdapterNode`) an adapter.

    Attributes:
        key: the block's tokens; a first block's key starts with the tenant's salt.
        blocks: device blocks; one for KV, any number for an adapter, none while it is not resident.
        children: KV nodes by key.
        users: leases that go through this node.
        last_use: logical time of the last lock or unlock.
    """

    __slots__ = ("parent", "key", "blocks", "children", "users", "last_use", "stamp")

    def __init__(self, parent: Node | None, key: tuple, blocks: list[int]):
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[tuple, Node] = {}
        self.users = 0
        self.last_use = 0
        self.stamp = 0  # version of this node's entry in the eviction order; older entries are stale

    @property
    def evictable(self) -> bool:
        """On the device, and nothing uses it or depends on it."""
        return bool(self.blocks) and not self.users and not self.children

    @property
    def reclaimable(self) -> int:
        """Blocks that eviction frees here once nothing uses the node (nor, then, anything below it)."""
        return len(self.blocks)


class AdapterNode(Node):
    """One version of an adapter; the base model has size 0.

    Attributes:
        uid: new for every load; 0 is the base.
        size: blocks it takes on the device.
        waiting: queued sequences that will need it.
        pinned: never evicted.
        dying: unloaded or replaced: no new lease, freed with its last user.
    """

    __slots__ = ("uid", "size", "waiting", "pinned", "dying")

    def __init__(self, uid: int, size: int):
        super().__init__(None, (), [])
        self.uid = uid
        self.size = size
        self.waiting = 0
        self.pinned = False
        self.dying = False

    @property
    def reclaimable(self) -> int:
        return 0 if self.pinned else len(self.blocks)

    @property
    def evictable(self) -> bool:
        return not self.pinned and bool(self.blocks) and not self.users and not self.children


class Tree:
    """Radix tree over token blocks with an eviction order. Holds no block allocator."""

    def __init__(self, block_tokens: int):
        self.block_tokens = block_tokens
        self._clock = 0
        self._order: list[tuple[int, int, int, Node]] = []  # (last use, tie, stamp, node)
        self._ties = 0
        self._compact_at = 64
        self.idle_blocks = 0  # held by nodes that nothing uses or pins: eviction can free them all

    def match(self, adapter: Node, tenant: str, tokens: Sequence[int], limit: int) -> list[Node]:
        """The cached full blocks of `tokens`, top down, covering at most `limit` tokens."""
        path: list[Node] = []
        node, size = adapter, self.block_tokens
        for start in range(0, limit - size + 1, size):
            child = node.children.get(self._key(node, tenant, tokens, start))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def insert(self, parent: Node, tenant: str, tokens: Sequence[int], start: int, block: int) -> Node:
        """The child of `parent` for the block of tokens at `start`; an existing one wins over `block`."""
        key = self._key(parent, tenant, tokens, start)
        child = parent.children.get(key)
        if child is None:
            child = Node(parent, key, [block])
            parent.children[key] = child
            self.idle_blocks += child.reclaimable
        return child

    def lock(self, node: Node) -> None:
        """One more lease goes through this node."""
        if not node.users:
            self.idle_blocks -= node.reclaimable
        node.users += 1
        self.touch(node)

    def unlock(self, node: Node) -> None:
        """One lease less; an unused leaf becomes a candidate for eviction."""
        assert node.users > 0, "unlocked more often than locked"
        node.users -= 1
        self.touch(node)
        if not node.users:
            self.idle_blocks += node.reclaimable
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Puts the node in the eviction order if nothing uses or depends on it."""
        if not node.evictable:
            return
        node.stamp += 1
        self._ties += 1
        heapq.heappush(self._order, (node.last_use, self._ties, node.stamp, node))
        if len(self._order) > self._compact_at:  # drop stale entries; amortised O(1)
            self._order = [entry for entry in self._order if self._current(entry)]
            heapq.heapify(self._order)
            self._compact_at = 2 * len(self._order) + 64

    def victims(self) -> Iterator[Node]:
        """Evictable nodes, least recently used first; each one yielded must be removed or kept in use."""
        while self._order:
            entry = heapq.heappop(self._order)
            if self._current(entry):
                yield entry[3]

    def remove(self, node: Node) -> None:
        """Takes a KV leaf out of the tree; its parent may become a candidate."""
        assert node.parent is not None and not node.children and not node.users
        parent = node.parent
        del parent.children[node.key]
        node.stamp += 1
        node.parent = None
        self.offer(parent)

    def subtree(self, node: Node) -> list[Node]:
        """All KV nodes below `node`, parents before children."""
        found: list[Node] = []
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            found.append(child)
            stack.extend(child.children.values())
        return found

    def _current(self, entry: tuple[int, int, int, Node]) -> bool:
        _, _, stamp, node = entry
        return stamp == node.stamp and node.evictable

    def touch(self, node: Node) -> None:
        """Makes the node the most recently used."""
        self._clock += 1
        node.last_use = self._clock

    def _key(self, parent: Node, tenant: str, tokens: Sequence[int], start: int) -> tuple:
        key = tuple(tokens[start : start + self.block_tokens])
        return (tenant, *key) if start == 0 else key
