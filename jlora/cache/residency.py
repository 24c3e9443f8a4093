"""Where every node's data is, and every change of it: the mechanism below all policies.

Eviction never writes: adapters have a master copy on the host, KV is copied out when it is idle
anyway. So to evict is to forget a block id. Copies are only *decided* here; they go out with the
next plan, and `landed` takes them in. Plain Python, no jax.

What a node may do is in its flags: a lease or a copy under way keeps it where it is, a pin keeps
it on the device, and what is on the device keeps what it needs there: KV its prefix and its
adapter (unless the policy is an ablation without dependencies).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jlora.cache.blocks import Tier
from jlora.cache.doubles import Doubles
from jlora.cache.order import Order
from jlora.cache.policies import Policy
from jlora.cache.queued import Queued
from jlora.cache.transfer import Copy, Traffic
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node, SuffixNode, Tree

log = logging.getLogger(__name__)

BRANCHES = 64  # below a node that comes in, offered to follow it
Clock = Callable[[], float]


@dataclass(slots=True)
class Counters:
    """Totals since start, in blocks and tokens."""

    adapter_hits: int = 0
    adapter_lookups: int = 0
    kv_hit_tokens: int = 0
    kv_host_hit_tokens: int = 0
    kv_base_hit_tokens: int = 0  # found by activated LoRAs among the base's KV
    kv_lookup_tokens: int = 0
    clean_evictions: int = 0
    blocks_in: int = 0
    blocks_out: int = 0
    blocks_lost: int = 0  # evicted without a host copy, or dropped from the host: computed again if needed
    streamed: int = 0  # leases whose first step started before their copies had landed
    recomputed_tokens: int = 0  # known on the host, computed again because that was sooner


@dataclass(slots=True)
class Residency:
    """Both tiers, the orders of candidates, and the copies under way."""

    tree: Tree
    device: Tier
    host: Tier
    policy: Policy
    clock: Clock
    counters: Counters = field(default_factory=Counters)
    traffic: Traffic = field(default_factory=Traffic)
    epoch: int = 0  # grows whenever something that was refused may now be granted
    departing: set[Node] = field(default_factory=set)  # written out to leave (policies that write back)
    bare: int = 0  # idle KV blocks on the device that have no copy on the host
    queued: Queued = field(init=False)
    _victims: tuple[Order, Order] = field(init=False)
    _roots: tuple[Order, Order] = field(init=False)
    _drops: tuple[Order, Order] = field(init=False)
    _doubles: Doubles = field(init=False)

    def __post_init__(self) -> None:
        self._victims = (Order(self.evictable), Order(self.evictable))
        self.queued = Queued(self.evictable, self.policy.meter)
        self._roots = (Order(_is_root, sign=-1), Order(_is_root, sign=-1))
        self._drops = (Order(_droppable), Order(_droppable))
        self._doubles = Doubles(self.policy, self.clock)

    # -- use ----------------------------------------------------------------------------------

    def visit(self, nodes: Iterable[Node]) -> None:
        """A request was granted these nodes: the policy counts it, and what was to leave stays."""
        now = self.clock()
        for node in nodes:
            self.policy.visit(node, now)
            if type(node) is SuffixNode:
                node.use()
            if node in self.departing:
                self._stay(node)
            if node.host:
                self._doubles.push(node)

    def lock(self, node: Node) -> None:
        """One more lease goes through this node."""
        if not node.users:
            self._account(node, -1)
            node.users = 1
            self._account(node, 1)
        else:
            node.users += 1

    def unlock(self, node: Node, used: bool = True) -> None:
        """One lease less; a node that nobody uses becomes a candidate.

        Args:
            used: whether it was in use until now; a lease that was refused used nothing.
        """
        assert node.users > 0, "unlocked more often than locked"
        if used:
            self.policy.leave(node, self.clock())
        if node.users > 1:
            node.users -= 1
            return
        self._account(node, -1)
        node.users = 0
        self._account(node, 1)
        self.offer(node)
        self.epoch += 1

    def want(self, node: Node, place: int) -> None:
        """The queued sequence at this place will need the node: others leave before it."""
        node.wanted += 1
        if self.queued.add(node, place):
            self.offer(node)

    def unwant(self, node: Node, place: int) -> None:
        """The queued sequence runs or is gone."""
        node.wanted -= 1
        if self.queued.remove(node, place):
            self.offer(node)
        if not node.wanted:
            self.epoch += 1

    def pin(self, node: AdapterNode, pinned: bool) -> None:
        """A pinned adapter is no victim."""
        self._account(node, -1)
        node.pinned = pinned
        self._account(node, 1)
        self.offer(node)
        self.epoch += 1

    # -- room -----------------------------------------------------------------------------------

    def make_room(self, adapter: int = 0, kv: int = 0, gently: bool = False, spare_s: float = math.inf) -> bool:
        """Evicts the least valuable candidates until so many blocks of each kind can be taken.

        Evicts nothing if all that is idle would not be enough: history is not lost for a request that
        waits anyway. With a policy that writes back, room comes only when the writing is done.

        Args:
            gently: touch nothing that the queue needs or that would be lost.
            spare_s: of what the queue needs, evict nodes until loading them takes so many seconds; none with 0.
                What has left by then has left, with all that nobody waits for: who asks again finds less missing.
        """
        if not self.obtainable(adapter, kv):
            return False
        return all([self._free(kind, count, gently, spare_s) for kind, count in self.device.missing(adapter, kv)])

    def obtainable(self, adapter: int, kv: int) -> bool:
        """Whether so many blocks of each kind are free, idle or about to be free."""
        missing = self.device.missing(adapter, kv)
        return all(count <= self.device.reclaimable(kind) + self.leaving(kind) for kind, count in missing)

    def leaving(self, kind: int | None) -> int:
        """Blocks of a kind (None: of all) whose write-back is under way; adapters need none."""
        return 0 if kind == ADAPTER else len(self.departing)

    def worst(
        self, kind: int | None = None, needed: bool = False, known: dict[Node, float] | None = None
    ) -> Node | None:
        """The candidate worth least; with `needed` also what the queue needs, if nothing else is left.

        Args:
            known: values at this moment, kept from one question to the next.
        """
        found = self._cheapest(self._victims, kind, known)
        return self.queued.worst(kind) if found is None and needed else found

    def evict(self, node: Node) -> None:
        """Forgets a candidate's device blocks; without a copy on the host its data is gone."""
        assert self.evictable(node), "evicted what is in use, pinned or depended on"
        if log.isEnabledFor(logging.DEBUG):
            log.debug("evict %s: %d blocks, worth %.3g", _name(node), len(node.device), self.value(node))
        self._leave_device(node)
        if node.host:
            self.counters.clean_evictions += 1
        else:
            self.counters.blocks_lost += 1
            self._prune(node)

    def make_host_room(self, count: int, saved: Node | None = None) -> bool:
        """Frees host blocks for a copy of `saved`, or for an adapter, whatever it takes.

        Copies of what stays on the device go first (`Doubles`). Then leaves that are worth less than
        `saved` go for good. False if that is not enough; at once if all KV would not be.
        """
        if count > self.host.free + self.host.used[KV]:
            return False
        worth = math.inf if saved is None else self.value(saved)
        while self.host.free < count:
            node = self._doubles.first(saved)
            if node is None:
                node = self._cheapest(self._drops, None)
                if node is None or self.value(node) >= worth:
                    return False
                self.counters.blocks_lost += 1
            gone = "" if node.device else ", its only copy"
            log.debug("drop from the host %s: %d blocks%s", _name(node), len(node.host), gone)
            self._leave_host(node)
            self._prune(node)
            self.offer(node)
        return True

    # -- copies ---------------------------------------------------------------------------------

    def bring(self, adapter: AdapterNode, nodes: Sequence[Node], demand: bool, streams: bool = False) -> None:
        """Starts a copy to the device of nodes of one kind; the caller has made room."""
        if not nodes:
            return
        source = tuple(block for node in nodes for block in node.host)
        target = self.device.take(nodes[0].kind, len(source))
        copy = Copy("in", adapter, tuple(nodes), source, target, demand, streams)
        at = 0
        for node in nodes:
            node.coming = True
            node.device = target[at : at + node.size]
            at += node.size
            self._count_resident(node, 1)
            if node.kind == KV and node.users:
                self.device.running += 1
            node.stamp += 1
        self._start(copy)
        for node in nodes:
            self._offer_below(node)

    def save(self, adapter: AdapterNode, nodes: Sequence[Node], leave: bool = False) -> None:
        """Starts a copy to the host; the caller has made room there.

        Args:
            leave: evict the nodes when it is complete, unless they are used again by then.
        """
        for node in nodes:
            self._reserve(node, leave)
        self._send(adapter, nodes)

    def _reserve(self, node: Node, leave: bool) -> None:
        """Takes the node's place on the host and marks it as being written there."""
        self._account(node, -1)
        node.saving = True
        self._account(node, 1)
        node.host = self.host.take(node.kind, node.size)
        node.stamp += 1
        if leave:
            self.departing.add(node)
            self._count_resident(node, -1)

    def _send(self, adapter: AdapterNode, nodes: Sequence[Node]) -> None:
        """Starts the one copy to the host of nodes that have their places there."""
        if not nodes:
            return
        source = tuple(block for node in nodes for block in node.device)
        target = tuple(block for node in nodes for block in node.host)
        copy = Copy("out", adapter, tuple(nodes), source, target)
        self._start(copy)

    def landed(self, copy: Copy) -> None:
        """A copy is complete: on the device its scatter was dispatched, on the host it was written."""
        self.traffic.land(copy)
        self.policy.meter.observe(copy)
        for node in copy.nodes:
            self._account(node, -1)
            if copy.direction == "in":
                node.coming = False
            else:
                node.saving = False
            self._account(node, 1)
        if copy.direction == "in":
            self.counters.blocks_in += len(copy.source)
        else:
            self.counters.blocks_out += len(copy.source)
        for node in reversed(copy.nodes):  # dependents first: each may make its parent a leaf
            if node in self.departing:
                self._stay(node)
                self._leave_device(node)
            else:
                self.offer(node)
        self.epoch += 1

    def adopt(self, node: Node, block: int) -> None:
        """The node's data was computed into this device block: the node owns it from now on."""
        assert not node.device
        node.device = (block,)
        self._count_resident(node, 1)
        self._account(node, 1)
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

    # -- candidates -------------------------------------------------------------------------------

    def evictable(self, node: Node) -> bool:
        """On the device, and nothing uses it, copies it or depends on it."""
        free = node.device and not node.users and not node.coming and not node.saving and not node.pinned
        return bool(free) and (not node.resident or not self.policy.binds(node))

    def offer(self, node: Node) -> None:
        """Enters the node in the orders it belongs to, in place of its older entries."""
        node.stamp += 1
        if node.moving:
            return
        if node.device:
            if self.evictable(node):
                if node.wanted:
                    self.queued.push(node)
                else:
                    heap, key = self.policy.key(node)
                    self._victims[heap].push(node, key)
            self._doubles.push(node)
        elif node.host:
            heap, key = self.policy.key(node)
            if self.policy.lower and _is_root(node):
                self._roots[heap].push(node, key)
            if _droppable(node):
                self._drops[heap].push(node, key)

    def coldest(self, count: int) -> list[Node]:
        """KV that will leave next and has no copy on the host, coldest first: leaves, and what they leave behind."""
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

    def best_root(self, kind: int | None = None) -> Node | None:
        """The most valuable node on the host below something that is on the device or coming."""
        while True:
            root = self._dearest(self._roots, kind)
            if root is None or not self.adapter_of(root).dying:
                return root
            root.stamp += 1  # nobody will ask for it
            if _droppable(root):
                heap, key = self.policy.key(root)
                self._drops[heap].push(root, key)

    def value(self, node: Node) -> float:
        """What the policy says the node is worth now."""
        return self.policy.value(node, self.clock())

    # -- inside -----------------------------------------------------------------------------------

    def _start(self, copy: Copy) -> None:
        self.traffic.start(copy)
        log.debug(
            "copy %s %s: %d blocks, demand=%s", copy.direction, _name(copy.nodes[0]), len(copy.source), copy.demand
        )

    def _free(self, kind: int | None, count: int, gently: bool, spare_s: float) -> bool:
        """Evicts `count` blocks of a kind; False if that costs too much, or some come free only with a copy."""
        if count <= 0:
            return True
        waits = self.leaving(kind) > 0
        count -= self.leaving(kind)
        writing: dict[AdapterNode, list[Node]] = {}
        known: dict[Node, float] = {}
        while count > 0:
            node = self.worst(kind, not gently, known)
            if node is None or (gently and not node.host):  # what is idle hangs above a copy, or is needed
                break
            if node.wanted:
                if spare_s <= 0:
                    break
                spare_s -= self.queued.load_s(node)  # the last may take longer: else what is dear never left
            count -= len(node.device)
            if self.policy.writes_back and not node.host and self.make_host_room(len(node.device), node):
                self._reserve(node, leave=True)
                writing.setdefault(self.adapter_of(node), []).append(node)
            else:
                self.evict(node)
        for adapter, nodes in writing.items():
            self._send(adapter, nodes[::-1])
        return count <= 0 and not waits and not writing

    def _offer_below(self, node: Node) -> None:
        """What hangs below a node that comes in may follow it; of many branches the latest."""
        for child in itertools.islice(node.dependents(), BRANCHES):
            if child.host and not child.device:
                self.offer(child)

    def adapter_of(self, node: Node) -> AdapterNode:
        """Whose KV, or which adapter, a node is."""
        while type(node) is Node:
            assert node.parent is not None, "a node that is not in the tree"
            node = node.parent
        if isinstance(node, SuffixNode):
            return node.adapter
        assert isinstance(node, AdapterNode)
        return node

    def _cheapest(
        self, orders: tuple[Order, Order], kind: int | None, known: dict[Node, float] | None = None
    ) -> Node | None:
        values = {} if known is None else known
        tops = self._tops(orders, kind, values)
        return min(tops, key=values.__getitem__, default=None)

    def _dearest(self, orders: tuple[Order, Order], kind: int | None) -> Node | None:
        values: dict[Node, float] = {}
        tops = self._tops(orders, kind, values)
        return max(tops, key=values.__getitem__, default=None)

    def _tops(self, orders: tuple[Order, Order], kind: int | None, values: dict[Node, float]) -> list[Node]:
        """The first of each heap, and their values."""
        now, ahead, value = self.clock(), self.policy.lookahead, self.policy.value
        heaps = orders if kind is None else (orders[kind],)
        tops = [node for heap in heaps for node in heap.first(ahead)]
        for node in tops:
            if node not in values:
                values[node] = value(node, now)
        return tops

    def _count_resident(self, node: Node, change: int) -> None:
        """A dependent more or less that keeps what it needs on the device; the last one frees that."""
        for needed in node.needs:
            needed.resident += change
            if not needed.resident:
                self.offer(needed)

    def _stay(self, node: Node) -> None:
        """What was to leave when it is written out stays."""
        self.departing.discard(node)
        self._count_resident(node, 1)

    def _leave_device(self, node: Node) -> None:
        self._account(node, -1)
        self.device.give(node.kind, node.device)
        node.device = ()
        self._count_resident(node, -1)
        self.offer(node)
        self.epoch += 1

    def _leave_host(self, node: Node) -> None:
        self._account(node, -1)
        self.host.give(node.kind, node.host)
        node.host = ()
        self._account(node, 1)
        node.stamp += 1
        self.epoch += 1

    def _prune(self, node: Node) -> None:
        """Takes a KV node without data and without children out of the tree, and such parents too."""
        while node.kind == KV and not (node.device or node.host or node.children or node.users):
            node = self.tree.remove(node)
        self.offer(node)

    def _account(self, node: Node, sign: int) -> None:
        """Counts the node's device blocks as idle (bare or not) or running, as it is now."""
        size = len(node.device)
        if not size:
            return
        if node.users:
            if node.kind == KV:
                self.device.running += sign * size
        elif not (node.coming or node.saving or node.pinned):
            self.device.idle[node.kind] += sign * size
            if node.kind == KV and not node.host:
                self.bare += sign * size


def _is_root(node: Node) -> bool:
    """On the host only, and nothing that it needs is missing."""
    return node.on_host and not node.device and all(needed.device or not needed.size for needed in node.needs)


def _droppable(node: Node) -> bool:
    """KV on the host only that nothing uses or waits for and nothing lies below."""
    alone = not node.children and not node.users and not node.wanted
    return node.kind == KV and node.on_host and not node.device and alone


def _name(node: Node) -> str:
    return f"adapter {node.uid}" if isinstance(node, AdapterNode) else f"kv@{id(node):x}"
