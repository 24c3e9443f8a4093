"""The two memories and the lanes between them, on real device arrays."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import pytest

from jlora.cache.pool import DevicePool, HostPool
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Copy, Direction, Lost
from jlora.cache.tree import AdapterNode
from jlora.layout import PoolLayout
from jlora.model import sharding, step
from jlora.model.spec import ModelSpec

SPEC = ModelSpec(vocab=64, width=32, mlp=48, layers=4, heads=4, kv_heads=2, head_dim=8, max_len=64)
LAYOUT = PoolLayout.of(SPEC, 13, 4, 1)  # block 0 and twelve more


class Rig:
    """A pool, a host tier of 40 blocks with block b full of b, and a swapper."""

    def __init__(self, gbps: float = 0.0, pinned: bool = False):
        mesh = sharding.make_mesh(1)
        self.pool = DevicePool(LAYOUT, mesh, step.build(SPEC, LAYOUT, mesh, stacked=True), 4, pinned)
        self.host = HostPool(LAYOUT, 40)
        for block in range(41):
            self.host.write([block], np.full((1, *LAYOUT.block_shape), block, np.float32))
        self.swapper = Swapper(self.pool, self.host, gbps)

    def copy(self, direction: Direction, source: tuple[int, ...], target: tuple[int, ...], **fields) -> Copy:
        return Copy(direction, AdapterNode(1, len(source)), (AdapterNode(1, len(source)),), source, target, **fields)

    def land(self, count: int) -> list[Copy]:
        found: list[Copy] = []
        end = time.monotonic() + 30
        while len(found) < count:
            assert time.monotonic() < end, "a copy never landed"
            self.swapper.wait(1.0)
            found += self.swapper.landed()
        return found

    def block(self, block: int) -> np.ndarray:
        """[L] the value that fills the block, per layer."""
        rows = np.array(self.pool.array).reshape(LAYOUT.layers, LAYOUT.blocks, -1)[:, block]
        assert (rows == rows[:, :1]).all()
        return rows[:, 0]


@pytest.mark.parametrize(("blocks", "pieces"), [(13, (1,)), (64, (4, 1)), (1023, (16, 4, 1)), (1024, (64, 16, 4, 1))])
def test_a_program_copies_at_most_a_sixteenth_of_the_pool(blocks: int, pieces: tuple[int, ...]):
    layout, mesh = PoolLayout.of(SPEC, blocks, 4, 1), sharding.make_mesh(1)
    pool = DevicePool(layout, mesh, step.build(SPEC, layout, mesh, stacked=True), 4)
    assert pool.pieces == pieces
    ids = list(range(1, min(blocks, 90)))
    staged = pool.stage(ids, np.zeros((len(ids), *layout.block_shape), np.float32))
    assert [block for piece, _ in staged for block in piece] == ids and max(len(p) for p, _ in staged) == pieces[0]


@pytest.fixture(params=[False, True], ids=["plain", "pinned"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(pinned=request.param)
    yield made
    made.swapper.close()


@pytest.fixture
def slow() -> Iterator[Rig]:
    made = Rig(gbps=LAYOUT.block_bytes / 0.04 / 1e9)  # 40 ms a block
    yield made
    made.swapper.close()


def test_blocks_go_in_and_out_unchanged_whatever_their_number(rig: Rig):
    for count in (1, 3, 7, 11):
        source, target = tuple(range(20, 20 + count)), tuple(range(12, 12 - count, -1))
        rig.swapper.start([rig.copy("in", source, target)])
        (landed,) = rig.land(1)
        assert landed.seconds > 0
        assert [rig.block(b).tolist() for b in target] == [[s] * 4 for s in source]
        rig.swapper.start([rig.copy("out", target, tuple(range(1, 1 + count)))])
        rig.land(1)
        assert (rig.host.read(range(1, 1 + count))[:, 0, 0, 0, 0] == source).all()


def test_a_copy_is_read_from_the_host_piece_by_piece(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """So one piece is read while the one before it goes over, and little fresh memory is taken at a time."""
    reads: list[tuple[int, ...]] = []
    whole = HostPool.read

    def read(host: HostPool, ids: Sequence[int], layers: slice = slice(None)) -> np.ndarray:
        reads.append(tuple(ids))
        return whole(host, ids, layers)

    monkeypatch.setattr(HostPool, "read", read)
    rig.swapper.start([rig.copy("in", (23, 21, 29), (4, 5, 6))])
    rig.land(1)
    assert rig.pool.pieces == (1,) and reads == [(23,), (21,), (29,)]
    rig.swapper.start([rig.copy("in", (31, 30), (7, 8), streams=True)])
    rig.land(1)
    assert reads[3:] == [(31,), (30,)] * rig.pool.groups
    assert [rig.block(b).tolist() for b in range(4, 9)] == [[s] * 4 for s in (23, 21, 29, 31, 30)]


def test_a_snapshot_keeps_what_was_there_when_the_copy_out_began(slow: Rig):
    slow.swapper.start([slow.copy("in", (21,), (5,))])
    slow.land(1)
    slow.swapper.start([slow.copy("out", (5,), (30,))])
    slow.pool.place(slow.pool.stage([5], np.full((1, *LAYOUT.block_shape), -1, np.float32)))  # used again at once
    slow.land(1)
    assert (slow.host.read([30]) == 21).all() and (slow.block(5) == -1).all()


def test_demand_overtakes_prefetch_and_a_promoted_copy_does_too(slow: Rig):
    copies = [slow.copy("in", (20 + i,), (1 + i,)) for i in range(5)]
    slow.swapper.start(copies[:1])
    while not copies[0].started:
        time.sleep(0.001)
    copies[3].demand = True
    slow.swapper.start(copies[1:])
    copies[4].demand = True  # somebody came to wait for it
    landed = slow.land(5)
    assert landed[:3] == [copies[0], copies[3], copies[4]]  # the first had begun
    assert landed[3:] == copies[1:3]


def test_the_link_is_as_slow_as_it_is_told_to_be_each_way_on_its_own(slow: Rig):
    began = time.monotonic()
    slow.swapper.start(
        [slow.copy("in", (*range(20, 30),), (*range(1, 11),)), slow.copy("out", (*range(11, 21),), (*range(30, 40),))]
    )
    copies = slow.land(2)
    assert all(copy.seconds >= 0.4 for copy in copies)
    ends = [copy.started + copy.seconds for copy in copies]
    assert max(copy.started for copy in copies) < min(ends)  # at the same time
    assert time.monotonic() - began >= 0.4


def test_streamed_groups_of_layers_are_placed_as_they_come(slow: Rig):
    copy = slow.copy("in", (25, 26), (7, 8), demand=True, streams=True)
    slow.swapper.start([copy])
    slow.swapper.place(copy, 0)
    assert slow.block(7).tolist()[0] == 25 and slow.block(7).tolist()[3] == 0
    slow.swapper.place(copy, 3)
    assert (slow.block(7) == 25).all() and (slow.block(8) == 26).all()
    assert slow.land(1) == [copy]
    slow.swapper.place(copy, 3)  # landed: nothing more to do
    assert (slow.block(8) == 26).all()


def test_a_streamed_copy_that_nobody_streams_lands_whole(rig: Rig):
    rig.swapper.start([rig.copy("in", (25, 26, 27), (7, 8, 9), demand=True, streams=True)])
    rig.land(1)
    assert all((rig.block(7 + i) == 25 + i).all() for i in range(3))


def test_a_copy_that_fails_is_named_and_the_lane_goes_on(rig: Rig):
    bad, good = rig.copy("in", (4000,), (1,)), rig.copy("in", (3,), (2,))
    rig.swapper.start([bad, good])
    landed: list[Copy] = []
    while not landed:
        rig.swapper.wait(10)
        landed = rig.swapper.landed()
    assert landed == [good]
    ((copy, error),) = rig.swapper.failed()
    assert copy is bad and isinstance(error, IndexError) and rig.swapper.failed() == []


def test_no_step_waits_for_a_streamed_copy_that_fails(rig: Rig):
    copy = rig.copy("in", (4000,), (1,), streams=True)
    rig.swapper.start([copy])
    with pytest.raises(Lost):
        rig.swapper.place(copy, 2)
    assert [failed for failed, _ in rig.swapper.failed()] == [copy] and rig.swapper.landed() == []


def test_closing_does_not_wait_for_what_is_queued(slow: Rig):
    slow.swapper.start([slow.copy("in", tuple(range(1, 13)), tuple(range(1, 13))) for _ in range(20)])
    began = time.monotonic()
    slow.swapper.close()
    assert time.monotonic() - began < 3


def test_arrays_on_the_device_survive_their_host_blocks(rig: Rig):
    rig.swapper.start([rig.copy("in", (33,), (2,))])
    rig.land(1)
    rig.host.write([33], np.zeros((1, *LAYOUT.block_shape), np.float32))  # may be reused at once
    jax.block_until_ready(rig.pool.array)
    assert (rig.block(2) == 33).all()
