"""Leases: what a running sequence holds of the cache, from its admission to its end. No jax.

A lease is its adapter's blocks, the cached prefix, and blocks of its own for what it will compute.
Copies bring data from the host. The lease's step runs when its data is ready (`readiness`), and
other sequences run meanwhile. A block that is full of known tokens is *published* into the tree,
where later requests find it. It stays there when the lease ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from jlora.cache.forecast import Forecast
from jlora.cache.lease import Lease
from jlora.cache.readiness import Gate
from jlora.cache.residency import Residency
from jlora.cache.transfer import Copy
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node, Origin

log = logging.getLogger(__name__)


class Leases:
    """The leases of one cache."""

    def __init__(self, cells: Residency, forecast: Forecast, clock: Callable[[], float], prefix_reuse: bool):
        self.live: dict[int, Lease] = {}  # not ended, by `id`
        self.prefix_reuse = prefix_reuse
        self._cells = cells
        self._tree = cells.tree
        self._forecast = forecast
        self._clock = clock
        self.gate = Gate(forecast, clock)
        self._block_tokens = cells.tree.block_tokens

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
        adapter, cells = origin.adapter, self._cells
        assert self._tree.adapters.get(adapter.uid) is adapter, "a lease on an adapter version that is gone"
        assert not adapter.reading, "a lease on an adapter that is not in memory"
        now = self._clock()
        lease = Lease(origin, reuse and self.prefix_reuse, granted=now, since=now)
        known: list[Node] = []
        if lease.reuse:  # at least one token is always computed: its hidden state is needed
            known = self._tree.match(origin, tokens, limit=len(tokens) - 1)
            lease.path = self._forecast.worth_copying(known)
        for node in (adapter, *lease.path):
            cells.lock(node)
        try:
            return self._grant(lease, known, tokens, headroom, again, spare_s)
        except Exception:
            self._unlock(lease, used=False)
            raise

    def _grant(
        self, lease: Lease, known: list[Node], tokens: Sequence[int], headroom: int, again: bool, spare_s: float
    ) -> Lease | None:
        """Room for a lease whose nodes are locked, and the copies of what is not on the device."""
        origin, adapter, cells = lease.origin, lease.adapter, self._cells
        size = 0 if adapter.device else adapter.size
        own = self._blocks_for(len(tokens)) - len(lease.path)
        need = sum(not node.device for node in lease.path) + own + headroom
        if not cells.make_room(size, need, spare_s=spare_s):
            epoch = cells.epoch
            self._unlock(lease, used=False)
            cells.epoch = epoch  # a refusal makes nothing possible
            log.debug("refuse adapter %d: no room for its %d blocks and %d of KV", adapter.uid, size, need)
            return None
        if not again:
            self._count(lease, known, len(tokens))
        cells.visit((adapter, *lease.path))
        if anew := len(known) - len(lease.path):
            cells.counters.recomputed_tokens += anew * self._block_tokens
            log.debug("recompute %d blocks of adapter %d: copying takes longer", anew, adapter.uid)
        cells.bring_adapter(adapter, demand=True)
        cells.bring_path(origin, lease.path, demand=True)
        lease.blocks = (*[node.device[0] for node in lease.path], *cells.device.take(KV, own))
        lease.cached = len(lease.path) * self._block_tokens
        lease.left = len(tokens) - lease.cached
        lease.coming = [node for node in (adapter, *lease.path) if node.coming]
        lease.copied = sum(node.kind == KV for node in lease.coming) * self._block_tokens
        for node in lease.coming:
            cells.traffic.promote(node)
        self.live[id(lease)] = lease
        return lease

    def fit(self, requests: Collection[tuple[AdapterNode, int]], headroom: int) -> bool:
        """Whether all of these could have a lease now, by adapter and tokens, whatever of them is cached."""
        missing = {adapter for adapter, _ in requests if not adapter.device}
        blocks = sum(self._blocks_for(tokens) for _, tokens in requests)
        return self._cells.obtainable(sum(adapter.size for adapter in missing), blocks + headroom)

    def needs_copy(self, origin: Origin, tokens: Sequence[int], reuse: bool) -> bool:
        """Whether a lease granted now would wait for copies of KV to the device; changes nothing."""
        if not (reuse and self.prefix_reuse):
            return False
        known = self._tree.match(origin, tokens, limit=len(tokens) - 1)
        return not all(node.on_device for node in self._forecast.worth_copying(known))

    def streams(self, leases: Sequence[Lease]) -> tuple[Copy, ...]:
        """The copies under way that these leases read: a step with them must stream them."""
        found: dict[Copy, None] = {}
        for lease in leases:
            alone = lease.ahead or lease.helped  # it needs no adapter on the device
            read = (node for node in lease.coming if node.coming and not (alone and node.kind == ADAPTER))
            copies = [self._cells.traffic.flying[node] for node in read]
            self._cells.counters.streamed += bool(copies) and not lease.streamed
            lease.streamed |= bool(copies)
            found |= dict.fromkeys(copies)
        return tuple(found)

    def helps(self, leases: Iterable[Lease]) -> tuple[Copy, ...]:
        """The copies under way of these leases' adapters: the host stands in for them."""
        return tuple(dict.fromkeys(self._cells.traffic.flying[lease.adapter] for lease in leases))

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Makes the lease hold `tokens` tokens; False if there is no room now."""
        if tokens <= len(lease.blocks) * self._block_tokens:  # nearly always: asked for every token
            return True
        need = self._blocks_for(tokens) - len(lease.blocks)
        if not self._cells.make_room(kv=need):
            return False
        lease.blocks += self._cells.device.take(KV, need)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Puts the lease's full blocks among the first `computed` tokens into the tree.

        Where the tree has the same tokens on the device already, the lease moves over to that block
        and gives its own back: one prefix, one copy. Where it has them on the host only, or has lost
        them, the lease's block becomes the node's. KV that an activated LoRA's sequence computes before
        its invocation goes where the base finds it.
        """
        first, size = len(lease.path), self._block_tokens
        if computed < (first + 1) * size or not lease.reuse or lease.adapter.dying:
            return
        cells = self._cells
        for index in range(first, computed // size):
            parent = lease.path[-1] if lease.path else self._tree.top(lease.origin)
            own, blocks = lease.blocks[index], lease.blocks
            node = self._tree.insert(parent, lease.origin, tokens, index * size)
            if node.coming:  # copying it was sooner for another request; wait for it to land
                return
            if node.device:
                blocks = (*blocks[:index], node.device[0], *blocks[index + 1 :])
            else:
                cells.adopt(node, own)
            # Together: after an error between them, the lease's end would give back a block that the tree owns.
            lease.path.append(node)
            lease.blocks = blocks
            cells.lock(node)
            if blocks[index] != own:
                cells.device.give(KV, [own])
                cells.epoch += 1
            cells.visit([node])

    def release(self, lease: Lease) -> None:
        """Ends a lease: published blocks stay as history, its own are free."""
        cells, own = self._cells, lease.blocks[len(lease.path) :]
        del self.live[id(lease)]
        cells.device.give(KV, own)
        cells.epoch += 1
        cells.counters.cold_waited += lease.cold_start == "wait"
        cells.counters.cold_streamed += lease.cold_start == "stream"
        cells.counters.cold_helped += lease.cold_start == "cpu"
        if lease.first_token and lease.cold_start in lease.predicted:
            self._compare(lease)
        if cells.policy.saves_ahead and not lease.adapter.dying:
            self._write_through(lease)
        self._unlock(lease)

    # -- inside -----------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _write_through(self, lease: Lease) -> None:
        for owner, nodes in self._tree.by_owner(lease.origin, lease.path):
            fresh = [node for node in nodes if not node.host and node.device and not node.moving]
            self._cells.save(owner, fresh[: self._cells.host.free])

    def _compare(self, lease: Lease) -> None:
        """Counts how long a first token took beside what had been predicted of the way in which its lease started."""
        c, predicted_s, took_s = self._cells.counters, lease.predicted[lease.cold_start], lease.first_token
        took_s -= lease.predicted_at
        c.cold_predicted += 1
        c.cold_predicted_s += predicted_s
        c.cold_measured_s += took_s
        c.cold_error_s += abs(took_s - predicted_s)

    def _unlock(self, lease: Lease, used: bool = True) -> None:
        for node in (*reversed(lease.path), lease.adapter):
            self._cells.unlock(node, used)
        self._cells.retire(lease.adapter)

    def _count(self, lease: Lease, known: list[Node], tokens: int) -> None:
        """Counts hits as found: data still on its way counts as on the host. The policy learns from them too."""
        cells, c, now = self._cells, self._cells.counters, self._cells.clock()
        cells.policy.ask(lease.adapter, now)
        if lease.reuse:
            cells.policy.meet(known, now)
        size = self._block_tokens
        c.kv_lookup_tokens += tokens
        c.kv_hit_tokens += len(lease.path) * size
        c.kv_base_hit_tokens += len(self._tree.by_owner(lease.origin, lease.path)[0][1]) * size
        c.kv_host_hit_tokens += sum(not node.on_device for node in lease.path) * size
        if lease.adapter.size:
            c.adapter_lookups += 1
            c.adapter_hits += lease.adapter.on_device
            lease.adapter.hits += lease.adapter.on_device
