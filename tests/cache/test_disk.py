"""The disk below the tiers: adapters leave memory and come back in any order, and what is read is right.

The world of `_world`, where every adapter has files: a full host drops idle adapters, a request for one
that is gone waits until it has been read, and a reading that nobody waits for is given up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from jlora.cache.inspect import check_integrity
from jlora.cache.manager import CacheManager
from jlora.cache.residency import Residency
from jlora.cache.tree import AdapterNode, Origin
from tests.cache._cache import Cache
from tests.cache._world import ACTIONS, NAMES, POLICIES, Job, World

SEEDS, OPERATIONS = 6, 500
MORE = {**ACTIONS, "read": (1, 12), "give_up": (0, 3), "changed": (2, 2), "make_way": (2, 2)}


class DiskWorld(World):
    """A world whose adapters may be on the disk only. A file holds what its adapter's blocks must hold."""

    reads = displaced = 0

    def do(self, action: str, numbers: tuple[int, ...]) -> None:
        self.operations += 1
        getattr(self, action)(*numbers[: MORE[action][0]])
        self.check()

    def read(self, which: int) -> None:
        """A reading ends, if the host has room for it."""
        readings = [node for node in self.manager.adapters.values() if node.reading]
        if readings:
            node = readings[which % len(readings)]
            blocks = self.manager.reserve(node.size)
            if blocks is not None:
                self._write(node.uid, blocks)
                self.manager.arrive(node, blocks, visited=not node.wanted)
                self.manager.back(node, not node.dying)
                self.reads += 1

    def give_up(self) -> None:
        """Readings that nobody waits for end."""
        for node in [node for node in self.manager.adapters.values() if node.reading and not node.wanted]:
            self.manager.give_up(node)

    def changed(self, which: int, back: int) -> None:
        """An adapter's files change, or are restored."""
        node = self.names[which % NAMES]
        if node is not None and node.size and not node.gone and not node.reading:
            self.manager.back(node, back % 3 > 0)

    def make_way(self, size: int, place: int) -> None:
        """Adapters make way for one that waits for room, and no adapter does in vain."""
        size, displaced = 1 + size % self.manager.host.total, 0
        blocks = self.manager.reserve(size)
        while blocks is None and self.manager.make_way(size, place % max(1, self.operations)) is not None:
            blocks = self.manager.reserve(size)
            displaced += 1
        assert blocks is not None or not displaced, "an adapter has made way in vain"
        self.displaced += displaced
        if blocks is not None:
            self.manager.cancel(blocks)

    def admit(self, which: int, headroom: int) -> None:
        aside = [job for job in self.queue if job.adapter.reading]
        for job in aside:
            self.queue.remove(job)
        super().admit(which, headroom)
        self.queue += aside

    def hint(self, which: int, seed: int, length: int) -> None:
        if (node := self.names[which % NAMES]) is None or not (node.gone or node.reading):
            super().hint(which, seed, length)

    def pin(self, which: int, on: int) -> None:
        if (node := self.names[which % NAMES]) is None or not (node.gone or node.reading):
            super().pin(which, on)

    def load(self, which: int, bring: int) -> None:
        self._lose(1 + which % (NAMES - 1))
        super().load(which, bring)

    def unload(self, which: int) -> None:
        self._lose(1 + which % (NAMES - 1))
        super().unload(which)

    def tend(self, tenths: int) -> None:
        super().tend(tenths)
        if tenths % 2:  # so that every run has some, whatever its sizes are
            for _ in range(4):
                self.read(tenths)

    def drain(self, seed: int = 0) -> None:
        for node in list(self.manager.adapters.values()):  # or they would fill the host for ever
            if node.size and not (node.reading or node.dying):
                self.manager.pin(node, False)
                self.manager.back(node, True)
        for _ in range(200):
            for _ in range(NAMES):
                self.read(0)
            self.give_up()
            if not any(node.reading for node in self.manager.adapters.values()):
                break
            self.start_copies()
            while self.flights:
                self.land(0, 0)
            for _ in range(len(self.queue)):
                self.admit(0, 0)
            self.step(7, 0)
            self.now += 0.1
            self.check()
        super().drain(seed)

    def _lose(self, name: int) -> None:
        node = self.names[name]
        if node is not None and node.gone:  # nothing of it is in memory
            self.names[name] = None

    def _origin(self, which: int, seed: int, prompt: list[int]) -> Origin | None:
        name = which % NAMES
        node = self.names[name]
        if node is not None and node.gone and node.size:
            self.names[name] = self.manager.expect_adapter(node.uid, node.size, node)
        return super()._origin(which, seed, prompt)

    def _load(self, size: int) -> AdapterNode | None:
        node = super()._load(size)
        if node is not None:
            self.manager.back(node, True)
        return node

    def _enqueue(self, job: Job) -> None:
        assert not job.adapter.gone, "a request is queued for an adapter that is not expected"
        super()._enqueue(job)

    def _write(self, uid: int, blocks: tuple[int, ...]) -> None:
        self.host.update({block: ("adapter", uid, i) for i, block in enumerate(blocks)})


