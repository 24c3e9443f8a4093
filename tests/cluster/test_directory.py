"""A router that follows a controller in another process: one table, also while the controller is away."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from jlora.cluster import directory_server, remote_directory
from jlora.cluster.demand import Load as Demanded
from jlora.cluster.directory import Member, peers
from jlora.cluster.directory_server import DirectoryServicer
from jlora.cluster.proto import directory_pb2 as proto
from jlora.cluster.proto import directory_pb2_grpc as rpc
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.routing.table import Table
from jlora.cluster.secret import Secret
from jlora.cluster.table import Change
from jlora.cluster.uses import Uses
from jlora.errors import AlreadyExists, NotFound, Unavailable
from jlora.model.spec import ModelSpec
from jlora.ports import OsThreads
from jlora.replica import Load
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.cluster import _port as port
from tests.cluster import _service
from tests.cluster._links import Loop
from tests.cluster._service import Service
from tests.serve._server import Served, wait_until

SECRET = Secret("the token of these tests")


def test_no_replica_lends_to_all_others():
    members = [Member(f"r{i}", f"h{i}", {"a@1": "HOST" if i % 2 else "HBM"}) for i in range(8)]
    members += [Member("new", "h8", {"a@1": "DISK"}), Member("other", "h9")]
    first = Counter(peers(members, "a@1", f"x{i}")[0] for i in range(80))
    assert len(first) == 8 and max(first.values()) < 25
    asked = peers(members, "a@1", "r3")
    assert sorted(asked) == [f"h{i}" for i in range(8) if i != 3] and asked == peers(members, "a@1", "r3")
    assert peers(members, "b@1", "r3") == ()


@pytest.fixture(scope="module")
def one(tiny_model: Path) -> Iterator[list[Served]]:
    with _service.replicas(tiny_model, 1) as served:
        yield served


@dataclass
class World:
    service: Service
    remote: RemoteDirectory
    port: int
    loop: Loop
    server: grpc.aio.Server = field(init=False)
    servicer: DirectoryServicer = field(init=False)
    places: Mapping[str, Mapping[str, float]] | None = None

    @contextmanager
    def controller_away(self) -> Iterator[None]:
        self.loop.run(self.server.stop(0))
        yield
        self.start()

    def start(self) -> None:
        async def start() -> None:
            self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            self.servicer = DirectoryServicer(self.service.controller, SECRET, lambda: self.places)
            rpc.add_DirectoryServicer_to_server(self.servicer, self.server)
            self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
            await self.server.start()

        self.loop.run(start())

    def follows(self) -> bool:
        """Whether the router has the controller's table, and the controller knows that."""
        controller = self.service.controller
        return port.follows(self.remote, controller.uses, controller.table.epoch)


