"""Whole router processes over the same replicas: one has the registry, others follow it, and each may die alone."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest

from jlora import config as configuration
from jlora.serve.access import keys
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from tests._disk import fill
from tests.cluster import _real
from tests.cluster._links import Loop, wait_for
from tests.cluster._processes import ROOT, STOP_S, Service, Stream
from tests.cluster._real import SECRET, Seat
from tests.cluster._relay import Relay, Way
from tests.cluster._wait import until
from tests.serve import _server
from tests.serve._server import refused, request

PROMPT = tuple(5 + i * 7 % 200 for i in range(40))
WHOLE = request(PROMPT, 200, temperature=0.9, seed=17)
OTHER = tuple(7 + i * 11 % 200 for i in range(64))
ENDLESS = request(OTHER, 4000)


class World:
    """Two engines with their links, and the flags of a router over them."""

    def __init__(self, seats: list[Seat], model: Path, token: Path):
        self.seats = seats
        self.adapter = str(model.parent / "adapters" / "upper")
        self.flags = ["--model", str(model), "--fleet", "static", "--token-file", str(token)]

    @property
    def running(self) -> int:
        return sum(seat.running for seat in self.seats)

    @contextmanager
    def router(self, *flags: str, key: str = "", at: str = "h:0", over: Sequence[Relay] = ()) -> Iterator[Service]:
        """A process with some address, over relays to the replicas, or none; it is killed at the end, if not before.

        `key`: an API key for its calls.
        """
        addresses = ",".join(one.address for one in over or self.seats)
        where = ["--port", at.rpartition(":")[2], "--addresses", addresses]
        command = [sys.executable, "-m", "jlora", "cluster", *self.flags, *where, *flags]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            ready = re.match(r"jlora cluster ready grpc=(\S+)", process.stdout.readline())
            assert ready, f"ended with code {process.wait()} before it was ready"
            with Login(key).channel(ready[1]) as channel:
                made = Service(process, channel, ready[1])
                until(lambda: len(made.up()) == len(self.seats), "the router has all replicas")
                yield made
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def world(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    token = tmp_path_factory.mktemp("secret") / "token"
    token.write_text(SECRET.token)
    config = configuration.load(None, {**_server.SMALL, "model.path": str(text_model)})
    with _real.engines([config] * 2) as engines, ExitStack() as opened:
        loop = Loop()
        opened.callback(loop.close)
        seats = [Seat(f"r{i}", engine, loop) for i, engine in enumerate(engines)]
        for seat in seats:
            seat.start()
            opened.callback(seat.kill)
        yield World(seats, text_model, token)


@pytest.fixture
def first(world: World) -> Iterator[Service]:
    """The controller. A test without it has another: one would take the other's adapters from the replicas."""
    with world.router() as made:
        yield made


@pytest.fixture
def second(world: World, first: Service) -> Iterator[Service]:
    """A router that follows it."""
    with world.router("--set", f"cluster.controller={first.address}") as made:
        yield made


def names(service: Service) -> list[str]:
    return [info.name for info in service.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=20).adapters]


@pytest.mark.slow
def test_a_load_and_an_unload_at_either_mean_both(world: World, first: Service, second: Service):
    for loads, other, name in ((first, second, "one"), (second, first, "two")):
        loads.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=world.adapter), timeout=STOP_S)
        until(lambda other=other, name=name: name in names(other), "the other one knows it")
        asked = request(PROMPT, 8)
        asked.model = name
        answers = [one.inference.Generate(asked, timeout=STOP_S).outputs[0].token_ids for one in (loads, other)]
        assert answers[0] == answers[1]
        other.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=STOP_S)
        until(lambda loads=loads, name=name: name not in names(loads), "it is gone at the first one, too")
        with refused(grpc.StatusCode.NOT_FOUND):
            loads.inference.Generate(asked, timeout=STOP_S)


@pytest.mark.slow
def test_a_router_dies_and_the_other_goes_on_then_a_new_one_takes_the_replicas(
    world: World, first: Service, second: Service
):
    expected = Stream(first.inference, WHOLE).result()
    dying = [Stream(second.inference, ENDLESS) for _ in range(2)]
    going_on = [Stream(first.inference, WHOLE) for _ in range(2)]
    until(lambda: all(stream.has(3) for stream in (*dying, *going_on)), "all run at once")
    second.process.kill()
    assert [stream.result() for stream in going_on] == [expected, expected]
    for stream in dying:
        with refused(grpc.StatusCode.UNAVAILABLE):
            stream.result()
    wait_for(lambda: not world.running)
    with world.router("--set", f"cluster.controller={first.address}") as third:
        assert Stream(third.inference, WHOLE).result() == expected
        retries = [third.inference.Generate.future(request(OTHER, 60), timeout=STOP_S) for _ in world.seats]
        assert max(retry.result().usage.cached_tokens for retry in retries) >= len(OTHER) // 2, "their KV has stayed"