def drive(policy: str, seed: int) -> DiskWorld:
    draw = random.Random(f"{policy} {seed}")
    world = DiskWorld(policy, device_blocks=24, host_blocks=draw.choice((5, 6, 8)), streams=seed % 2 > 0)
    names = list(MORE)
    for action in draw.choices(names, [MORE[name][1] for name in names], k=OPERATIONS):
        if action == "submit" and len(world.queue) > 6:
            action = "admit"
        world.do(action, tuple(draw.randrange(1000) for _ in range(MORE[action][0])))
    world.close()
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_leave_memory_and_come_back_and_every_invariant_holds(policy: str):
    worlds = [drive(policy, seed) for seed in range(SEEDS)]
    assert sum(world.manager.counters.adapters_dropped for world in worlds) > 10
    assert sum(world.reads for world in worlds) > 10
    assert any(world.displaced for world in worlds) or policy == "slora"  # which keeps hardly anything idle
    assert all(world.finished for world in worlds)


class Machine(RuleBasedStateMachine):
    """Hypothesis draws the operations; `worlds` gets the world of each sequence."""

    def __init__(self, worlds: list[DiskWorld]) -> None:
        super().__init__()
        self.world = DiskWorld("jlora", device_blocks=24, host_blocks=6, streams=True)
        worlds.append(self.world)

    @rule(action=st.sampled_from(list(MORE)), numbers=st.tuples(*[st.integers(0, 99)] * 3))
    def act(self, action: str, numbers: tuple[int, ...]) -> None:
        self.world.do(action, numbers)

    def teardown(self) -> None:
        self.world.close()


def test_hypothesis_finds_no_sequence_that_breaks_it():
    worlds: list[DiskWorld] = []
    sequences = settings(
        max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Machine(worlds), settings=sequences)
    assert sum(world.manager.counters.adapters_dropped for world in worlds) > 10
    assert any(world.reads for world in worlds)


@pytest.mark.parametrize(("seconds", "dropped"), [(lambda blocks: 0.1, 8), (lambda blocks: 0.01 * blocks, 1)])
def test_what_the_disk_takes_by_measure_decides_which_adapter_leaves(seconds: Callable[[int], float], dropped: int):
    """Where a read takes long whatever its size, the large one goes; else the one that is asked for less."""
    cache = Cache(device=40, host=12, policy="jlora")
    small, large = cache.adapter(1, 1), cache.adapter(2, 8)

    def ask(adapter: AdapterNode) -> None:
        lease = cache.leased([7] * 5, adapter, reuse=False)
        cache.land()
        cache.manager.leases.release(lease)

    for node in (small, large):
        cache.manager.back(node, True)
    for turn in range(60):
        ask(large if turn % 3 else small)
    cache.now += 60
    ask(large)
    for _ in range(60):
        for blocks in (1, 8):
            cache.manager.policy.meter.observe_disk(blocks, seconds(blocks))
    assert cache.manager.reserve(4)
    assert [node.size for node in (small, large) if node.gone] == [dropped]


def kv_left_below(patch: pytest.MonkeyPatch) -> None:
    """An adapter leaves memory, and its KV stays in the tree."""

    def remove(cells: Residency, adapter: AdapterNode) -> None:
        if not adapter.dying and (adapter.children or adapter.suffixes):
            cells._leave_host(adapter)
            if adapter.device:
                cells._leave_device(adapter)
            adapter.reading = True  # as if it were to be read again
            return
        real(cells, adapter)

    real = Residency._remove
    patch.setattr(Residency, "_remove", remove)


def stale_copy(patch: pytest.MonkeyPatch) -> None:
    """An adapter that comes back takes what another left in its blocks: nothing is read."""
    patch.setattr(DiskWorld, "_write", lambda world, uid, blocks: None)


