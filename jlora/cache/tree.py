"""The dependency tree: adapters on top, KV below, one node per block of tokens.

    root ─┬─ base (size 0) ── KV ── KV ─┬─ KV         a path from an adapter down is a conversation;
          ├─ adapter 1 ────── KV        └─ KV         siblings share what is above them
          └─ adapter 2 ────── KV ── KV

An activated LoRA (aLoRA, arXiv 2504.12397) changes tokens from its invocation on. What comes before
is KV of the base, shared by the base and all such adapters. The rest, its *suffix*, hangs below that
KV and needs its adapter too, so the tree is a small DAG:

    base ── KV ── KV ─┬─ KV                           the base goes on
                      ├─ suffix ── KV                 adapter 3; the invocation is in the suffix's first block
                      └─ suffix                       adapter 4, or adapter 3 with another first token

A KV node is one full block of tokens, so a split is just a second child. A node's data may lie on
the device, on the host, on both, or be on its way between them:

    computed here ──▶ DEVICE ──save──▶ BOTH ──evict──▶ HOST ──bring──▶ BOTH      (FASTLIBRA, section 4)
                        └────────evict without a host copy────────▶ gone

A node without data stays while something below it has data: computing the block again makes that
usable again. This module knows structure only; `residency` and `policies` decide what moves.
Plain Python, no jax.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Reversible, Sequence
from typing import NamedTuple

from jlora.types import Salt

ADAPTER, KV = 0, 1  # kinds of node: what a block may hold

# What a node's device blocks are doing (`Node.standing`):
#   ABSENT   there are none
#   LEAVING  they are being written out, to be freed then (`writeback` only)
#   BUSY     nothing uses them, but a copy is under way or the adapter is pinned
#   IN_USE   a lease goes through the node
#   IDLE     nothing uses them, and the host has a copy (an adapter's master copy)
#   BARE     idle KV without a copy on the host
# From BUSY on, a node keeps what it needs on the device; from IDLE on, it may be evicted.
ABSENT, LEAVING, BUSY, IN_USE, IDLE, BARE = range(6)

# A block's tokens as int32 bytes. A suffix's first block adds its adapter's uid and the place of the
# first activated token as int64; a conversation's first block is (salt, these).
Key = bytes | tuple[Salt, bytes]


class Node:
    """One block of KV, or (`AdapterNode`) an adapter."""

    __slots__ = (
        "parent", "key", "children", "device", "host", "coming", "saving", "standing", "users",
        "wanted", "resident", "shared", "count", "last_use", "stamp",
    )  # fmt: skip
    kind = KV
    pinned = False
    size = 1

    def __init__(self, parent: Node | None, key: Key):
        self.parent = parent
        self.key = key
        # KV nodes below: None, the only one, or several by key. (A dict in every node takes half as much
        # memory again, and Python's full garbage collections six times as long.) Read it through `child`
        # and `branches`.
        self.children: Node | dict[Key, Node] | None = None
        self.device: tuple[int, ...] = ()  # block ids; one for KV
        self.host: tuple[int, ...] = ()  # likewise
        self.coming = False  # `device` blocks are taken but the copy into them has not landed
        self.saving = False  # `host` blocks are taken but the copy into them has not landed
        self.standing = ABSENT  # what its device blocks are doing, as `residency` last counted them
        self.users = 0  # leases that go through this node
        self.wanted: Sequence[int] = ()  # places in the order of service that need it, soonest first
        self.resident = 0  # how many of its dependents keep it on the device
        self.shared = False  # more than one conversation goes through it
        self.count = 0.0  # visits, decayed as the policy likes
        self.last_use = 0.0  # the policy's clock, seconds
        self.stamp = 0  # version of its entries in cost orders; older entries are stale

    def child(self, key: Key) -> Node | None:
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
    def needs(self) -> tuple[Node, ...]:
        """What must be on the device for this to be of use: its prefix or adapter; for a suffix both."""
        return () if self.parent is None else (self.parent,)

    def dependents(self) -> Iterator[Node]:
        """What needs this node, the latest first."""
        return reversed(self.branches())

    @property
    def on_device(self) -> bool:
        """A step dispatched now can read its data."""
        return bool(self.device) and not self.coming

    @property
    def on_host(self) -> bool:
        """A complete copy lies in the host tier."""
        return bool(self.host) and not self.saving

    @property
    def moving(self) -> bool:
        """A copy of it is under way."""
        return self.coming or self.saving


class AdapterNode(Node):
    """One version of an adapter; the base model has size 0."""

    __slots__ = ("uid", "size", "flying", "pinned", "dying", "reading", "backed", "gone", "hits", "suffixes")
    kind = ADAPTER

    def __init__(self, uid: int, size: int):
        super().__init__(None, b"")
        self.uid = uid  # new for every load; 0 is the base
        self.size = size  # blocks it takes in each tier
        self.flying = 0  # copies under way of itself and of its own KV
        self.pinned = False  # never evicted
        self.dying = False  # unloaded or replaced: no new lease, freed with its last user
        self.reading = False  # its master copy comes from the disk and is not there yet
        self.backed = False  # its files are as they were read: the host copy may be dropped and read again
        self.gone = False  # out of the tree: freed for good, or on the disk only
        self.hits = 0  # requests that found it on the device
        self.shared = True
        self.suffixes: dict[SuffixNode, None] = {}  # by their first blocks, in order of use (a dict as a set)

    def dependents(self) -> Iterator[Node]:
        return itertools.chain(reversed(self.branches()), reversed(self.suffixes))

    @property
    def droppable(self) -> bool:
        """Nothing uses it or waits for it, and the disk has it: it may leave memory, and its KV with it."""
        return not self.wanted and self.idle_copy

    @property
    def idle_copy(self) -> bool:
        """Nothing uses it, be it that requests wait for it, and the disk has it."""
        busy = self.users or self.flying or self.moving
        return self.backed and bool(self.host) and not (busy or self.pinned or self.dying)

    @property
    def ready(self) -> bool:
        """A step may use it: it is on the device, or there is nothing of it (the base)."""
        return self.on_device or not self.size


class SuffixNode(Node):
    """The first block of an activated suffix: it needs the KV above it and its adapter.

    The nodes below it are ordinary ones; they need both through it.
    """

    __slots__ = ("adapter",)

    def __init__(self, parent: Node, key: Key, adapter: AdapterNode):
        super().__init__(parent, key)
        self.adapter = adapter
        adapter.suffixes[self] = None

    @property
    def needs(self) -> tuple[Node, ...]:
        return (*super().needs, self.adapter)

    def use(self) -> None:
        """Makes it the latest of its adapter's suffixes."""
        del self.adapter.suffixes[self]
        self.adapter.suffixes[self] = None