def test_limits_hold_at_each_router_by_itself(world: World, tmp_path: Path):
    key, entry = keys.new("one", "admin", ["*"])
    (tmp_path / "keys.toml").write_text(f"{entry}\n[tenants.one]\nconcurrent = 1\n")
    flags = ("--keys", str(tmp_path / "keys.toml"))
    with world.router(*flags, key=key) as one, world.router(*flags, key=key) as other:
        streams = [Stream(router.inference, ENDLESS) for router in (one, other)]
        until(lambda: all(stream.has(3) for stream in streams), "each has one")
        for router in (one, other):
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
                router.inference.Generate(WHOLE, timeout=STOP_S)


def test_the_controller_dies_and_its_follower_serves_what_it_knows(world: World):
    with world.router() as controller, world.router("--set", f"cluster.controller={controller.address}") as follower:
        controller.adapters.LoadAdapter(pb.LoadAdapterRequest(name="kept", path=world.adapter), timeout=STOP_S)
        until(lambda: "kept" in names(follower), "the follower knows it")
        asked = request(PROMPT, 200)
        asked.model = "kept"
        streams = [Stream(one.inference, asked) for one in (controller, follower)]
        until(lambda: all(stream.has(3) for stream in streams), "both run")
        controller.process.kill()
        whole = streams[1].result()
        assert len(whole[0]) == 200 and Stream(follower.inference, asked).result() == whole
        with refused(grpc.StatusCode.UNAVAILABLE) as e:
            follower.adapters.LoadAdapter(pb.LoadAdapterRequest(name="late", path=world.adapter), timeout=STOP_S)
        assert "no controller answers" in str(e.value.details())


def test_tenants_share_the_replicas_whichever_router_they_ask(world: World, first: Service, second: Service):
    """A replica counts the tokens of a tenant over all routers: one that fills it by the first delays nobody else."""
    long = request(OTHER, 4000)
    long.tenant = "greedy"
    greedy = [Stream(first.inference, long) for _ in range(3 * 8)]  # both replicas' slots, and as many wait
    until(lambda: sum(stream.has(1) for stream in greedy) >= 2 * 8, "every slot is taken")
    short = request(PROMPT, 8)
    short.tenant = "modest"
    for _ in range(3):
        assert len(second.inference.Generate(short, timeout=STOP_S).outputs[0].token_ids) == 8
        wait_for(lambda: world.running == len(greedy))  # it has not waited for the end of one of them
    for stream in greedy:
        stream.cancel()
    wait_for(lambda: not world.running)


@pytest.mark.slow
def test_a_locked_registry_fails_loads_and_no_request(world: World, tmp_path: Path):
    """Another process holds its file."""
    file = tmp_path / "adapters.db"
    with world.router("--set", f"adapters.registry={file}") as one:
        one.adapters.LoadAdapter(pb.LoadAdapterRequest(name="kept", path=world.adapter), timeout=STOP_S)
        asked = request(PROMPT, 200)
        asked.model = "kept"
        expected = Stream(one.inference, asked).result()
        new = pb.LoadAdapterRequest(name="new", path=world.adapter)
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("begin immediate")
            stream = Stream(one.inference, asked)
            until(lambda: stream.has(3), "it runs")
            with refused(grpc.StatusCode.UNAVAILABLE) as e:
                one.adapters.LoadAdapter(new, timeout=STOP_S)
            assert "adapters.registry" in str(e.value.details())
            assert stream.result() == expected == Stream(one.inference, asked).result()
            other.execute("rollback")
        one.adapters.LoadAdapter(new, timeout=STOP_S)
        assert names(one) == ["kept", "new"]