@pytest.fixture
def world(one: list[Served], path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(remote_directory, "AGAIN_S", 0.05)
    loop = Loop()
    with _service.service(one) as service:
        service.controller.load(Load("fr", path)).result(60)
        made = World(service, None, 0, loop)  # pyright: ignore[reportArgumentType]
        made.start()
        made.remote = RemoteDirectory(f"127.0.0.1:{made.port}", "r2", Login(SECRET.token), OsThreads())
        made.remote.follow(service.members)
        made.remote.start()
        wait_until(made.follows)
        yield made
        made.remote.close()
        loop.run(made.server.stop(0))
    loop.close()


@pytest.fixture
def path(tmp_path: Path, tiny_spec: ModelSpec) -> str:
    return str(_make.make_adapter(tmp_path / "one", tiny_spec, seed=3, r=4))


def test_a_second_router_sees_what_the_controller_has(world: World):
    controller, remote = world.service.controller, world.remote
    version = controller.current("fr")
    assert remote.current("fr") == version and remote.peers(version, "") == controller.peers(version, "")
    (listed,), (info,) = remote.adapters().result(20), controller.adapters().result(20)
    assert (listed.name, listed.digest, listed.tier, listed.blocks) == (info.name, info.digest, info.tier, info.blocks)
    assert remote.adapter("fr").result(20) == controller.adapter("fr").result(20)
    with pytest.raises(NotFound, match="did you mean 'fr'"):
        remote.current("frr")


def test_what_a_client_asks_of_either_router_is_the_whole_services(world: World, path: str):
    remote = world.remote
    assert remote.load(Load("de", path)).result(60).uid == 2
    wait_until(lambda: [info.name for info in remote.adapters().result(20)] == ["de", "fr"])
    assert [info.name for info in remote.adapters("de", 1).result(20)] == ["fr"]
    with pytest.raises(AlreadyExists):
        remote.load(Load("de", path)).result(60)
    assert remote.pin("de", True).result(60).pinned
    wait_until(lambda: remote.current("de").pinned)
    remote.unload("de").result(60)
    wait_until(world.follows)
    with pytest.raises(NotFound):
        remote.current("de")
    with pytest.raises(NotFound):
        remote.unload("de").result(60)


def test_a_load_has_ended_once_the_other_router_answers_with_it(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
):
    seam, first = port.applies(world.remote), world.remote.current("fr")
    apply = getattr(*seam)

    def late(parts: object) -> None:
        time.sleep(0.3)
        apply(parts)

    monkeypatch.setattr(*seam, late)
    for load in (Load("de", path), Load("fr", path, replace=True)):
        uid = world.remote.load(load).result(60).uid
        assert world.remote.current(load.name).number == uid > first.number


def test_a_replaced_version_stays_as_long_as_another_routers_request_uses_it(world: World, path: str):
    old = world.remote.current("fr")
    world.remote.begin(old)
    world.service.controller.load(Load("fr", path, replace=True)).result(60)
    wait_until(world.follows)
    assert world.remote.current("fr").number > old.number
    world.service.upkeep.round()
    assert old.key in world.service.at(0)
    world.remote.end(old)
    wait_until(lambda: old.key not in world.service.at(0))


def test_while_the_controller_is_away_requests_go_on_with_the_last_table(world: World, path: str):
    remote = world.remote
    version = remote.current("fr")
    with world.controller_away():
        assert remote.current("fr") == version and len(remote.adapters().result(20)) == 1
        for call in (remote.load(Load("x", path)), remote.unload("fr"), remote.pin("fr", True)):
            with pytest.raises(Unavailable, match="no controller answers: ") as e:
                call.result(60)
            assert "127.0.0.1" not in str(e.value)
        with pytest.raises(Unavailable) as e:  # any key may ask this
            remote.adapter("fr").result(60)
        assert "127.0.0.1" not in str(e.value)
        world.service.controller.load(Load("meanwhile", path)).result(60)
    wait_until(world.follows)
    assert remote.current("meanwhile").key in world.service.at(0)


def test_a_load_at_a_new_controller_waits_for_the_routers_of_the_one_before(
    world: World, one: list[Served], path: str, monkeypatch: pytest.MonkeyPatch
):
    """It counts its tables from the beginning: what a router has of the earlier one says nothing."""
    hold, messages, remote = True, getattr(*port.tells()), world.remote
    old = remote.current("fr")
    remote.begin(old)
    for _ in range(3):
        world.service.controller.load(Load("fr", path, replace=True)).result(60)
    wait_until(world.follows)
    with _service.service(one) as other:
        with world.controller_away():
            wait_until(lambda: not port.listens(remote))
            world.service = other
            monkeypatch.setattr(*port.tells(), lambda self, change: iter(()) if hold else messages(self, change))
        wait_until(lambda: port.streams_of(other.controller.uses) == 1)
        remote.end(old)  # the last request of an old version, of which the router tells at once
        loaded = other.controller.load(Load("fr", path))
        assert not wait([loaded], 0.5).done, "the router has the version of before"
        hold = False
        world.service.controller.table.changed(["fr"])
        loaded.result(60)
        assert remote.current("fr") == other.controller.current("fr")


def test_a_controller_that_says_nothing_is_called_again_on_a_new_connection(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote_directory, "SILENT_S", 0.2)
    hold, messages = True, getattr(*port.tells())

    def say(self: DirectoryServicer, change: Change) -> Iterator[object]:
        return iter(()) if hold else messages(self, change)  # as if the process were stopped

    monkeypatch.setattr(*port.tells(), say)
    monkeypatch.setattr(directory_server, "BEAT_S", 1e6)
    before = port.connection(world.remote)
    world.service.controller.load(Load("de", path)).result(60)
    wait_until(lambda: port.connection(world.remote) is not before)
    hold = False
    wait_until(world.follows)
    assert world.remote.current("de").name == "de"


def test_a_controller_that_has_nothing_to_say_is_not_given_up(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory_server, "BEAT_S", 0.02)
    heard, before = [], port.connection(world.remote)
    seam = port.applies(world.remote)
    apply = getattr(*seam)
    monkeypatch.setattr(*seam, lambda parts: heard.append(parts) or apply(parts))
    world.service.controller.table.changed([])  # the beat of before may be a second away
    wait_until(lambda: len(heard) > 10)
    assert port.connection(world.remote) is before and world.follows()
    assert world.remote.current("fr") == world.service.controller.current("fr")


def test_a_table_that_cannot_be_read_ends_its_stream_and_not_the_following(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
):
    seam, failed = port.applies(world.remote), []
    apply = getattr(*seam)

    def fail_once(parts: object) -> None:
        if not failed:
            failed.append(parts)
            raise KeyError("a bug")
        apply(parts)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(*seam, fail_once)
    world.service.controller.load(Load("de", path)).result(60)
    wait_until(lambda: failed)
    wait_until(world.follows)
    assert world.remote.current("de").name == "de"


def test_a_router_that_goes_holds_no_version_any_more(world: World, path: str):
    old = world.remote.current("fr")
    world.remote.begin(old)
    world.service.controller.load(Load("fr", path, replace=True)).result(60)
    wait_until(world.follows)
    world.remote.close()
    wait_until(lambda: old.key not in world.service.at(0))


def test_after_a_router_has_stopped_nothing_waits_for_it(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_directory, "GOODBYE_S", 60.0)
    controller, load = world.service.controller, Demanded()
    controller.told = load.told
    with world.controller_away():
        controller.uses = Uses(hold_s=1e6)
    wait_until(world.follows)
    version = world.remote.current("fr")
    world.remote.begin(version)
    world.remote.asked(version, 20)
    world.remote.end(version, 5)
    begun = time.monotonic()
    world.remote.close()
    assert time.monotonic() - begun < 30, "it waits as long as its stream is open"
    assert (load.requests, load.ended) == (1, 1)
    controller.unload("fr").result(20)
    wait_until(lambda: version.key not in world.service.at(0))


def test_a_router_that_says_nothing_for_a_while_holds_no_version_any_more(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
):
    """It is stopped: its connection stays open, and it answers no message."""
    monkeypatch.setattr(directory_server, "SILENT_S", 2.0)
    said: queue.SimpleQueue[proto.Using | None] = queue.SimpleQueue()
    said.put(proto.Using(router="r3"))
    with grpc.insecure_channel(f"127.0.0.1:{world.port}") as channel:
        stream = rpc.DirectoryStub(channel).Watch(iter(said.get, None), metadata=SECRET.metadata)
        said.put(proto.Using(router="r3", epoch=next(stream).epoch))
        unloaded = world.service.controller.unload("fr")
        assert any(table.gone for table in stream) and not unloaded.done(), "it may use the adapter still"
        unloaded.result(20)
        list(stream)  # it ends
        said.put(None)


def test_a_controller_that_stops_waits_for_no_router_that_follows(world: World):
    said: queue.SimpleQueue[proto.Using | None] = queue.SimpleQueue()
    said.put(proto.Using(router="r3"))
    with grpc.insecure_channel(f"127.0.0.1:{world.port}") as channel:
        stream = rpc.DirectoryStub(channel).Watch(iter(said.get, None), metadata=SECRET.metadata)
        next(stream)

        async def end() -> None:
            world.servicer.end()

        world.loop.run(end())
        list(stream)  # it ends, without an error
        said.put(None)


def test_a_table_of_many_messages_is_whole_or_not_there(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jlora.cluster.directory_server.MOST", 2)
    row = world.service.controller.registry.get("fr")
    world.service.controller.add([
        replace(row, name=f"n{i}", uid=world.service.controller.registry.number()) for i in range(5)
    ])  # fmt: skip
    wait_until(world.follows)
    assert [info.name for info in world.remote.adapters().result(20)] == ["fr", *(f"n{i}" for i in range(5))]


def test_without_the_token_nobody_follows(world: World):
    with grpc.insecure_channel(f"127.0.0.1:{world.port}") as channel:
        stub = rpc.DirectoryStub(channel)
        for call in (
            lambda: list(stub.Watch(iter(()))),
            lambda: stub.Load(pb.LoadAdapterRequest(name="x", path="x")),
            lambda: stub.Get(pb.GetAdapterRequest(name="fr")),
        ):
            with pytest.raises(grpc.RpcError) as e:
                call()
            assert e.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_before_the_first_table_nothing_is_said_to_be_unknown(caplog: pytest.LogCaptureFixture):
    """The log says where the controller should be; clients are not told."""
    remote = RemoteDirectory("127.0.0.1:1", "r3", Login(), OsThreads())
    remote.start()
    wait_until(lambda: "the controller at 127.0.0.1:1 is away: failed to connect" in caplog.text)
    with pytest.raises(Unavailable, match="^the controller has not answered yet; try again$"):
        remote.current("fr")
    remote.close()


def test_the_demand_of_a_second_router_counts_and_it_routes_by_the_same_table(world: World):
    controller, remote, load, table = world.service.controller, world.remote, Demanded(), Table({})
    controller.told, remote.placed = load.told, table.place
    version = remote.current("fr")
    for router in (controller, remote, remote):
        router.begin(version)
        router.asked(version, 20)
        router.end(version, 5)
    wait_until(lambda: load.requests == load.ended == 3)
    assert (load.prompt, load.output, load.answer) == (60, 15, 5)
    assert 60 <= load.close(1.0)["fr"] <= 75, "its forecast is of the requests of both"
    for places in ({"fr@1": {"127.0.0.1:7": 0.25, "127.0.0.1:8": 0.75}}, {}):
        world.places = places
        wait_until(lambda places=places: table.parts == places)


def test_what_was_served_while_the_controller_is_away_counts_when_it_is_back(world: World, path: str):
    controller, remote, load = world.service.controller, world.remote, Demanded()
    controller.told = load.told
    old = remote.current("fr")
    for _ in range(2):
        remote.begin(old)
        remote.asked(old, 20)
    controller.load(Load("fr", path, replace=True)).result(60)
    wait_until(world.follows)
    with world.controller_away():
        wait_until(lambda: not port.listens(remote))
        remote.asked(old, 20)
        for _ in range(2):  # the end of the last one is told at once: the version is an old one
            remote.end(old, 5)
    wait_until(world.follows)
    wait_until(lambda: (load.requests, load.ended) == (3, 2))
    assert (load.prompt, load.output) == (60, 10)


def test_a_placement_of_many_adapters_comes_whole(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory_server, "MOST", 2)
    seen: list[Mapping[str, Mapping[str, float]]] = []
    world.remote.placed = seen.append
    world.places = {f"a{index}@1": {"127.0.0.1:7": 1.0} for index in range(5)}
    wait_until(lambda: bool(seen))
    assert seen == [world.places]


def test_a_process_without_a_controller_is_named_as_one(caplog: pytest.LogCaptureFixture):
    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        number = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, number

    loop = Loop()
    server, number = loop.run(start())
    remote = RemoteDirectory(f"127.0.0.1:{number}", "r3", Login(), OsThreads())
    remote.start()
    says = "it serves no adapters to further routers: cluster.controller must be the address of a `jlora cluster`"
    wait_until(lambda: says in caplog.text)
    with pytest.raises(Unavailable, match=says):
        remote.current("fr")
    with pytest.raises(Unavailable, match=says):
        remote.unload("fr").result(60)
    remote.close()
    loop.run(server.stop(0))
    loop.close()