def adapter_of(node: Node) -> AdapterNode:
    """The adapter whose KV the node is, or which it is itself."""
    while type(node) is Node:
        assert node.parent is not None, "a node that is not in the tree"
        node = node.parent
    if isinstance(node, SuffixNode):
        return node.adapter
    assert isinstance(node, AdapterNode)
    return node


class Origin(NamedTuple):
    """What a sequence's KV depends on, beside its tokens."""

    adapter: AdapterNode
    salt: Salt = ""  # equal tokens of two tenants, or two salts of one, share nothing
    # Position of the first token that an activated LoRA acts on; what comes before is the base's KV.
    # None: the adapter acts on every token.
    activation: int | None = None


class Tree:
    """Match, insert and remove, over blocks of `block_tokens` tokens."""

    def __init__(self, block_tokens: int):
        self.block_tokens = block_tokens
        self.base = AdapterNode(uid=0, size=0)
        # The roots, by uid: the base, and every adapter version until its last user is gone.
        self.adapters: dict[int, AdapterNode] = {0: self.base}
        self._bytes = 4 * block_tokens

    def top(self, origin: Origin) -> AdapterNode:
        """Where a path begins: below its adapter, or below the base if its adapter is an activated LoRA."""
        return origin.adapter if origin.activation is None else self.base

    def by_owner(self, origin: Origin, path: list[Node]) -> tuple[tuple[AdapterNode, list[Node]], ...]:
        """A path cut by whose KV it is: the base's, under an activated LoRA, and the adapter's own."""
        cut = self._base_blocks(origin)
        return (self.base, path[:cut]), (origin.adapter, path[cut:])

    def match(self, origin: Origin, tokens: Sequence[int], limit: int) -> list[Node]:
        """The known full blocks of `tokens`, top down, covering at most `limit` tokens.

        Ends at the first block without data. O(blocks of the prompt), whatever the tree's size.
        """
        path: list[Node] = []
        stop = limit // self.block_tokens * self.block_tokens
        data = _packed(tokens[:stop])
        below, step = self.top(origin).children, self._bytes
        suffix = -1 if origin.activation is None else self._base_blocks(origin) * step
        for at in range(0, len(data), step):
            key: Key = data[at : at + step]
            if not at or at == suffix:
                key = self._key(origin, key, not at, at == suffix)
            if isinstance(below, dict):
                below = below.get(key)
            elif below is None or below.key != key:
                break
            if below is None or not (below.device or (below.host and not below.saving)):
                break
            path.append(below)
            below = below.children
        return path

    def insert(self, parent: Node, origin: Origin, tokens: Sequence[int], start: int) -> Node:
        """The child of `parent` for the block of tokens at `start`, made if there is none."""
        data = _packed(tokens[start : start + self.block_tokens])
        suffix = origin.activation is not None and start == self._base_blocks(origin) * self.block_tokens
        key = self._key(origin, data, not start, suffix)
        child = parent.child(key)
        if child is not None:
            return child
        if not suffix and not parent.shared and any(type(other) is Node for other in parent.branches()):
            _share(parent)  # a suffix belongs to the same conversation
        child = SuffixNode(parent, key, origin.adapter) if suffix else Node(parent, key)
        below = parent.children
        if isinstance(below, dict):
            below[key] = child
        elif below is None:
            parent.children = child
        else:
            parent.children = {below.key: below, key: child}
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
        if isinstance(node, SuffixNode):
            del node.adapter.suffixes[node]
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

    def owned(self, adapter: AdapterNode) -> Iterator[Node]:
        """All KV nodes that end with an adapter's version, parents before children."""
        yield from self.below(adapter)
        for suffix in adapter.suffixes:
            yield suffix
            yield from self.below(suffix)

    def _base_blocks(self, origin: Origin) -> int:
        """Leading blocks that end before an activated LoRA acts: the base's KV. 0 without one."""
        return 0 if origin.activation is None else origin.activation // self.block_tokens

    def _key(self, origin: Origin, data: bytes, first: bool, suffix: bool) -> Key:
        """The key of a path's first block, of a suffix's first block, or of any other."""
        if suffix:
            assert origin.activation is not None
            data = suffix_key(data, origin.adapter.uid, origin.activation % self.block_tokens)
        return (origin.salt, data) if first else data


def suffix_key(data: bytes, uid: int, place: int) -> bytes:
    """The key of an activated suffix's first block, below a conversation's first.

    Args:
        data: the block's tokens.
        place: of the first activated token among them. The tokens alone do not tell it: they may hold
            the invocation twice.
    """
    return data + struct.pack("2q", uid, place)


def _packed(tokens: Sequence[int]) -> bytes:
    """Tokens as int32. For a list, `struct` takes at most half the time that `array` takes."""
    return struct.pack(f"{len(tokens)}i", *tokens)


def _share(node: Node | None) -> None:
    """Marks a branch and everything above it as shared; each node is marked once."""
    while node is not None and not node.shared:
        node.shared = True
        node = node.parent
