"""Where every node's data is, and every change of that: the mechanism that all policies share.

An eviction never writes: adapters have a master copy on the host, and KV is copied out while it is
idle. So an eviction only forgets a block id. This module *decides* copies; the next plan starts them,
and `landed` completes them. Plain Python, no jax.

A lease or a copy under way keeps a node where it is, and a pin keeps it on the device. A node on the
device keeps what it needs there: KV its prefix and its adapter (unless the policy is an ablation
without dependencies). Every change of a node's standing goes through `_move`, which counts its blocks.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence

from jlora.cache import queued
from jlora.cache.blocks import Tier
from jlora.cache.candidates import Candidates, Values
from jlora.cache.counters import Counters
from jlora.cache.policies import Policy
from jlora.cache.transfer import Copy, Traffic
from jlora.cache.tree import (
    ABSENT,
    ADAPTER,
    BARE,
    BUSY,
    IDLE,
    IN_USE,
    KV,
    LEAVING,
    AdapterNode,
    Node,
    Origin,
    SuffixNode,
    Tree,
)  # fmt: skip

log = logging.getLogger(__name__)

BRANCHES = 64  # nodes below one that comes in, offered to follow it
STREAM_FROM_S = 1e-3  # a shorter copy comes as one piece: a group of layers costs a transfer of its own


class Residency:
    """Both tiers, the candidates, and the copies under way."""

    leaving = 0  # device blocks that come free without an eviction

    def __init__(self, tree: Tree, blocks: tuple[int, int], policy: Policy, clock: Callable[[], float], streams: bool):
        self.tree = tree
        self.device, self.host = Tier(blocks[0]), Tier(blocks[1])
        self.policy = policy
        self.clock = clock
        self.counters = Counters()
        self.traffic = Traffic()
        self.candidates = Candidates(policy, clock)
        self.epoch = 0  # grows whenever something that was refused may now be granted
        self.streams = streams  # a long copy that a request waits for comes in groups of layers
        self._blocks = [0] * 6, [0] * 6  # nodes' device blocks, by kind and standing
        self.adapters = 0  # adapters with device blocks, those too whose copies are under way

    @property
    def bare(self) -> int:
        """Idle KV blocks on the device without a host copy."""
        return self._blocks[KV][BARE]

    @property
    def running(self) -> int:
        """KV blocks in use: those of nodes that leases go through, and those that leases own themselves."""
        _, leaving, busy, _, idle, bare = self._blocks[KV]
        return self.device.used[KV] - leaving - busy - idle - bare

    def idle(self, *kinds: int) -> int:
        """Blocks of these kinds that evictions can free, leaves first."""
        return sum(self._blocks[kind][IDLE] + self._blocks[kind][BARE] for kind in kinds)

    # -- use ----------------------------------------------------------------------------------

    def visit(self, nodes: Sequence[Node]) -> None:
        """A request was granted these nodes."""
        now = self.clock()
        for node in nodes:
            self.policy.visit(node, now)
            if type(node) is SuffixNode:
                node.use()
            if node.host:
                self.candidates.doubles.push(node)

    def lock(self, node: Node) -> None:
        """One more lease goes through this node."""
        node.users += 1
        if node.users == 1:
            self._settle(node)

    def unlock(self, node: Node, used: bool = True) -> None:
        """One lease less; without any, the node becomes a candidate. A lease that was refused used nothing."""
        assert node.users > 0, "unlocked more often than locked"
        if used:
            self.policy.leave(node, self.clock())
        node.users -= 1
        if not node.users:
            self._settle(node)
            self.candidates.offer(node)
            self.epoch += 1

    def want(self, node: Node, place: int) -> None:
        if queued.want(node, place):
            self.candidates.offer(node)

    def unwant(self, node: Node, place: int) -> None:
        if queued.unwant(node, place):
            self.candidates.offer(node)
        if not node.wanted:
            self.epoch += 1

    def pin(self, node: AdapterNode, pinned: bool) -> None:
        """A pinned adapter is not evicted."""
        node.pinned = pinned
        self._settle(node)
        self.candidates.offer(node)
        self.epoch += 1

    # -- room -----------------------------------------------------------------------------------

    def room(self, kind: int) -> int:
        """Free blocks that `kind` may take."""
        return self.device.free

    def limit(self, kind: int) -> int:
        """The most blocks that `kind` may ever hold."""
        return self.device.total

    def obtainable(self, adapter: int, kv: int) -> bool:
        """Whether so many blocks of each kind are free or idle."""
        return adapter + kv <= self.device.free + self.idle(ADAPTER, KV)

    def lacks_share(self, adapter: AdapterNode) -> bool:
        """See `CacheManager.lacks_share`."""
        return False

    def make_room(self, adapter: int = 0, kv: int = 0, gently: bool = False, spare_s: float = math.inf) -> bool:
        """Evicts the least valuable candidates until so many blocks of each kind can be taken.

        Evicts nothing if all idle blocks would not be enough: the request waits anyway, and history
        is not lost for it.

        Args:
            gently: touch nothing that the queue needs or that would be lost.
            spare_s: of the nodes that the queue needs, evict those that take so many seconds to load; none
                with 0. What has been evicted by then stays evicted, so the next attempt lacks less.
        """
        if not self.obtainable(adapter, kv):
            return False
        return self._free(None, adapter + kv - self.device.free, gently, spare_s)

    def evict(self, node: Node) -> None:
        """Forgets a candidate's device blocks; without a copy on the host its data is lost."""
        assert self.candidates.evictable(node), "evicted what is in use, pinned or depended on"
        if log.isEnabledFor(logging.DEBUG):
            worth = self.candidates.value(node)
            log.debug("evict %s: %d blocks, worth %.3g", _name(node), len(node.device), worth)
        self._leave_device(node)
        if node.host:
            self.counters.clean_evictions += 1
        else:
            self.counters.blocks_lost += 1
            self._prune(node)

    def make_host_room(self, count: int, saved: Node | None = None) -> bool:
        """Frees host blocks for a copy of `saved`, or for an adapter, whatever it takes.

        Copies of KV that stays on the device go first (`Doubles`). Then leaves that are worth less than `saved`
        go for good. For an adapter, others that the disk has may go, too, whichever is worth less. False if
        that is not enough; at once if all of it would not be.
        """
        if count > self.host.free + self.host.used[KV] and (saved is not None or count > self.room_with_shelf()):
            return False
        value = self.candidates.value
        worth = math.inf if saved is None else value(saved)
        while self.host.free < count:
            node = self.candidates.doubles.first(saved)
            if node is None:
                node = self.candidates.drop()
                if saved is None and self._shelve_before(node):
                    continue
                if node is None or value(node) >= worth:
                    return False
                self.counters.blocks_lost += 1
            gone = "" if node.device else ", its only copy"
            log.debug("drop from the host %s: %d blocks%s", _name(node), len(node.host), gone)
            self._leave_host(node)
            self._prune(node)
            self.candidates.offer(node)
        return True

    def shelve(self, adapter: AdapterNode) -> None:
        """Drops an idle adapter from memory; the disk has it. Its KV goes with it: nothing could use that."""
        assert adapter.droppable, "dropped an adapter that is in use, pinned or not on the disk"
        log.debug("drop adapter %d to the disk: %d blocks", adapter.uid, adapter.size)
        self._remove(adapter)
        self.counters.adapters_dropped += 1

    def displaceable(self, place: float) -> list[AdapterNode]:
        """Idle adapters that the disk has and that the queue needs behind this place only, the soonest first."""
        adapters = (node for node in self.tree.adapters.values() if node.wanted and node.idle_copy)
        return sorted((node for node in adapters if node.wanted[0] > place), key=lambda node: node.wanted[0])

    def displace(self, adapter: AdapterNode) -> None:
        """Drops an idle adapter from memory although requests wait for it: they wait for the disk then."""
        log.debug("drop adapter %d to the disk, for an earlier request: %d blocks", adapter.uid, adapter.size)
        self._empty(adapter)
        adapter.backed, adapter.reading = False, True
        self.counters.adapters_dropped += 1

    def _shelve_before(self, node: Node | None) -> bool:
        """Drops the adapter that is worth least, if there is one and this KV is worth more."""
        adapter, worth = self.candidates.shelved()
        if adapter is None or (node is not None and worth > self.candidates.value(node)):
            return False
        self.shelve(adapter)
        return True

    def room_with_shelf(self) -> int:
        """Host blocks that dropping every adapter would free that may be dropped, and all KV."""
        shelf = sum(node.size for node in self.tree.adapters.values() if node.droppable)
        return self.host.free + self.host.used[KV] + shelf

    def best_root(self) -> Node | None:
        """The most valuable node that may be fetched ahead (`Candidates.root`), if it fits into free blocks."""
        root = self.candidates.root()
        return root if root is not None and len(root.host) <= self.device.free else None

    # -- copies ---------------------------------------------------------------------------------

    def bring_adapter(self, node: AdapterNode, demand: bool) -> bool:
        """Starts an adapter's copy to the device if it is not there; False if no room could be made."""
        if node.device or not node.size:
            return True
        assert node.host, "an adapter that is not in host memory cannot be copied"
        if not self.make_room(adapter=node.size):
            return False
        self.bring(node, [node], demand)
        return True

    def bring_path(self, origin: Origin, path: list[Node], demand: bool) -> None:
        """Starts the copies of what of a path is not on the device; the caller has made room.

        An activated suffix comes first: only the last of the copies can be streamed, and the prefix is long.
        """
        parts = [
            (owner, [node for node in nodes if not node.device])
            for owner, nodes in reversed(self.tree.by_owner(origin, path))
        ]
        # All blocks at once: a suffix whose prefix had no memory would depend on what is not there.
        blocks = self.device.take(KV, sum(len(node.host) for _, nodes in parts for node in nodes))
        for owner, nodes in parts:
            count = sum(len(node.host) for node in nodes)
            self._bring(owner, nodes, blocks[:count], demand)
            blocks = blocks[count:]

    def bring(self, adapter: AdapterNode, nodes: Sequence[Node], demand: bool) -> None:
        """Starts one copy to the device of nodes of one kind; the caller has made room."""
        self._bring(adapter, nodes, self.device.take(nodes[0].kind, sum(len(node.host) for node in nodes)), demand)

    def _bring(self, adapter: AdapterNode, nodes: Sequence[Node], target: tuple[int, ...], demand: bool) -> None:
        if not nodes:
            return
        source = tuple(block for node in nodes for block in node.host)
        long = self.policy.meter.load_s(nodes[0].kind, len(source)) > STREAM_FROM_S
        copy = Copy("in", adapter, tuple(nodes), source, target, demand, streams=self.streams and demand and long)
        at = 0
        for node in nodes:
            node.coming = True
            node.device = target[at : at + node.size]
            at += node.size
            self._settle(node)
            node.stamp += 1
        self._start(copy)
        for node in nodes:
            self._offer_below(node)

    def save(self, adapter: AdapterNode, nodes: Sequence[Node]) -> None:
        """Starts one copy to the host; the caller has made room there."""
        for node in nodes:
            self._reserve(node)
            self._settle(node)
        self._send(adapter, nodes)

    def landed(self, copy: Copy) -> None:
        """A copy is complete: on the device its scatter was dispatched, on the host it was written."""
        self.traffic.land(copy)
        self.policy.meter.observe(copy)
        for node in copy.nodes:
            node.coming = node.saving = False
            self._settle(node)
        if copy.direction == "in":
            self.counters.blocks_in += len(copy.source)
        else:
            self.counters.blocks_out += len(copy.source)
        for node in reversed(copy.nodes):  # dependents first: each may make its parent a leaf
            self._arrive(node)
        if copy.adapter.droppable and copy.kind == KV:
            self.candidates.offer(copy.adapter)
        self.epoch += 1

    def lost(self, copy: Copy) -> bool:
        """A copy has failed: takes back the blocks that it was to fill. No lease goes through its nodes any more.

        False, and nothing has changed, while copies of what depends on its nodes are under way.
        """
        below = self._below(copy.nodes) if copy.direction == "in" else []
        if any(node.moving for node in below):
            return False
        self.traffic.land(copy)
        for node in copy.nodes:
            node.coming = node.saving = False
            self._settle(node)
        for node in reversed((*copy.nodes, *below)):
            leaves = copy.direction == "in" or node.standing == LEAVING  # and so may what it depends on
            if copy.direction == "out":
                self._leave_host(node)
                self._stay(node)
                self.candidates.offer(node)
            if leaves:
                self.counters.blocks_lost += 0 if node.host else node.size
                self._leave_device(node)
                self._prune(node)
        if copy.adapter.droppable:
            self.candidates.offer(copy.adapter)
        self.epoch += 1
        return True

    def _below(self, nodes: Sequence[Node]) -> list[Node]:
        """What depends on these nodes and is on the device, each after what it depends on."""
        found = dict.fromkeys(nodes)
        grown = list(nodes)
        for node in grown:  # grows meanwhile
            fresh = [child for child in node.dependents() if child.device and child not in found]
            found |= dict.fromkeys(fresh)
            grown += fresh
        return grown[len(nodes) :]

    # -- the tree -------------------------------------------------------------------------------

    def adopt(self, node: Node, block: int) -> None:
        """The node's data was computed into this device block: the node owns it from now on."""
        assert not node.device
        node.device = (block,)
        self._settle(node)
        node.stamp += 1
        self._offer_below(node)

    def forget(self, node: Node) -> None:
        """Drops an unused leaf from both tiers, and KV from the tree."""
        assert not node.users and not node.moving
        if node.device:
            self._leave_device(node)
        if node.host:
            self._leave_host(node)
        self._prune(node)

    def retire(self, adapter: AdapterNode) -> None:
        """Lets go of an adapter that nothing uses: for good if it is dying, or else as the policy likes."""
        if not adapter.dying:
            if not self.policy.keeps(adapter) and self.candidates.evictable(adapter):
                self.evict(adapter)
            return
        if adapter.users or adapter.wanted or adapter.flying or adapter.uid not in self.tree.adapters:
            return
        self._remove(adapter)

    def _remove(self, adapter: AdapterNode) -> None:
        """Takes an unused adapter and its KV out of both tiers and the tree."""
        self._empty(adapter)
        adapter.gone = True
        del self.tree.adapters[adapter.uid]

    def _empty(self, adapter: AdapterNode) -> None:
        """Takes an unused adapter's data and its KV out of both tiers."""
        for child in reversed(list(self.tree.owned(adapter))):
            if child.parent is not None:  # else it went with its last child
                self.forget(child)
        self.forget(adapter)

    # -- inside -----------------------------------------------------------------------------------

    def _standing(self, node: Node) -> int:
        if not node.device:
            return ABSENT
        if node.users:
            return IN_USE
        if node.coming or node.saving or node.pinned:
            return BUSY
        return BARE if node.kind == KV and not node.host else IDLE

    def _settle(self, node: Node) -> None:
        """Counts the node as what it is now, after its fields have changed."""
        standing = self._standing(node)
        if standing != node.standing:
            self._move(node, standing)

    def _move(self, node: Node, after: int) -> None:
        """The one change of a node's standing: its blocks are counted, and what it needs is kept or let go."""
        before, node.standing = node.standing, after
        blocks = self._blocks[node.kind]
        blocks[before] -= node.size
        blocks[after] += node.size
        if node.kind == ADAPTER:
            self.adapters += (after != ABSENT) - (before != ABSENT)
        kept, keeps = before > LEAVING, after > LEAVING
        if kept != keeps:
            for needed in node.needs:
                needed.resident += keeps - kept
                if not needed.resident:
                    self.candidates.offer(needed)

    def _leave_device(self, node: Node) -> None:
        self.device.give(node.kind, node.device)
        node.device = ()
        self._settle(node)
        self.candidates.offer(node)
        self.epoch += 1

    def _leave_host(self, node: Node) -> None:
        self.host.give(node.kind, node.host)
        node.host = ()
        self._settle(node)
        node.stamp += 1
        self.epoch += 1

    def _prune(self, node: Node) -> None:
        """Takes a KV node without data and without children out of the tree, and such parents too."""
        while node.kind == KV and not (node.device or node.host or node.children or node.users):
            node = self.tree.remove(node)
        self.candidates.offer(node)

    def _free(self, kind: int | None, count: int, gently: bool, spare_s: float) -> bool:
        """Evicts `count` blocks of a kind, or of any; False if that costs too much."""
        known: Values = {}
        while count > 0:
            node = self.candidates.victim(kind, known)
            if node is None and not gently:
                node = self.candidates.queued.worst(kind)
            if node is None or (gently and not node.host):  # idle blocks lie above a copy, or are needed
                return False
            if node.wanted:
                if spare_s <= 0:
                    return False
                spare_s -= self.candidates.queued.load_s(node)  # the last may take longer, or it could never leave
            count -= len(node.device)
            self._let_go(node)
        return True

    def _let_go(self, node: Node) -> None:
        self.evict(node)

    def _stay(self, node: Node) -> None:
        """The node's copy to the host has failed."""

    def _arrive(self, node: Node) -> None:
        self.candidates.offer(node)

    def _reserve(self, node: Node) -> None:
        """Takes the node's place on the host and marks it as being written there."""
        node.saving = True
        node.host = self.host.take(node.kind, node.size)
        node.stamp += 1

    def _send(self, adapter: AdapterNode, nodes: Sequence[Node]) -> None:
        """Starts the one copy to the host of nodes that have their places there."""
        if not nodes:
            return
        source = tuple(block for node in nodes for block in node.device)
        target = tuple(block for node in nodes for block in node.host)
        self._start(Copy("out", adapter, tuple(nodes), source, target))

    def _start(self, copy: Copy) -> None:
        self.traffic.start(copy)
        name, blocks = _name(copy.nodes[0]), len(copy.source)
        log.debug("copy %s %s: %d blocks, demand=%s", copy.direction, name, blocks, copy.demand)

    def _offer_below(self, node: Node) -> None:
        """What hangs below a node that comes in may follow it; of many branches the latest."""
        for child in itertools.islice(node.dependents(), BRANCHES):
            if child.host and not child.device:
                self.candidates.offer(child)


def _name(node: Node) -> str:
    return f"adapter {node.uid}" if isinstance(node, AdapterNode) else f"kv@{id(node):x}"
