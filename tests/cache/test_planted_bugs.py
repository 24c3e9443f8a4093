"""The suite can fail: each classic bug of such a cache, planted in one method, is caught by the driver.

By the check that is there for it: each plant is listed with what the driver must say. Beside them
the same runs without a plant, which pass. The wake-up of those who were refused is the scheduler's
affair too: `tests/engine/test_scheduler.py` has that plant against the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from jlora.cache.blocks import Tier
from jlora.cache.candidates import Candidates
from jlora.cache.inspect import cells as cells_of
from jlora.cache.lease import Lease
from jlora.cache.leases import Leases
from jlora.cache.manager import CacheManager
from jlora.cache.readiness import Gate, Readiness
from jlora.cache.residency import Residency
from jlora.cache.transfer import Copy
from jlora.cache.tree import KV, AdapterNode, Key, Node, Origin, SuffixNode, Tree
from tests.cache._world import drive

SEEDS, OPERATIONS = 12, 500
Plant = Callable[[pytest.MonkeyPatch], None]


def leaked_reference(patch: pytest.MonkeyPatch) -> None:
    """Every tenth lease ends without giving up the last node of its path."""
    real, calls = Leases.release, []

    def release(leases: Leases, lease: Lease) -> None:
        calls.append(lease)
        if lease.path and len(calls) % 10 == 0:
            lease.path[-1].users += 1
        real(leases, lease)

    patch.setattr(Leases, "release", release)


def leaked_block(patch: pytest.MonkeyPatch) -> None:
    """A copy to the device takes one block more than it fills, and nobody owns it."""
    real = Residency.landed

    def landed(cells: Residency, copy: Copy) -> None:
        real(cells, copy)
        if copy.direction == "in" and cells.device.free > 3:
            cells.device.take(KV, 1)

    patch.setattr(Residency, "landed", landed)


def child_without_parent(patch: pytest.MonkeyPatch) -> None:
    """A node may leave although something below it is on the device."""

    def evictable(candidates: Candidates, node: Node) -> bool:
        return bool(node.device) and not (node.users or node.moving or node.pinned)

    patch.setattr(Candidates, "evictable", evictable)


def double_free(patch: pytest.MonkeyPatch) -> None:
    """A lease frees its published blocks a second time, and the allocator does not notice."""
    real = Leases.release

    def release(leases: Leases, lease: Lease) -> None:
        shared = [node.device[0] for node in lease.path if node.users == 1]
        real(leases, lease)
        leases._cells.device.give(KV, shared[-1:])

    def give(tier: Tier, kind: int, blocks: Sequence[int]) -> None:
        tier._free.extend(blocks)
        tier.used[kind] -= len(blocks)
        for block in blocks:
            tier._taken[block] = 0

    patch.setattr(Leases, "release", release)
    patch.setattr(Tier, "give", give)


def stale_version(patch: pytest.MonkeyPatch) -> None:
    """A reload under the same name keeps KV that the version before it has on the host."""
    real = CacheManager.add_adapter

    def add_adapter(manager: CacheManager, uid: int, blocks: tuple[int, ...]) -> AdapterNode:
        fresh = real(manager, uid, blocks)
        for old in [a for a in manager.adapters.values() if a.size == fresh.size and a is not fresh]:
            for child in list(old.branches()):
                if child.on_host and not child.device:
                    assert isinstance(child.key, tuple)
                    tokens = memoryview(child.key[1]).cast("i")
                    manager.tree.insert(fresh, Origin(fresh, child.key[0]), tokens, 0).host = child.host
                    child.host = ()
                    cells_of(manager).forget(child)
        return fresh

    patch.setattr(CacheManager, "add_adapter", add_adapter)


def stale_content(patch: pytest.MonkeyPatch) -> None:
    """An adapter's copy to the device is taken from where another version lies."""
    real = Residency.bring

    def bring(cells: Residency, adapter: AdapterNode, nodes: Sequence[Node], *rest: bool, **named: bool) -> None:
        real(cells, adapter, nodes, *rest, **named)
        if nodes and nodes[0].kind != KV and adapter.size > 1:
            copy = cells.traffic.outbox[-1]
            copy.source = (copy.source[-1], *copy.source[1:])

    patch.setattr(Residency, "bring", bring)