def dropped_in_use(patch: pytest.MonkeyPatch) -> None:
    """An adapter may leave although requests wait for it."""

    def droppable(node: AdapterNode) -> bool:
        return node.backed and bool(node.host) and not (node.users or node.flying or node.moving or node.pinned)

    patch.setattr(AdapterNode, "droppable", property(droppable))


def lent_too_early(patch: pytest.MonkeyPatch) -> None:
    """An adapter counts as there before its data is."""
    real = CacheManager.expect_adapter

    def expect(manager: CacheManager, uid: int, size: int, last: AdapterNode | None = None) -> AdapterNode:
        node = real(manager, uid, size, last)
        node.reading = False
        return node

    patch.setattr(CacheManager, "expect_adapter", expect)


PLANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    kv_left_below: "KV is left below an adapter that is on the disk only|leaked or lost blocks",
    stale_copy: "the host holds something else",
    dropped_in_use: "an adapter version that is gone|a request is queued for|nothing moves and somebody waits|"
    "an adapter that has left is in the tree|a sequence is queued for an adapter",
    lent_too_early: "an adapter lost its master copy",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=PLANTS[plant]):
        for seed in range(SEEDS):
            drive("jlora", seed)


def test_an_adapter_whose_kv_fails_to_reach_the_host_may_still_leave_it():
    cache = Cache(device=20, host=8, policy="lru")
    adapter = cache.adapter(1, 4)
    cache.manager.back(adapter, True)
    lease = cache.leased([1] * 16, adapter)
    cache.land()
    cache.manager.leases.publish(lease, [1] * 16, 16)
    cache.manager.leases.release(lease)
    (copy,) = cache.copies()
    assert copy.direction == "out" and cache.manager.lost(copy)
    assert cache.manager.reserve(6) and adapter.gone


@pytest.mark.parametrize("landed", [False, True], ids=["on its way", "wanted"])
def test_no_adapter_makes_way_in_vain(landed: bool):
    """KV whose copy is under way, or that an earlier request in the queue needs, keeps its place on the host."""
    cache = Cache(device=20, host=10, policy="lru")
    cache.manager.back(adapter := cache.adapter(1, 4), True)
    lease = cache.leased([1] * 16)
    cache.manager.leases.publish(lease, [1] * 16, 16)
    cache.manager.leases.release(lease)
    cache.tend()
    if not landed:
        cache.land(*(copy for copy in cache.copies() if copy.direction == "in"))
    earlier = cache.manager.expect(Origin(cache.manager.base), [1] * 17, True, place=1)
    cache.manager.expect(Origin(adapter), [2] * 5, True, place=3)
    if landed:
        cache.land()
        cache.drop_from_device([1] * 16)
    assert cache.manager.host.history_kv == 4 and cache.manager.make_way(7, 2) is None and adapter.host
    assert cache.manager.make_way(6, 2) is adapter and not adapter.host, "without this KV there is room for 6"
    cache.manager.unexpect(earlier)
    assert cache.manager.reserve(6) and bool(cache.manager.reserve(4)) is landed


def test_kv_goes_with_the_adapter_that_makes_way():
    cache = Cache(device=20, host=10, policy="lru")
    cache.manager.back(adapter := cache.adapter(1, 4), True)
    cache.run([1] * 16, adapter)
    for node in (*reversed(cache.path([1] * 16, adapter)), adapter):
        cache.cells.evict(node)
    cache.manager.expect(Origin(adapter), [1] * 17, True, place=3)
    assert cache.manager.host.history_kv == 4 and not cache.manager.reserve(10)
    assert cache.manager.make_way(10, 2) is adapter and cache.manager.reserve(10)


@pytest.mark.parametrize("displaced", [False, True])
def test_a_prefix_keeps_no_room_that_the_adapter_of_its_request_needs(displaced: bool):
    """An activated LoRA's request finds KV of the base, and runs once the adapter has been read: both would wait."""
    cache = Cache(device=20, host=10, policy="lru")
    late = cache.adapter(1, 6) if displaced else cache.manager.expect_adapter(1, 8)
    cache.run([1] * 16)
    cache.tend()
    cache.land()
    cache.drop_from_device([1] * 16)
    cache.manager.back(late, displaced)
    want = cache.manager.expect(Origin(late, activation=16), [1] * 18, True, place=3)
    assert cache.manager.host.history_kv == 4
    assert not displaced or cache.manager.make_way(8, 2) is late
    assert cache.manager.reserve(8), "it waits for ever"
    cache.manager.unexpect(want)
    check_integrity(cache.manager)
