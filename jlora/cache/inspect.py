"""Looking at a cache without changing it: what users see, and the invariants. No jax.

The invariants (docs/architecture.md):

    1  every block of a tier has exactly one owner: free + adapters + KV + leases = total
    2  users of a node = live leases through it
    3  a KV node is on the device only if its whole prefix and its adapter are
       (as far as the policy binds them)
    4  what is being copied is in flight, and nothing else is
    5  nothing outlives its adapter version
    6  an adapter that is on the disk only has no blocks, no leases, and no KV
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from jlora.cache.manager import CacheManager
from jlora.cache.residency import Residency
from jlora.cache.tree import ADAPTER, KV, LEAVING, AdapterNode, Node, SuffixNode, adapter_of
from jlora.types import CacheState


def cells(manager: CacheManager) -> Residency:
    """The mechanism below a manager, for tests and benchmarks of the cache itself."""
    return manager._cells


def where(manager: CacheManager, registered: int, reading: int, removed: Sequence[AdapterNode]) -> dict[str, int]:
    """Adapters in service by where their weights are, as the fields of `CacheState`. O(copies under way + removed).

    Args:
        registered: how many are in service.
        reading: nodes that wait for the disk.
        removed: nodes of the tree that are out of service: requests still use them.
    """
    coming = sum(copy.kind == ADAPTER for copy in cells(manager).traffic.arriving) - sum(a.coming for a in removed)
    reading -= sum(a.reading for a in removed)
    hbm = cells(manager).adapters - sum(bool(a.device) for a in removed) - coming
    memory = len(manager.adapters) - 1 - len(removed)  # without the base
    return {
        "adapters_registered": registered,
        "adapters_hbm": hbm,
        "adapters_host": memory - hbm - coming - reading,
        "adapters_disk": registered - memory,
        "adapters_loading": coming + reading,
        "adapters_reading": reading,
    }


def state(manager: CacheManager, block_bytes: int, adapters: Mapping[str, int] | None = None) -> CacheState:
    """A snapshot: blocks by class and counters. O(1), except under ablations without dependencies.

    `adapters`: what `where` has counted; without it, these fields are 0.
    """
    c = manager.counters
    return CacheState(
        policy=manager.policy.name,
        hbm=manager.device,
        host=manager.host,
        in_flight=sum(cells(manager).traffic.backlog.values()),
        invalid_kv=0 if countable(manager) else invalid_kv(manager),
        adapter_hits=c.adapter_hits,
        adapter_lookups=c.adapter_lookups,
        kv_hit_tokens=c.kv_hit_tokens,
        kv_host_hit_tokens=c.kv_host_hit_tokens,
        kv_base_hit_tokens=c.kv_base_hit_tokens,
        kv_lookup_tokens=c.kv_lookup_tokens,
        bytes_swapped_in=c.blocks_in * block_bytes,
        bytes_swapped_out=c.blocks_out * block_bytes,
        clean_evictions=c.clean_evictions,
        blocks_lost=c.blocks_lost,
        cold_waited=c.cold_waited,
        cold_streamed=c.cold_streamed,
        cold_helped=c.cold_helped,
        cold_predicted=c.cold_predicted,
        cold_predicted_s=c.cold_predicted_s,
        cold_measured_s=c.cold_measured_s,
        cold_error_s=c.cold_error_s,
        adapters_dropped=c.adapters_dropped,
        adapter_reads=c.adapter_reads,
        adapter_reads_failed=c.adapter_reads_failed,
        adapter_read_s=c.adapter_read_s,
        streamed=c.streamed,
        recomputed_tokens=c.recomputed_tokens,
        **(adapters or {}),
    )


def countable(manager: CacheManager) -> bool:
    """Whether the policy lets no KV outstay what it depends on: then `state` need not look for any."""
    return all(manager.policy.binds(node) for node in (manager.base, Node(manager.base, b"")))


def invalid_kv(manager: CacheManager) -> int:
    """KV blocks on the device that are of no use as they are: their prefix or their adapter is not there."""
    adapters = manager.adapters.values()
    if manager.policy.binds(Node(manager.base, b"")):  # prefixes stay: all of it is below adapters that do not
        hanging = [node for a in adapters if a.size and not a.device for node in a.dependents() if node.device]
        for node in hanging:  # grows meanwhile
            hanging += [child for child in node.branches() if child.device]
        return sum(node.standing != LEAVING for node in hanging)
    invalid = 0
    stack: list[tuple[Node, bool]] = [(adapter, bool(adapter.device) or not adapter.size) for adapter in adapters]
    while stack:
        above, rooted = stack.pop()
        for node in above.branches():
            based = rooted and all(needed.device or not needed.size for needed in node.needs)
            invalid += bool(node.device) and not based and node.standing != LEAVING
            stack.append((node, based and bool(node.device)))
    return invalid


def check_integrity(manager: CacheManager) -> None:
    """Raises AssertionError if an invariant is broken. O(nodes + blocks)."""
    users: Counter[Node] = Counter()
    private: list[int] = []
    for lease in manager.leases.live.values():
        head = tuple(node.device[0] for node in lease.path)
        assert lease.blocks[: len(head)] == head, "a lease's table is not its path's blocks"
        above: Node = manager.tree.top(lease.origin)
        for node in lease.path:
            assert node.parent is above, "a lease skips a part of its prefix"
            above = node
        for owner, part in manager.tree.by_owner(lease.origin, lease.path):
            assert all(adapter_of(node) is owner for node in part[-1:]), "a lease reads another adapter's KV"
        private += lease.blocks[len(head) :]
        users.update((lease.adapter, *lease.path))
    nodes: list[Node] = []
    suffixes = {node for node in manager.tree.below(manager.base) if isinstance(node, SuffixNode)}
    for uid, adapter in manager.adapters.items():
        assert set(adapter.suffixes) <= suffixes, "an adapter has a suffix that is not in the tree"
        assert adapter.uid == uid and (not adapter.dying or adapter.users or adapter.wanted or adapter.flying), (
            "an adapter version outlives its last user"
        )
        nodes += [adapter, *manager.tree.below(adapter)]
    for node in nodes:
        _check_node(manager, node, users[node])
    assert not set(users) - set(nodes), "a lease goes through a node that is not in the tree"
    _check_tiers(manager, nodes, private)
    _check_flights(manager, nodes)


def _check_node(manager: CacheManager, node: Node, users: int) -> None:
    policy, parent = manager.policy, node.parent
    assert node.users == users, f"a node has {node.users} users, and {users} leases go through it"
    assert len(node.device) in (0, node.size) and len(node.host) in (0, node.size), "a node is there in part"
    assert not node.coming or (node.device and node.on_host), "a copy comes from nowhere"
    assert not node.saving or (node.host and node.on_device), "a copy is made of nothing"
    assert list(node.wanted) == sorted(node.wanted), "places in the queue are out of order"
    staying = sum(bool(child.device) and child.standing != LEAVING for child in node.dependents())
    assert node.resident == staying, "dependents on the device are miscounted"
    if isinstance(node, AdapterNode):
        assert node.host or node.reading or not node.size, "an adapter lost its master copy"
        assert not node.gone, "an adapter that has left is in the tree"
        if node.reading:
            held = node.host or node.device or node.users or node.flying
            assert not held, "an adapter that is on the disk only holds blocks"
            assert not (node.children or node.suffixes), "KV is left below an adapter that is on the disk only"
        return
    assert parent is not None and parent.child(node.key) is node, "a child without its parent"
    assert node.device or node.host or node.children, "an empty leaf"
    if isinstance(node, SuffixNode):
        known = manager.adapters.get(node.adapter.uid) is node.adapter
        assert known and node in node.adapter.suffixes, "a suffix outlives its adapter version"
    for needed in node.needs:
        if node.device and node.standing != LEAVING and policy.binds(needed):
            assert needed.device or not needed.size, "KV is on the device without what it depends on"


def _check_tiers(manager: CacheManager, nodes: list[Node], private: list[int]) -> None:
    device, host = cells(manager).device, cells(manager).host
    device.check_integrity([b for node in nodes for b in node.device] + private)
    host.check_integrity([b for node in nodes for b in node.host] + [*manager.reserved])
    for tier, place in ((device, "device"), (host, "host")):
        held = [sum(len(getattr(n, place)) for n in nodes if n.kind == kind) for kind in (ADAPTER, KV)]
        held[KV] += len(private) if tier is device else 0
        held[ADAPTER] += len(manager.reserved) if tier is host else 0
        assert tier.used == held, f"{place} blocks are miscounted: {tier.used}, not {held}"
    there = sum(bool(n.device) for n in nodes if n.kind == ADAPTER)
    assert cells(manager).adapters == there, f"adapters are miscounted: {cells(manager).adapters}, not {there}"
    for kind in (ADAPTER, KV):
        assert device.used[kind] <= cells(manager).limit(kind), "a share is exceeded"
        idle = [n for n in nodes if n.kind == kind and not (n.users or n.moving or n.pinned)]
        blocks, counted = sum(len(n.device) for n in idle), cells(manager).idle(kind)
        assert counted == blocks, f"idle blocks are miscounted: {counted}, not {blocks}"
        bare = sum(len(n.device) for n in idle if kind == KV and not n.host)
        assert kind == ADAPTER or cells(manager).bare == bare, "idle KV without a copy is miscounted"
    running = len(private) + sum(len(n.device) for n in nodes if n.kind == KV and n.users)
    counted = manager.device.running_kv
    assert counted == running, f"running KV is miscounted: {counted}, not {running}"


def _check_flights(manager: CacheManager, nodes: list[Node]) -> None:
    traffic = cells(manager).traffic
    moving = {node for node in nodes if node.moving}
    assert set(traffic.flying) == moving, "what is in flight and what is marked so differ"
    leaving = [node for node in nodes if node.standing == LEAVING]
    assert all(node.saving and not node.users for node in leaving), "what is to leave is in use"
    for node, copy in traffic.flying.items():
        assert adapter_of(node) is copy.adapter, "a copy goes in another adapter's name"
    copies = {id(copy): copy for copy in traffic.flying.values()}.values()
    for direction in ("in", "out"):
        blocks = sum(len(copy.source) for copy in copies if copy.direction == direction)
        assert traffic.backlog[direction] == blocks, "blocks in flight are miscounted"
    arriving = {id(copy) for copy in copies if copy.direction == "in"}
    assert {id(copy) for copy in traffic.arriving} == arriving, "copies to the device are miscounted"
    for adapter in manager.adapters.values():
        assert adapter.flying == sum(copy.adapter is adapter for copy in copies), "copies of an adapter are miscounted"
