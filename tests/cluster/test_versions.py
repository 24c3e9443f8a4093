"""Versions end to end: a router over real engines, with the real controller."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jlora import config as configuration
from jlora.cluster.found import Found
from jlora.engine import loading
from jlora.errors import DataLoss, ResourceExhausted
from jlora.ports import System
from jlora.replica import Load
from tests import _make
from tests.cluster import _whole
from tests.cluster._links import wait_for
from tests.cluster._service import text_spec
from tests.cluster._whole import LONG, Whole, World
from tests.port import look


@pytest.fixture(scope="module")
def world(text_model: Path) -> Iterator[World]:
    with _whole.world(text_model) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(_make.make_adapter(tmp_path / "one", text_spec(), seed=3, r=4))


@pytest.fixture
def other(tmp_path: Path) -> str:
    return str(_make.make_adapter(tmp_path / "two", text_spec(), seed=8, r=4))


def test_a_load_at_the_router_serves_at_every_replica(world: World, path: str):
    info = world.router.load_adapter("all", path).result(60)
    asked = [world.ask("all") for _ in range(4)]
    first, *rest = [answer.read() for answer in asked]
    assert len(first) == 64 and all(tokens == first for tokens in rest)
    wait_for(lambda: all("all@1" in {r.name for r in seat.engine.records()} for seat in world.seats))
    assert all(seat.engine.adapter(f"all@{info.uid}").result(20).digest == info.digest for seat in world.seats)
    world.router.unload_adapter("all").result(60)
    assert world.keys() == set()


def test_a_version_replaced_under_running_requests_never_mixes_with_the_next(world: World, path: str, other: str):
    world.router.load_adapter("v", path).result(60)
    old = world.ask("v").read()
    world.router.load_adapter("w", other).result(60)
    new = world.ask("w").read()
    assert old != new
    before = [world.ask("v", LONG // 2) for _ in range(3)]
    for answer in before:
        answer.read(least=3)
    world.router.load_adapter("v", other, replace=True).result(60)
    after = [world.ask("v") for _ in range(3)]
    assert [answer.read()[:64] for answer in before] == [old] * 3
    assert before[0].tokens == before[1].tokens == before[2].tokens
    assert [answer.read() for answer in after] == [new] * 3
    current = {world.controller.current(name).key for name in ("v", "w")}
    wait_for(lambda: world.keys() == current)
    for name in ("v", "w"):
        world.router.unload_adapter(name).result(60)


def test_an_answer_goes_on_elsewhere_with_the_version_that_it_began_with(world: World, path: str, other: str):
    """Its replica is lost after the name has come to stand for another version."""
    world.router.load_adapter("v", path).result(60)
    old = world.ask("v", LONG).read()
    answer = world.ask("v", LONG)
    answer.read(least=3)
    world.router.load_adapter("v", other, replace=True).result(60)
    lost = next(seat for seat in world.seats if seat.running)
    lost.kill()
    lost.start()
    world.router.place({seat.name: seat.address for seat in world.seats})
    assert answer.read() == old
    wait_for(lambda: len(world.router.replicas) == 2)
    wait_for(lambda: world.upkeep.round() or world.keys() <= {world.controller.current("v").key})
    world.router.unload_adapter("v").result(60)


def test_no_answer_goes_on_with_other_weights_also_if_nobody_knew_their_digest(world: World, path: str):
    """A directory that was only scanned has no digest yet; its files change before its replica is lost."""
    config = configuration.replace(world.router.info.config, {"adapters.paths.v": path})
    world.controller.add(Found(config, System()).first(world.controller.registry))
    assert not world.controller.current("v").digest
    answer = world.ask("v", LONG)
    answer.read(least=3)
    lost, other = sorted(world.seats, key=lambda seat: not seat.running)
    _make.make_adapter(path, text_spec(), seed=99, r=4)
    world.router.place({other.name: other.address})
    with pytest.raises(DataLoss, match="changed"):
        answer.read()
    world.router.place({seat.name: seat.address for seat in world.seats})
    wait_for(lambda: len(world.router.replicas) == 2)
    world.router.unload_adapter("v").result(60)


def test_a_replica_whose_files_differ_ends_the_requests_that_need_them(world: World, path: str):
    world.router.load_adapter("v", path).result(60)
    for seat in world.seats:
        for record in seat.engine.records():
            seat.engine.unload_adapter(record.name).result(20)
    wait_for(lambda: not any(member.tiers for member in world.controller.members()))
    _make.make_adapter(path, text_spec(), seed=99, r=4)
    with pytest.raises(DataLoss, match="files have changed"):
        world.ask("v").read()
    world.router.unload_adapter("v").result(60)


def test_a_load_in_the_midst_of_which_its_replica_dies_is_anothers(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
):
    first = world.seats[0]
    reached: queue.SimpleQueue[Whole] = queue.SimpleQueue()
    for seat in world.seats:
        load = seat.engine.load_adapter

        def slow(*args: object, at: Whole = seat, load=load, **more: object) -> object:
            reached.put(at)
            return first.engine.warm().__class__() if reached.qsize() == 1 else load(*args, **more)

        monkeypatch.setattr(seat.engine, "load_adapter", slow)
    loading = world.controller.load(Load("v", path))
    wait_for(lambda: reached.qsize() == 1)
    dies = reached.get()
    reached.put(dies)
    dies.kill()
    assert loading.result(60).digest
    monkeypatch.undo()
    dies.start()
    world.router.place({seat.name: seat.address for seat in world.seats})
    wait_for(lambda: len(world.router.replicas) == 2)
    assert len(world.ask("v").read()) == 64
    world.router.unload_adapter("v").result(60)


def test_the_blocks_of_adapters_are_summed_by_the_services_own_numbers(world: World, path: str):
    number = world.router.load_adapter("own", path).result(60).uid
    for answer in [world.ask("own") for _ in range(4)]:
        answer.read()
    keys = {f"own@{number}"}
    wait_for(lambda: all(keys <= {record.name for record in seat.engine.records()} for seat in world.seats))
    owners = world.router.owners().result(20)
    there = [
        (seat.engine.owners().result(20), seat.engine.adapter(f"own@{number}").result(20).uid) for seat in world.seats
    ]
    assert owners.whole and owners.cells == () and owners.kv[number] > 0
    assert owners.kv[number] == sum(own.kv.get(uid, 0) for own, uid in there)
    world.router.unload_adapter("own").result(60)


def test_a_version_whose_files_are_gone_gets_a_second_home_until_they_are_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = _make.make_adapter(tmp_path / "lost", text_spec(), seed=6, r=4)
    world.controller.load(Load("lost", str(path))).result(60)
    key = world.controller.current("lost").key
    (holder,) = (seat for seat in world.seats if key in {record.name for record in seat.engine.records()})
    (other,) = (seat for seat in world.seats if seat is not holder)
    wait_for(lambda: world.controller.peers(world.controller.current("lost"), other.name))
    world.upkeep.look()
    assert key not in {record.name for record in other.engine.records()}, "its files are there"
    shutil.move(path, tmp_path / "away")
    with monkeypatch.context() as full:
        full.setattr(loading, "BOUND", 0.0)
        calls = world.controller.calls
        with pytest.raises(ResourceExhausted, match="hold adapters without files, .* and at most 0 may"):
            version = world.controller.current("lost")
            calls.hold(other.address, version, world.controller.peers(version, other.name), lost=True).result()
    expected = world.ask("lost").read()
    wait_for(lambda: world.upkeep.look() or tier(other, key) in ("HOST", "HBM"))
    assert other.fetcher.fetched  # for the second home, or for the request
    holder.kill()
    wait_for(lambda: len(world.router.replicas) == 1)
    assert world.ask("lost").read() == expected
    holder.start()
    world.router.place({seat.name: seat.address for seat in world.seats})
    wait_for(lambda: len(world.router.replicas) == 2)
    (copy,) = (record for record in other.engine.records() if record.name == key)
    _make.make_adapter(path, text_spec(), seed=7, r=4)  # another one's files
    look(other.engine)
    assert not copy.node.backed and not copy.stamp
    shutil.rmtree(path)
    shutil.move(tmp_path / "away", path)
    look(other.engine)
    assert copy.node.backed, "it may leave memory again"
    world.router.unload_adapter("lost").result(60)


def tier(seat: Whole, key: str) -> str:
    """Of a version at a replica; "DISK" also if it has not heard of it."""
    return next((info.tier for info in seat.engine.adapters().result(20) if info.name == key), "DISK")
