"""The one owner of the pool's blocks: leases, prefix reuse, eviction. Plain Python, no jax.

A request holds a *lease* while it runs: its adapter's blocks, the cached prefix, and blocks of
its own for what it will compute. Blocks that fill up with known tokens are *published* into the
tree, where later requests find them; when the lease ends they simply stay, until something
needs the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jlora.cache.blocks import BlockAllocator
from jlora.cache.tree import AdapterNode, Node, Tree
from jlora.types import CacheState, TierState


@dataclass(slots=True)
class Lease:
    """What one running sequence holds.

    Attributes:
        blocks: its block table: the published path's blocks, then its own.
        path: the published nodes it goes through, one per leading block.
        cached: prompt tokens whose KV was found in the tree.
    """

    adapter: AdapterNode
    tenant: str
    reuse: bool
    blocks: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Host to device: adapter `uid` into `blocks`."""

    uid: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    adapter_hits: int = 0
    adapter_lookups: int = 0
    kv_hit_tokens: int = 0
    kv_lookup_tokens: int = 0
    clean_evictions: int = 0
    blocks_swapped_in: int = 0


class CacheManager:
    """Leases over one tier of `blocks` blocks of `block_tokens` tokens."""

    def __init__(self, blocks: int, block_tokens: int, prefix_reuse: bool = True):
        self.block_tokens = block_tokens
        self.prefix_reuse = prefix_reuse
        self.base = AdapterNode(uid=0, size=0)
        self.adapters: dict[int, AdapterNode] = {0: self.base}
        self.counters = Counters()
        self._allocator = BlockAllocator(blocks)
        self._tree = Tree(block_tokens)
        self._leases: dict[int, Lease] = {}

    @property
    def total(self) -> int:
        """Blocks that can be handed out."""
        return self._allocator.total

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self._allocator.free

    def capacity(self, adapter: AdapterNode, pinned: AdapterNode | None = None) -> int:
        """Tokens of the longest sequence that could run if it had the pool to itself.

        Args:
            pinned: counted as pinned even if it is not yet.
        """
        held = {node.uid: node.size for node in self.adapters.values() if node.pinned or node is pinned}
        held[adapter.uid] = adapter.size
        return max(0, self.total - sum(held.values())) * self.block_tokens

    # -- adapters ---------------------------------------------------------------------------

    def add_adapter(self, uid: int, size: int) -> AdapterNode:
        """Registers an adapter of `size` blocks; its blocks come with the first lease."""
        node = AdapterNode(uid, size)
        self.adapters[uid] = node
        return node

    def pin(self, node: AdapterNode, pinned: bool) -> list[Copy] | None:
        """Pins or unpins; pinning brings the adapter in. None: no room now, nothing changed."""
        copies = self._bring_in(node) if pinned else []
        if copies is not None:
            before = 0 if node.users else node.reclaimable
            node.pinned = pinned
            self._tree.idle_blocks += (0 if node.users else node.reclaimable) - before
            self._tree.offer(node)
        return copies

    def bring_in(self, node: AdapterNode) -> list[Copy]:
        """Loads an adapter into blocks that are free anyway; evicts nothing."""
        if node.blocks or node.size > self.free:
            return []
        copies = self._bring_in(node) or []
        self._tree.offer(node)
        return copies

    def kill(self, node: AdapterNode) -> None:
        """Ends an adapter version: no new lease, everything freed when its last user is gone."""
        self.pin(node, False)
        node.dying = True
        self._bury_if_unused(node)

    def expect(self, node: AdapterNode) -> None:
        """A queued sequence will need this adapter version: it may leave the device, but not die."""
        node.waiting += 1

    def unexpect(self, node: AdapterNode) -> None:
        """The queued sequence runs or is gone."""
        node.waiting -= 1
        self._bury_if_unused(node)

    # -- leases -----------------------------------------------------------------------------

    def acquire(
        self, adapter: AdapterNode, tenant: str, tokens: Sequence[int], reuse: bool, headroom: int
    ) -> tuple[Lease, list[Copy]] | None:
        """A lease for a sequence whose known tokens are `tokens`.

        Args:
            reuse: whether it may read from and publish into the tree.
            headroom: blocks that must stay available beside it.
        Returns:
            The lease and the copies to make before it runs; None if there is no room now.
        """
        lease = Lease(adapter, tenant, reuse and self.prefix_reuse)
        if lease.reuse:  # at least one token is always computed: its hidden state is needed
            lease.path = self._tree.match(adapter, tenant, tokens, limit=len(tokens) - 1)
        for node in (adapter, *lease.path):
            self._tree.lock(node)
        resident = bool(adapter.blocks) or adapter.size == 0
        need = self._blocks_for(len(tokens)) - len(lease.path)
        copies = None
        if self._make_room(need + (0 if resident else adapter.size) + headroom):
            copies = self._bring_in(adapter)
        if copies is None:
            self._unlock(lease)
            return None
        lease.blocks = [node.blocks[0] for node in lease.path] + self._allocator.take(need)
        lease.cached = len(lease.path) * self.block_tokens
        self._leases[id(lease)] = lease
        self._count(lease, len(tokens), resident)
        return lease, copies

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Makes the lease hold `tokens` tokens; False if there is no room now."""
        need = self._blocks_for(tokens) - len(lease.blocks)
        if need <= 0:
            return True
        if not self._make_room(need):
            return False
        lease.blocks += self._allocator.take(need)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Puts the lease's full blocks among the first `computed` tokens into the tree.

        Where another sequence published the same tokens first, the lease moves over to that
        block and gives its own back: one prefix, one copy.
        """
        if not lease.reuse or lease.adapter.dying:
            return
        size = self.block_tokens
        for index in range(len(lease.path), computed // size):
            parent = lease.path[-1] if lease.path else lease.adapter
            own = lease.blocks[index]
            node = self._tree.insert(parent, lease.tenant, tokens, index * size, own)
            if node.blocks[0] != own:
                lease.blocks[index] = node.blocks[0]
                self._allocator.give([own])
            self._tree.lock(node)
            lease.path.append(node)

    def release(self, lease: Lease) -> None:
        """Ends a lease: published blocks stay as history, its own are free."""
        del self._leases[id(lease)]
        self._allocator.give(lease.blocks[len(lease.path) :])
        self._unlock(lease)

    def cached_tokens(self, adapter: AdapterNode, tenant: str, tokens: Sequence[int]) -> int:
        """How many of `tokens` are in the tree now; changes nothing."""
        return len(self._tree.match(adapter, tenant, tokens, limit=len(tokens) - 1)) * self.block_tokens

    def flush(self) -> int:
        """Drops all KV that no lease uses; returns the blocks freed."""
        before = self.free
        kept = []
        for node in self._tree.victims():
            if isinstance(node, AdapterNode):
                kept.append(node)
            else:
                self._evict(node)
        for node in kept:
            self._tree.offer(node)
        return self.free - before

    # -- what users see ---------------------------------------------------------------------

    def state(self, block_bytes: int) -> CacheState:
        """A snapshot: blocks by class and counters."""
        kv = [node for adapter in self.adapters.values() for node in self._tree.subtree(adapter)]
        private = sum(len(lease.blocks) - len(lease.path) for lease in self._leases.values())
        history = sum(1 for node in kv if not node.users)
        adapters = sum(len(node.blocks) for node in self.adapters.values())
        hbm = TierState(self.total, self.free, adapters, history, private + len(kv) - history)
        c = self.counters
        return CacheState(
            hbm=hbm,
            host=TierState(0, 0, 0, 0, 0),
            invalid_kv=sum(1 for n in self.adapters.values() if n.size and n.children and not n.blocks),
            adapter_hits=c.adapter_hits,
            adapter_lookups=c.adapter_lookups,
            kv_hit_tokens=c.kv_hit_tokens,
            kv_lookup_tokens=c.kv_lookup_tokens,
            bytes_swapped_in=c.blocks_swapped_in * block_bytes,
            bytes_swapped_out=0,
            clean_evictions=c.clean_evictions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the pool or the tree is broken."""
        owned: list[int] = []
        idle = 0
        users: dict[int, int] = {}
        for lease in self._leases.values():
            owned += lease.blocks[len(lease.path) :]
            assert lease.blocks[: len(lease.path)] == [node.blocks[0] for node in lease.path]
            for node in (lease.adapter, *lease.path):
                users[id(node)] = users.get(id(node), 0) + 1
        for adapter in self.adapters.values():
            owned += adapter.blocks
            idle += 0 if adapter.users else adapter.reclaimable
            assert len(adapter.blocks) in (0, adapter.size)
            assert adapter.users == users.get(id(adapter), 0), "users are not the live leases"
            assert not adapter.dying or adapter.users or adapter.waiting, "a dead adapter without users is still here"
            for node in self._tree.subtree(adapter):
                owned += node.blocks
                idle += 0 if node.users else node.reclaimable
                assert len(node.blocks) == 1 and (adapter.blocks or not adapter.size), "KV without its adapter"
                assert node.users == users.get(id(node), 0), "users are not the live leases"
                assert node.parent is not None and node.parent.users >= node.users, "a user skips its prefix"
        assert idle == self._tree.idle_blocks, "the count of reclaimable blocks is wrong"
        self._allocator.check_integrity(owned)

    # -- inside -----------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _make_room(self, count: int) -> bool:
        """Evicts unused leaves, least recently used first, until `count` blocks are free.

        Evicts nothing if that could not be enough: history is not lost for a request that waits.
        """
        if self.free + self._tree.idle_blocks < count:
            return False
        victims = self._tree.victims()
        while self.free < count:
            self._evict(next(victims))
        return True

    def _evict(self, node: Node) -> None:
        self._drop(node)
        self.counters.clean_evictions += 1
        if not isinstance(node, AdapterNode):
            self._tree.remove(node)

    def _drop(self, node: Node) -> None:
        """Frees an unused node's blocks."""
        self._tree.idle_blocks -= node.reclaimable
        self._allocator.give(node.blocks)
        node.blocks = []

    def _bring_in(self, node: AdapterNode) -> list[Copy] | None:
        if node.blocks or not node.size:
            return []
        if not self._make_room(node.size):
            return None
        node.blocks = self._allocator.take(node.size)
        self._tree.idle_blocks += 0 if node.users else node.reclaimable
        self._tree.touch(node)
        self.counters.blocks_swapped_in += node.size
        return [Copy(node.uid, tuple(node.blocks))]

    def _unlock(self, lease: Lease) -> None:
        for node in (*reversed(lease.path), lease.adapter):
            self._tree.unlock(node)
        self._bury_if_unused(lease.adapter)

    def _bury_if_unused(self, node: AdapterNode) -> None:
        if not node.dying or node.users or node.waiting:
            return
        for child in reversed(self._tree.subtree(node)):
            self._drop(child)
            self._tree.remove(child)
        self._drop(node)
        del self.adapters[node.uid]

    def _count(self, lease: Lease, tokens: int, resident: bool) -> None:
        c = self.counters
        c.kv_lookup_tokens += tokens
        c.kv_hit_tokens += lease.cached
        if lease.adapter.size:
            c.adapter_lookups += 1
            c.adapter_hits += resident
