"""Whole router processes over the same replicas: one has the registry, others follow it, and each may die alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from jlora import config as configuration
from jlora.serve.access import keys
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from tests.cluster import _real
from tests.cluster._links import Loop, wait_for
from tests.cluster._processes import ROOT, STOP_S, Service, Stream
from tests.cluster._real import SECRET, Seat
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
        self.flags = ["--model", str(model), "--port", "0", "--fleet", "static", "--token-file", str(token)]
        self.flags += ["--addresses", ",".join(seat.address for seat in seats)]

    @property
    def running(self) -> int:
        return sum(seat.running for seat in self.seats)

    @contextmanager
    def router(self, *flags: str, key: str = "") -> Iterator[Service]:
        """A process, with an API key for its calls; it is killed at the end, unless a test has done so."""
        command = [sys.executable, "-m", "jlora", "cluster", *self.flags, *flags]
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


@pytest.fixture(scope="module")
def first(world: World) -> Iterator[Service]:
    """The controller."""
    with world.router() as made:
        yield made


@pytest.fixture
def second(world: World, first: Service) -> Iterator[Service]:
    """A router that follows it."""
    with world.router("--set", f"cluster.controller={first.address}") as made:
        yield made


def names(service: Service) -> list[str]:
    return [info.name for info in service.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=20).adapters]


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
