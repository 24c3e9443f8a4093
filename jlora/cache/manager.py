"""The cache as its users know it: adapters, leases, copies. Plain Python, no jax.

A request holds a *lease* while it runs: its adapter's blocks, the cached prefix, and blocks of
its own for what it will compute. What lies on the host is brought in by copies; the lease is
`ready` when they have landed, and others run meanwhile. Blocks that fill up with known tokens are
*published* into the tree, where later requests find them; when the lease ends they simply stay.

Nothing here touches a device. Copies to make are handed out by `take_copies` and reported back by
`landed`; the simulator does the same with a model of a link.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from jlora.cache.blocks import Tier
from jlora.cache.forecast import Forecast
from jlora.cache.lease import Lease, Sizes, Want
from jlora.cache.monitor import Monitor
from jlora.cache.policies import Policy
from jlora.cache.residency import Counters, Residency
from jlora.cache.transfer import Copy
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node, Origin, Tree

log = logging.getLogger(__name__)

# Hints may have copies of at most this share of the device under way, and start none while the link
# has more than so many seconds to do: what they bring late holds up what requests wait for.
HINT_SHARE, HINT_S = 0.25, 0.1


class CacheManager:
    """Leases over two tiers, under one policy. `clock` gives seconds; the simulator has its own."""

    def __init__(
        self,
        sizes: Sizes,
        policy: Policy,
        clock: Callable[[], float],
        prefix_reuse: bool = True,
        streams: bool = False,
        monitor_s: float = 0.1,
    ):
        self.block_tokens = sizes.block_tokens
        self.prefix_reuse = prefix_reuse and policy.history
        self.policy = policy
        self._streams = streams
        self.tree = Tree(sizes.block_tokens)
        self.cells = Residency(self.tree, Tier(sizes.device, policy.share), Tier(sizes.host), policy, clock)
        self.forecast = Forecast(self.cells, sizes.block_tokens)
        self.base = self.tree.base
        self.adapters: dict[int, AdapterNode] = {0: self.base}
        self.leases: dict[int, Lease] = {}
        self.reserved: set[int] = set()  # host blocks of adapters that are being loaded
        self._pinned: set[AdapterNode] = set()
        backs_up = self.prefix_reuse and not policy.writes_back
        self._monitor = Monitor(self.cells, self.adapters, monitor_s, backs_up)
        self._clock = clock

    @property
    def total(self) -> int:
        """Device blocks that can be handed out."""
        return self.cells.device.total

    @property
    def free(self) -> int:
        """Device blocks that hold nothing."""
        return self.cells.device.free

    @property
    def counters(self) -> Counters:
        """Totals since start."""
        return self.cells.counters

    @property
    def epoch(self) -> int:
        """Unchanged since a refusal: asking again is no use."""
        return self.cells.epoch

    @property
    def leaving(self) -> bool:
        """Whether blocks come free by themselves: their write-back is under way."""
        return self.cells.leaving(None) > 0

    @property
    def flying(self) -> bool:
        """Whether copies are under way."""
        return bool(self.cells.traffic.flying)

    @property
    def adapter_limit(self) -> int:
        """Blocks of the largest adapter that leaves room for at least one block of KV."""
        return min(self.cells.device.limit[ADAPTER], self.total - 1)

    @property
    def share_hint(self) -> str:
        """The other key that limits adapters, where a policy splits the device."""
        share = self.policy.share
        return "" if share is None else f", or under vllm-fair cache.share (adapters have {share:g} of them)"

    @property
    def host_use(self) -> str:
        """For messages: what the host tier holds."""
        host = self.cells.host
        return f"{host.used[ADAPTER]} of {host.total} blocks are adapters', {host.used[KV]} are KV's"

    def capacity(self, adapter: AdapterNode, pinned: AdapterNode | None = None) -> int:
        """Tokens of the longest sequence that could run if it had the pool to itself.

        Args:
            pinned: counted as pinned even if it is not yet.
        """
        held = sum(node.size for node in {*self._pinned, adapter, *([pinned] if pinned else [])})
        device = self.cells.device
        if held > device.limit[ADAPTER]:
            return 0
        return max(0, min(device.limit[KV], device.total - held)) * self.block_tokens

    def lacks_share(self, adapter: AdapterNode) -> bool:
        """Whether it is the adapters' fixed share that has no room: requests for other adapters may have."""
        device = self.cells.device
        need = 0 if adapter.device else adapter.size
        return device.split and need > device.room(ADAPTER) + device.reclaimable(ADAPTER)

    # -- adapters ---------------------------------------------------------------------------

    def reserve(self, size: int) -> tuple[int, ...] | None:
        """Takes `size` host blocks for an adapter's master copy; None if the host has no room for it.

        The caller fills the blocks, and hands them to `add_adapter` or back to `cancel`.
        """
        if not self.cells.make_host_room(size):
            return None
        blocks = self.cells.host.take(ADAPTER, size)
        self.reserved.update(blocks)
        return blocks

    def cancel(self, blocks: Sequence[int]) -> None:
        """Gives reserved blocks back."""
        self.reserved.difference_update(blocks)
        self.cells.host.give(ADAPTER, blocks)

    def add_adapter(self, uid: int, blocks: tuple[int, ...]) -> AdapterNode:
        """Registers an adapter whose master copy is in these reserved host blocks."""
        self.reserved.difference_update(blocks)
        node = AdapterNode(uid, len(blocks))
        node.host = blocks
        self.adapters[uid] = node
        self.cells.visit([node])  # an adapter that is loaded is about to be used
        self.cells.offer(node)
        return node

    def pin(self, node: AdapterNode, pinned: bool) -> bool:
        """Pins or unpins; pinning brings the adapter in. False: no room now, nothing changed."""
        if pinned and not node.device and not self._bring_adapter(node, demand=True):
            return False
        self.cells.pin(node, pinned)
        (self._pinned.add if pinned else self._pinned.discard)(node)
        self._leave_if_idle(node)
        return True

    def bring_in(self, node: AdapterNode) -> None:
        """Starts an adapter's copy into blocks that are free anyway, if nothing else is on its way.

        Of many that are loaded at once the monitor fetches the others while the link idles: all their copies
        together would hold up a request's, and room that is on its way to be filled cannot be made free.
        """
        idle = not self.cells.traffic.backlog["in"]
        if idle and not node.device and not node.dying and node.size <= self.cells.device.room(ADAPTER):
            self._bring_adapter(node, demand=False)

    def hasten(self, node: AdapterNode) -> None:
        """A request waits for the adapter: its copy, if one is under way, overtakes prefetches."""
        self.cells.traffic.promote(node)

    def kill(self, node: AdapterNode) -> None:
        """Ends an adapter version: no new lease, everything freed when its last user is gone."""
        self.cells.pin(node, False)
        self._pinned.discard(node)
        node.dying = True
        for flying, copy in self.cells.traffic.flying.items():
            if copy.adapter is node:  # its end waits for them: no demand may hold them back
                self.cells.traffic.promote(flying)
        self._bury_if_unused(node)

    # -- the queue ----------------------------------------------------------------------------

    def expect(self, origin: Origin, tokens: Sequence[int], reuse: bool, place: int) -> Want:
        """The queued sequence at this place of the order of service will need this adapter version and prefix."""
        adapter = origin.adapter
        assert self.adapters.get(adapter.uid) is adapter, "a sequence is queued for an adapter version that is gone"
        nodes: list[Node] = [adapter]
        if reuse and self.prefix_reuse:
            path = self.tree.match(origin, tokens, limit=len(tokens) - 1)
            resident = [node for node in path if node.device]
            nodes += dict.fromkeys((*resident[-1:], *path[-1:]))  # what is above them is kept by them
        for node in nodes:
            self.cells.want(node, place)
        return Want(adapter, tuple(nodes), place)

    def unexpect(self, want: Want) -> None:
        """The queued sequence runs or is gone."""
        for node in want.nodes:
            self.cells.unwant(node, want.place)
        self._leave_if_idle(want.adapter)
        self._bury_if_unused(want.adapter)

    def serve(self, place: int) -> None:
        """The sequence at this place has got its lease."""
        self.cells.queued.served = place

    def hint(self, origin: Origin, tokens: Sequence[int]) -> int:
        """`Prefetch`: starts the copies that a request would need; its blocks that are under way.

        Only over free blocks and over idle ones that have a copy and that nobody in the queue needs.
        """
        cells, adapter = self.cells, origin.adapter
        path = self.tree.match(origin, tokens, len(tokens) - 1) if self.prefix_reuse else []
        missing = [node for node in path if not node.device]
        need = 0 if adapter.device else adapter.size
        much = cells.traffic.backlog["in"] + need + len(missing) > HINT_SHARE * self.total
        if much or self.forecast.queued_s > HINT_S:
            return _coming(adapter, path)
        for node in (adapter, *path):  # what the hint names is no victim of the room it needs
            cells.lock(node)
        room = cells.make_room(need, len(missing), gently=True)
        log.debug("hint for adapter %d: %d blocks missing, room=%s", adapter.uid, need + len(missing), room)
        if room:
            self._bring_adapter(adapter, demand=False)
            self._bring_path(origin, path, demand=False)
            cells.visit((adapter, *path))
        for node in (*reversed(path), adapter):
            cells.unlock(node, used=False)
        return _coming(adapter, path)

    # -- leases -----------------------------------------------------------------------------

    def acquire(
        self,
        origin: Origin,
        tokens: Sequence[int],
        reuse: bool,
        headroom: int,
        again: bool = False,
        spare_s: float = math.inf,
    ) -> Lease | None:
        """A lease for a sequence whose known tokens are `tokens`; None if there is no room now.

        Args:
            reuse: whether it may read from and publish into the tree.
            headroom: blocks that must stay available beside it.
            again: the sequence had a lease before: what it finds now is no hit.
            spare_s: evict what the queue needs until that takes so many seconds to load (`Residency.make_room`).
        """
        adapter, cells = origin.adapter, self.cells
        assert self.adapters.get(adapter.uid) is adapter, "a lease on an adapter version that is gone"
        now = self._clock()
        lease = Lease(origin, reuse and self.prefix_reuse, granted=now, since=now)
        known: list[Node] = []
        if lease.reuse:  # at least one token is always computed: its hidden state is needed
            known = self.tree.match(origin, tokens, limit=len(tokens) - 1)
            lease.path = self.forecast.worth_copying(known)
        for node in (adapter, *lease.path):
            cells.lock(node)
        missing = sum(not node.device for node in lease.path)
        own = self._blocks_for(len(tokens)) - len(lease.path)
        room = cells.make_room(0 if adapter.device else adapter.size, missing + own + headroom, spare_s=spare_s)
        if not room:
            epoch = cells.epoch
            self._unlock(lease, used=False)
            cells.epoch = epoch  # a refusal gives nobody a chance
            need = missing + own + headroom
            size = 0 if adapter.device else adapter.size
            log.debug("refuse adapter %d: no room for its %d blocks and %d of KV", adapter.uid, size, need)
            return None
        if not again:
            self._count(lease, known, len(tokens))
        cells.visit((adapter, *lease.path))
        if anew := len(known) - len(lease.path):
            self.counters.recomputed_tokens += anew * self.block_tokens
            log.debug("recompute %d blocks of adapter %d: copying takes longer", anew, adapter.uid)
        self._bring_adapter(adapter, demand=True)
        self._bring_path(origin, lease.path, demand=True)
        lease.blocks = [node.device[0] for node in lease.path] + list(cells.device.take(KV, own))
        cells.device.running += own
        lease.cached = len(lease.path) * self.block_tokens
        lease.coming = [node for node in (adapter, *lease.path) if node.coming]
        for node in lease.coming:
            cells.traffic.promote(node)
        self.leases[id(lease)] = lease
        return lease

    def fit(self, requests: Collection[tuple[AdapterNode, int]], headroom: int) -> bool:
        """Whether all of these could have a lease now, by adapter and tokens, whatever of them is cached.

        Args:
            headroom: blocks that must stay available beside them.
        """
        missing = {adapter for adapter, _ in requests if not adapter.device}
        blocks = sum(self._blocks_for(tokens) for _, tokens in requests)
        return self.cells.obtainable(sum(adapter.size for adapter in missing), blocks + headroom)

    def needs_copy(self, origin: Origin, tokens: Sequence[int], reuse: bool) -> bool:
        """Whether a lease granted now would wait for copies of KV to the device; changes nothing."""
        if not (reuse and self.prefix_reuse):
            return False
        known = self.tree.match(origin, tokens, limit=len(tokens) - 1)
        return not all(node.on_device for node in self.forecast.worth_copying(known))

    def ready(self, lease: Lease, tokens: int = 0) -> bool:
        """Whether a step may read what the lease goes through; keeps its waiting times.

        Args:
            tokens: prompt tokens of the lease's first step: what is still on its way may be streamed
                into that step if it needs less time than the step.
        """
        if lease.coming and not self._arrived(lease, (ADAPTER, KV), tokens):
            return False
        lease.ahead = False
        return True

    def ready_ahead(self, lease: Lease, tokens: int) -> bool:
        """The same for a step whose tokens an activated LoRA does not act on: its copy may still be under way."""
        lease.ahead = self._arrived(lease, (KV,), tokens)
        return lease.ahead

    def hold(self, lease: Lease) -> None:
        """A lease that has run ahead of its adapter has to wait for it from now on."""
        lease.ahead, lease.since = False, self._clock()

    def unlanded(self, leases: Sequence[Lease]) -> tuple[Copy, ...]:
        """The copies under way that these leases read: what a step with them must stream."""
        found: dict[Copy, None] = {}
        for lease in leases:
            read = (node for node in lease.coming if node.coming and not (lease.ahead and node.kind == ADAPTER))
            copies = [self.cells.traffic.flying[node] for node in read]
            self.counters.streamed += bool(copies) and not lease.streamed
            lease.streamed |= bool(copies)
            found |= dict.fromkeys(copies)
        return tuple(found)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Makes the lease hold `tokens` tokens; False if there is no room now."""
        if tokens <= len(lease.blocks) * self.block_tokens:  # nearly always: asked for every token
            return True
        need = self._blocks_for(tokens) - len(lease.blocks)
        if not self.cells.make_room(kv=need):
            return False
        lease.blocks += self.cells.device.take(KV, need)
        self.cells.device.running += need
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Puts the lease's full blocks among the first `computed` tokens into the tree.

        Where the tree has the same tokens on the device already, the lease moves over to that block
        and gives its own back: one prefix, one copy. Where it has them on the host only (or lost
        them), the lease's block becomes the node's. What an activated LoRA's sequence computes before
        its invocation goes where the base finds it.
        """
        first, size = len(lease.path), self.block_tokens
        if computed < (first + 1) * size or not lease.reuse or lease.adapter.dying:
            return
        cells = self.cells
        for index in range(first, computed // size):
            parent = lease.path[-1] if lease.path else self.tree.top(lease.origin)
            own = lease.blocks[index]
            node = self.tree.insert(parent, lease.origin, tokens, index * size)
            if node.coming:  # its copy was cheaper for another request; wait for it to land
                return
            cells.device.running -= 1
            if node.device:
                lease.blocks[index] = node.device[0]
                cells.device.give(KV, [own])
                cells.epoch += 1
            else:
                cells.adopt(node, own)
            cells.lock(node)
            cells.visit([node])
            lease.path.append(node)

    def release(self, lease: Lease) -> None:
        """Ends a lease: published blocks stay as history, its own are free."""
        del self.leases[id(lease)]
        cells = self.cells
        own = lease.blocks[len(lease.path) :]
        cells.device.running -= len(own)
        cells.device.give(KV, own)
        cells.epoch += 1
        if not self.policy.writes_back and not lease.adapter.dying:
            self._write_through(lease)
        self._unlock(lease)

    def cached_tokens(self, origin: Origin, tokens: Sequence[int]) -> int:
        """How many of `tokens` are on the device now; changes nothing."""
        path = self.tree.match(origin, tokens, limit=len(tokens) - 1)
        return next((i for i, node in enumerate(path) if not node.on_device), len(path)) * self.block_tokens

    def flush(self) -> int:
        """Drops all KV that no lease or copy uses, in both tiers; device blocks freed."""
        before = self.free
        for adapter in self.adapters.values():
            for node in reversed(list(self.tree.below(adapter))):
                if node.parent is not None and not (node.users or node.moving or node.children):
                    self.cells.forget(node)
        return self.free - before

    def tend(self, now: float, running: int) -> None:
        """Makes a round of the monitor if one is due; its copies go out with the next `take_copies`.

        Args:
            running: sequences in the batch.
        """
        self._monitor.tend(now, running)

    # -- copies -------------------------------------------------------------------------------

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies decided since the last call; they must be started before the next step."""
        traffic = self.cells.traffic
        copies, traffic.outbox = tuple(traffic.outbox), []
        return copies

    def landed(self, copies: Sequence[Copy]) -> None:
        """These copies are complete."""
        for copy in copies:
            self.cells.landed(copy)
            self._leave_if_idle(copy.adapter)
            self._bury_if_unused(copy.adapter)

    # -- inside -----------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _bring_path(self, origin: Origin, path: list[Node], demand: bool) -> None:
        """Starts the copies of what of a path is not on the device; the caller has made room.

        An activated suffix comes first: only the last of the copies can be streamed, and the prefix is long.
        """
        for owner, nodes in reversed(self.tree.by_owner(origin, path)):
            self._bring(owner, [node for node in nodes if not node.device], demand)

    def _bring(self, adapter: AdapterNode, nodes: Sequence[Node], demand: bool) -> None:
        """Starts a copy to the device: in groups of layers, if a request waits for it and it is long."""
        streams = self._streams and demand and self.forecast.is_long(nodes)
        self.cells.bring(adapter, nodes, demand, streams)

    def _arrived(self, lease: Lease, kinds: Collection[int], tokens: int) -> bool:
        """Whether what a lease needs of these kinds is there, or can be streamed into a step of so many tokens."""
        needed = [node for node in lease.coming if node.kind in kinds]
        left = [node for node in needed if node.coming]
        streamed = bool(left) and self.forecast.fits_in_step(left, tokens)
        if len(left) < len(needed) or streamed:
            waited = self._clock() - lease.since
            landed = {node.kind for node in needed} - {node.kind for node in left if not streamed}
            if ADAPTER in landed:
                lease.adapter_s = 0.0 if lease.ahead else waited
            if KV in landed:
                lease.kv_s = waited
            lease.coming = [node for node in lease.coming if node.kind not in kinds] + left
        return streamed or not left

    def _bring_adapter(self, node: AdapterNode, demand: bool) -> bool:
        """Starts an adapter's copy if it is not there; False if no room could be made."""
        if node.device or not node.size:
            return True
        if not self.cells.make_room(adapter=node.size):
            return False
        self._bring(node, [node], demand)
        return True

    def _write_through(self, lease: Lease) -> None:
        """Copies the lease's part of the tree to the host while there is room."""
        cells = self.cells
        for owner, nodes in self.tree.by_owner(lease.origin, lease.path):
            fresh = [node for node in nodes if not node.host and node.device and not node.moving]
            cells.save(owner, fresh[: cells.host.free])

    def _unlock(self, lease: Lease, used: bool = True) -> None:
        for node in (*reversed(lease.path), lease.adapter):
            self.cells.unlock(node, used)
        self._leave_if_idle(lease.adapter)
        self._bury_if_unused(lease.adapter)

    def _leave_if_idle(self, node: AdapterNode) -> None:
        if not self.policy.keeps(node) and self.cells.evictable(node):
            self.cells.evict(node)

    def _bury_if_unused(self, node: AdapterNode) -> None:
        if not node.dying or node.users or node.wanted or node.flying or node.uid not in self.adapters:
            return
        for child in reversed(list(self.tree.owned(node))):
            if child.parent is not None:  # else it went with its last child
                self.cells.forget(child)
        self.cells.forget(node)
        del self.adapters[node.uid]

    def _count(self, lease: Lease, known: list[Node], tokens: int) -> None:
        """Hits, as found (what is still on its way counts as on the host); the policy learns from them too."""
        c, now = self.counters, self.cells.clock()
        self.policy.ask(lease.adapter, now)
        if lease.reuse:
            self.policy.meet(known, now)
        c.kv_lookup_tokens += tokens
        c.kv_hit_tokens += len(lease.path) * self.block_tokens
        c.kv_base_hit_tokens += len(self.tree.by_owner(lease.origin, lease.path)[0][1]) * self.block_tokens
        c.kv_host_hit_tokens += sum(not node.on_device for node in lease.path) * self.block_tokens
        if lease.adapter.size:
            c.adapter_lookups += 1
            c.adapter_hits += lease.adapter.on_device
            lease.adapter.hits += lease.adapter.on_device


def _coming(adapter: AdapterNode, path: Sequence[Node]) -> int:
    """Blocks of these nodes that are on their way to the device."""
    return sum(node.size for node in (adapter, *path) if node.coming)
