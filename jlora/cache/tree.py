"""The dependency tree: adapters on top, KV below, one node per block of tokens.

    root ─┬─ base (size 0) ── KV ── KV ─┬─ KV         a path from an adapter down is a conversation;
          ├─ adapter 1 ────── KV        └─ KV         siblings share what is above them
          └─ adapter 2 ────── KV ── KV

A KV node is one full block of tokens, so a split needs no surgery: it is a second child. A node's
data may lie on the device, on the host, on both, or be on its way between them:

    computed here ──▶ DEVICE ──save──▶ BOTH ──evict──▶ HOST ──bring──▶ BOTH      (FASTLIBRA, section 4)
                        └────────evict without a host copy────────▶ gone

A node whose data is gone stays while something below it has data: computing the block again
brings what lies below back into use. This module knows structure only; who moves and why is
decided in `residency` and `policies`. Plain Python, no jax.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

ADAPTER, KV = 0, 1  # kinds of node: what a block may hold


class Node:
    """One block of KV, or (`AdapterNode`) an adapter.

    Attributes:
        key: the block's tokens as int32 bytes; a first block's key is (tenant, tokens).
        children: KV nodes by key; None while there are none (most nodes of a large tree).
        device, host: block ids in each tier, () where it has none; one for KV.
        coming: `device` blocks are taken but the copy into them has not landed.
        saving: `host` blocks are taken but the copy into them has not landed.
        users: leases that go through this node.
        wanted: queued sequences that will need it.
        resident: children that hold device blocks.
        shared: more than one conversation goes through it.
        count: visits, decayed as the policy likes; last_use: the policy's clock, seconds.
        stamp: version of the node's entries in cost orders; older entries are stale.
    """

    __slots__ = (
        "parent", "key", "children", "device", "host", "coming", "saving", "users",
        "wanted", "resident", "shared", "count", "last_use", "stamp",
    )  # fmt: skip
    kind = KV
    pinned = False
    size = 1

    def __init__(self, parent: Node | None, key: bytes | tuple[str, bytes]):
        self.parent = parent
        self.key = key
        self.children: dict[bytes | tuple[str, bytes], Node] | None = None
        self.device: tuple[int, ...] = ()
        self.host: tuple[int, ...] = ()
        self.coming = False
        self.saving = False
        self.users = 0
        self.wanted = 0
        self.resident = 0
        self.shared = False
        self.count = 0.0
        self.last_use = 0.0
        self.stamp = 0

    @property
    def on_device(self) -> bool:
        """Its data can be read by a step dispatched now."""
        return bool(self.device) and not self.coming

    @property
    def on_host(self) -> bool:
        """A complete copy lies in the host tier."""
        return bool(self.host) and not self.saving

    @property
    def has_data(self) -> bool:
        """Whether a request may count on it, perhaps after a copy."""
        return bool(self.device) or self.on_host

    @property
    def moving(self) -> bool:
        """A copy of it is under way."""
        return self.coming or self.saving


class AdapterNode(Node):
    """One version of an adapter; the base model has size 0.

    Attributes:
        uid: new for every load; 0 is the base.
        size: blocks it takes in each tier.
        flying: copies under way in its subtree, its own included.
        pinned: never evicted.
        dying: unloaded or replaced: no new lease, freed with its last user.
    """

    __slots__ = ("uid", "size", "flying", "pinned", "dying")
    kind = ADAPTER

    def __init__(self, uid: int, size: int):
        super().__init__(None, b"")
        self.uid = uid
        self.size = size
        self.flying = 0
        self.pinned = False
        self.dying = False
        self.shared = True

    @property
    def ready(self) -> bool:
        """A step may use it: it is on the device, or there is nothing of it (the base)."""
        return self.on_device or not self.size


class Tree:
    """Match, insert and remove, over blocks of `block_tokens` tokens."""

    def __init__(self, block_tokens: int):
        self.block_tokens = block_tokens
        self._bytes = 4 * block_tokens

    def match(self, adapter: Node, tenant: str, tokens: Sequence[int], limit: int) -> list[Node]:
        """The known full blocks of `tokens`, top down, covering at most `limit` tokens.

        Ends at the first block without data. O(blocks of the prompt), whatever the tree's size.
        """
        path: list[Node] = []
        if adapter.children is None:
            return path
        stop = limit // self.block_tokens * self.block_tokens
        data = array("i", tokens[:stop]).tobytes()
        children, step = adapter.children, self._bytes
        for at in range(0, len(data), step):
            key = data[at : at + step]
            child = children.get(key if at else (tenant, key))
            if child is None or not (child.device or (child.host and not child.saving)):
                break
            path.append(child)
            if child.children is None:
                break
            children = child.children
        return path

    def insert(self, parent: Node, tenant: str, tokens: Sequence[int], start: int) -> Node:
        """The child of `parent` for the block of tokens at `start`, made if there is none."""
        key = array("i", tokens[start : start + self.block_tokens]).tobytes()
        if parent.children is None:
            parent.children = {}
        full = key if start else (tenant, key)
        child = parent.children.get(full)
        if child is None:
            child = parent.children[full] = Node(parent, full)
            if len(parent.children) > 1:
                _share(parent)
        return child

    def remove(self, node: Node) -> Node:
        """Takes a leaf out of the tree; its parent."""
        parent = node.parent
        assert parent is not None and parent.children and not node.children and not node.users
        del parent.children[node.key]
        if not parent.children:
            parent.children = None
        node.stamp += 1
        node.parent = None
        return parent

    def below(self, node: Node) -> Iterator[Node]:
        """All KV nodes below `node`, parents before children."""
        stack = list(node.children.values()) if node.children else []
        while stack:
            child = stack.pop()
            if child.children:
                stack.extend(child.children.values())
            yield child


def _share(node: Node | None) -> None:
    """A branch: everything above it serves several conversations. Each node is marked once."""
    while node is not None and not node.shared:
        node.shared = True
        node = node.parent