def test_a_full_disk_under_the_registry_fails_loads_and_no_request(world: World, small_disk: Path):
    def load(name: str) -> None:
        one.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=world.adapter), timeout=STOP_S)

    with world.router("--set", f"adapters.registry={small_disk / 'adapters.db'}") as one:
        load("kept")
        asked = request(PROMPT, 200)
        asked.model = "kept"
        expected = Stream(one.inference, asked).result()
        filler = fill(small_disk)
        stream = Stream(one.inference, asked)
        until(lambda: stream.has(3), "it runs")
        loaded = ["kept"]
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "adapters.registry: cannot be written"):
            for i in range(50):  # SQLite's log may have pages left
                load(f"more{i:02}")
                loaded.append(f"more{i:02}")
        assert not stream.has(WHOLE.stopping.max_tokens), "it ran meanwhile"
        assert stream.result() == expected == Stream(one.inference, asked).result()
        assert names(one) == loaded
        filler.unlink()
        load("new")
        assert names(one) == [*loaded, "new"]


@pytest.mark.slow
def test_a_controller_that_was_killed_comes_back_with_its_adapters(world: World, tmp_path: Path):
    flags = ("--set", f"adapters.registry={tmp_path / 'adapters.db'}")
    asked = request(PROMPT, 40)
    asked.model = "kept"
    with ExitStack() as opened:
        first = opened.enter_context(world.router(*flags))
        follower = opened.enter_context(world.router("--set", f"cluster.controller={first.address}"))
        load = pb.LoadAdapterRequest(name="kept", path=world.adapter)
        known: pb.AdapterInfo = first.adapters.LoadAdapter(load, timeout=STOP_S)
        expected = Stream(first.inference, asked).result()
        first.process.kill()
        first.process.wait()
        again = opened.enter_context(world.router(*flags, at=first.address))
        (there,) = again.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=20).adapters
        assert (there.name, there.uid, there.digest) == ("kept", known.uid, known.digest)
        assert Stream(again.inference, asked).result() == expected

        def follows() -> bool:
            try:
                load = pb.LoadAdapterRequest(name="late", path=world.adapter, replace=True)
                return follower.adapters.LoadAdapter(load, timeout=STOP_S).uid > known.uid
            except grpc.RpcError as e:
                assert e.code() == grpc.StatusCode.UNAVAILABLE
                return False

        until(follows, "the follower has found it")
        assert Stream(follower.inference, asked).result() == expected and names(again) == ["kept", "late"]


def test_an_adapter_that_only_a_dead_replica_had_waits_for_its_files(world: World, tmp_path: Path):
    path = shutil.copytree(world.adapter, tmp_path / "own")
    asked = request(PROMPT, 40)
    asked.model = "own"
    with ExitStack() as opened:
        relays = [opened.enter_context(closing(Relay(seat.address))) for seat in world.seats]
        router = opened.enter_context(world.router(over=relays))
        info = router.adapters.LoadAdapter(pb.LoadAdapterRequest(name="own", path=str(path)), timeout=STOP_S)
        key = f"own@{info.uid}"
        expected = Stream(router.inference, asked).result()
        path.rename(tmp_path / "away")
        holders = [(seat, relay) for seat, relay in zip(world.seats, relays, strict=True) if seat.holds(key)]
        for seat, _ in holders[1:]:
            seat.engine.unload_adapter(key).result(20)
        holders[0][1].close()  # to the router it is dead
        until(lambda: len(router.up()) == 1, "it is lost")
        with refused(grpc.StatusCode.NOT_FOUND):
            Stream(router.inference, asked).result()
        (tmp_path / "away").rename(path)
        assert Stream(router.inference, asked).result() == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_link_that_passes_one_way_alone_is_given_up_and_taken_up_again(world: World, way: Way):
    """Nothing is closed: each side learns of it by the other one's silence."""
    with ExitStack() as opened:
        relays = [opened.enter_context(closing(Relay(seat.address))) for seat in world.seats]
        router = opened.enter_context(world.router(over=relays))
        expected = Stream(router.inference, WHOLE).result()
        streams = [Stream(router.inference, WHOLE) for _ in range(4)]
        left = [Stream(router.inference, ENDLESS) for _ in range(2)]
        until(lambda: all(stream.has(3) for stream in (*streams, *left)), "all run")
        (seat, relay) = next(pair for pair in zip(world.seats, relays, strict=True) if pair[0].running)
        both = router.up()
        relay.stop(way)
        for stream in left:  # the replica may not hear of it
            stream.cancel()
        assert [stream.result() for stream in streams] == [expected] * len(streams)
        until(lambda: router.up() < both, "the router has lost it")
        until(lambda: not seat.running, "the replica runs nothing for the router")
        assert Stream(router.inference, WHOLE).result() == expected
        relay.go_on()
        until(lambda: router.up() == both, "they have found each other")
        assert [Stream(router.inference, WHOLE).result() for _ in both] == [expected] * len(both)