def read_before_copy(patch: pytest.MonkeyPatch) -> None:
    """A lease is ready as soon as its copies have been decided."""
    patch.setattr(Gate, "readiness", lambda gate, lease, tokens, unadapted: Readiness.READY)


def host_before_copy(patch: pytest.MonkeyPatch) -> None:
    """A copy on the host counts before it is complete."""
    real = Residency.save

    def save(cells: Residency, adapter: AdapterNode, nodes: Sequence[Node]) -> None:
        real(cells, adapter, nodes)
        for node in nodes:
            node.saving = False

    patch.setattr(Residency, "save", save)


def lost_wakeup(patch: pytest.MonkeyPatch) -> None:
    """Blocks come free, and nobody who was refused is told."""
    patch.setattr(CacheManager, "epoch", property(lambda manager: 0))


def lost_landing(patch: pytest.MonkeyPatch) -> None:
    """A copy that has landed is never reported to those who wait for it."""
    real, calls = CacheManager.landed, []

    def landed(manager: CacheManager, copies: Sequence[Copy]) -> None:
        calls.extend(copies)
        real(manager, [copy for copy in copies if copy.direction == "out" or len(calls) % 5])

    patch.setattr(CacheManager, "landed", landed)


def suffix_without_adapter(patch: pytest.MonkeyPatch) -> None:
    """An adapter may leave although activated KV of it is on the device."""
    patch.setattr(SuffixNode, "needs", Node.needs)


def suffix_of_any_adapter(patch: pytest.MonkeyPatch) -> None:
    """Two activated LoRAs find each other's suffixes."""
    real, nobody = Tree._key, AdapterNode(uid=0, size=1)
    patch.setattr(Tree, "_key", lambda tree, origin, *rest: real(tree, origin._replace(adapter=nobody), *rest))


def suffix_from_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Where in its first block a suffix begins is forgotten."""
    real = Tree._key

    def key(tree: Tree, origin: Origin, data: bytes, first: bool, suffix: bool) -> Key:
        at = None if origin.activation is None else origin.activation // tree.block_tokens * tree.block_tokens
        return real(tree, origin._replace(activation=at), data, first, suffix)

    patch.setattr(Tree, "_key", key)


def suffix_outlives_adapter(patch: pytest.MonkeyPatch) -> None:
    """A version that ends leaves its activated KV behind."""
    patch.setattr(Tree, "owned", Tree.below)


def invocation_block_as_base(patch: pytest.MonkeyPatch) -> None:
    """The block that an invocation begins in counts as the base's."""
    plain = Tree._base_blocks
    patch.setattr(Tree, "_base_blocks", lambda tree, origin: plain(tree, origin) + bool(origin.activation))


def copy_of_two_owners(patch: pytest.MonkeyPatch) -> None:
    """A suffix is copied in the base's name, so its adapter's end does not wait for it."""
    patch.setattr(Tree, "by_owner", lambda tree, origin, path: ((tree.base, path),))


# What the driver says of each: the first check that sees it, or one of two that may come first.
PLANTS: Mapping[Plant, str] = {
    leaked_reference: "a node has 1 users, and 0 leases go through it",
    leaked_block: "leaked or lost blocks",
    child_without_parent: "KV is on the device without what it depends on",
    double_free: "a block has two owners|leaked or lost blocks",
    stale_version: "the host holds something else",
    stale_content: "the device holds something else",
    read_before_copy: "a step reads what is not on its way",
    host_before_copy: "what is in flight and what is marked so differ",
    lost_wakeup: "nothing moves and somebody waits",
    lost_landing: "a landed copy is not seen|a step reads what is not on its way",
    suffix_without_adapter: "dependents on the device are miscounted",
    suffix_of_any_adapter: "a suffix is found under another adapter",
    suffix_from_anywhere: "the device holds something else",
    suffix_outlives_adapter: "a suffix outlives its adapter version",
    invocation_block_as_base: "the device holds something else",
    copy_of_two_owners: "a lease reads another adapter's KV|a copy goes in another adapter's name",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught_by_the_check_that_is_there_for_it(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=PLANTS[plant]):
        for seed in range(SEEDS):
            drive("jlora", seed, OPERATIONS)


@pytest.mark.slow
def test_without_a_plant_the_same_runs_pass():
    for seed in range(SEEDS):
        drive("jlora", seed, OPERATIONS)
