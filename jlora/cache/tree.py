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
from collections.abc import Iterator, Reversible, Sequence

ADAPTER, KV = 0, 1  # kinds of node: what a block may hold

Key = bytes | tuple[str, bytes]


class Node:
    """One block of KV, or (`AdapterNode`) an adapter.

    Attributes:
        key: the block's tokens as int32 bytes; a first block's key is (tenant, tokens).
        children: KV nodes below: None, the only one (a dict for it would double a node's memory),
            or several by key. Read it through `child` and `branches`.
        device, host: block ids in each tier, () where it has none; one for KV.
        coming: `device` blocks are taken but the copy into them has not landed.
        saving: `host` blocks are taken but the copy into them has not landed.
        users: leases that go through this node.
        wanted: queued sequences that will need it.
        resident: children that hold device blocks and are not about to leave.
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

    def __init__(self, parent: Node | None, key: Key):
        self.parent = parent
        self.key = key
        self.children: Node | dict[Key, Node] | None = None
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

    def child(self, key: Key) -> Node | None:
        """The child for these tokens."""
        below = self.children
        if isinstance(below, dict):
            return below.get(key)
        return below if below is not None and below.key == key else None

    def branches(self) -> Reversible[Node]:
        """All children, the latest last."""
        below = self.children
        if isinstance(below, dict):
            return below.values()
        return () if below is None else (below,)

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
        stop = limit // self.block_tokens * self.block_tokens
        data = array("i", tokens[:stop]).tobytes()
        below, step = adapter.children, self._bytes
        for at in range(0, len(data), step):
            key = data[at : at + step] if at else (tenant, data[:step])
            if isinstance(below, dict):
                below = below.get(key)
            elif below is None or below.key != key:
                break
            if below is None or not (below.device or (below.host and not below.saving)):
                break
            path.append(below)
            below = below.children
        return path

    def insert(self, parent: Node, tenant: str, tokens: Sequence[int], start: int) -> Node:
        """The child of `parent` for the block of tokens at `start`, made if there is none."""
        data = array("i", tokens[start : start + self.block_tokens]).tobytes()
        key = data if start else (tenant, data)
        child = parent.child(key)
        if child is not None:
            return child
        child = Node(parent, key)
        below = parent.children
        if isinstance(below, dict):
            below[key] = child
        elif below is None:
            parent.children = child
        else:
            parent.children = {below.key: below, key: child}
            _share(parent)
        return child

    def remove(self, node: Node) -> Node:
        """Takes a leaf out of the tree; its parent."""
        parent = node.parent
        assert parent is not None and parent.child(node.key) is node and not node.children and not node.users
        below = parent.children
        if isinstance(below, dict):
            del below[node.key]
            if len(below) == 1:
                (parent.children,) = below.values()
        else:
            parent.children = None
        node.stamp += 1
        node.parent = None
        return parent

    def below(self, node: Node) -> Iterator[Node]:
        """All KV nodes below `node`, parents before children."""
        stack = [*node.branches()]
        while stack:
            child = stack.pop()
            stack.extend(child.branches())
            yield child


def _share(node: Node | None) -> None:
    """A branch: everything above it serves several conversations. Each node is marked once."""
    while node is not None and not node.shared:
        node.shared = True
        node = node.parent
