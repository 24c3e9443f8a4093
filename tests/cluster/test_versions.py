"""Versions end to end: a router over real engines, with the real controller."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from jlora import config as configuration
from jlora.cluster.attach import Terms
from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.found import Found
from jlora.cluster.link import LinkServicer
from jlora.cluster.peer import Fetcher, PeerServicer
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.registry import Registry
from jlora.cluster.router import Router
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.upkeep import Upkeep
from jlora.cluster.uses import Uses
from jlora.errors import DataLoss
from jlora.ports import System
from jlora.replica import Load
from jlora.serve.backend import Backend
from jlora.serve.client import Login
from jlora.serve.server import GrpcServer
from jlora.types import Request, SamplingParams, TokenEvent
from jlora.validation import validate
from tests import _make
from tests.cluster._links import Loop, wait_for
from tests.cluster._real import SECRET, Seat, engines
from tests.cluster._service import SMALL, text_spec
from tests.serve._server import PATIENT

PROMPT = tuple(range(3, 12))
LONG = 1000  # tokens: the answer still runs when the test has done something else


class Whole(Seat):
    """A replica with all services of the cluster, as `jlora cluster replica` has them."""

    fetcher: Fetcher

    grpc: GrpcServer

    def kill(self) -> None:
        self.loop.run(self.grpc.stop(0))

    def start(self) -> None:
        self.backend = Backend(self.engine)
        self.fetcher = Fetcher(lambda: self.engine, Login(SECRET.token))

        def add(backend: Backend, server: grpc.aio.Server) -> None:
            servicer = LinkServicer(backend, self.name, SECRET, self.fetcher.adopt, self.engine.records)
            rpc.add_LinkServicer_to_server(servicer, server)
            rpc.add_PeerServicer_to_server(PeerServicer(lambda: self.engine, SECRET, self.fetcher.adopt), server)

        async def start() -> None:
            self.grpc = GrpcServer(self.backend, PATIENT, services=[add])
            self.address = f"127.0.0.1:{self.grpc.bind('127.0.0.1', 0)}"
            await self.grpc.start()

        self.loop.run(start())


@dataclass
class Answer:
    """A request under way."""

    events: queue.SimpleQueue[list[TokenEvent]] = field(default_factory=queue.SimpleQueue)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def read(self, least: int = 2 * LONG) -> list[int]:
        """The tokens so far, once there are `least` or all. Raises the error that ended it."""
        while not self.ended and len(self.tokens) < least:
            for event in self.events.get(timeout=60):
                if event.error is not None:
                    raise event.error
                self.tokens += [] if event.token_id is None else [event.token_id]
                self.ended = self.ended or event.finish_reason is not None
        return self.tokens


@dataclass
class World:
    router: Router
    controller: Controller
    upkeep: Upkeep
    seats: list[Whole]
    asked: int = 0

    def ask(self, adapter: str, tokens: int = 64) -> Answer:
        answer, self.asked = Answer(), self.asked + 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = validate(Request(f"q{self.asked}", PROMPT, sampling, adapter=adapter), self.router.info.limits)
        self.router.submit(request, answer.events.put).result(60)
        return answer

    def keys(self) -> set[str]:
        return {record.name for seat in self.seats for record in seat.engine.records()}


@pytest.fixture(scope="module")
def world(text_model: Path) -> Iterator[World]:
    config = configuration.load(None, {**SMALL, "model.path": str(text_model)})
    system = System()
    with engines([config] * 2) as made, ExitStack() as opened:
        loop = Loop()
        opened.callback(loop.close)
        seats = [Whole(f"r{i}", engine, loop) for i, engine in enumerate(made)]
        for seat in seats:
            seat.start()
            opened.callback(seat.kill)
        registry, found = Registry("", system.threads), Found(config, system)
        controller = Controller(registry, found, Calls(Login(SECRET.token)), system)
        controller.uses = Uses(hold_s=0)
        upkeep = Upkeep(controller, found, system)

        async def start() -> Router:
            return Router(controller, LeastLoaded(), Terms("router", Login(SECRET.token), 5.0), 0)

        router = loop.run(start())
        opened.callback(router.close)
        router.place({seat.name: seat.address for seat in seats})
        wait_for(lambda: len(router.replicas) == 2)
        yield World(router, controller, upkeep, seats)
        upkeep.close()
        controller.close()
        registry.close()
        for seat in seats:
            seat.fetcher.close()


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


def test_a_version_whose_files_are_gone_gets_a_second_home(world: World, tmp_path: Path):
    path = _make.make_adapter(tmp_path / "lost", text_spec(), seed=6, r=4)
    world.controller.load(Load("lost", str(path))).result(60)
    key = world.controller.current("lost").key
    (holder,) = (seat for seat in world.seats if key in {record.name for record in seat.engine.records()})
    (other,) = (seat for seat in world.seats if seat is not holder)
    wait_for(lambda: world.controller.peers(world.controller.current("lost"), other.name))
    world.upkeep.look()
    assert key not in {record.name for record in other.engine.records()}, "its files are there"
    shutil.rmtree(path)
    expected = world.ask("lost").read()
    wait_for(lambda: world.upkeep.look() or tier(other, key) in ("HOST", "HBM"))
    assert other.fetcher.fetched == 1
    holder.kill()
    wait_for(lambda: len(world.router.replicas) == 1)
    assert world.ask("lost").read() == expected
    holder.start()
    world.router.place({seat.name: seat.address for seat in world.seats})
    wait_for(lambda: len(world.router.replicas) == 2)


def tier(seat: Whole, key: str) -> str:
    """Of a version at a replica; "DISK" also if it has not heard of it."""
    return next((info.tier for info in seat.engine.adapters().result(20) if info.name == key), "DISK")
