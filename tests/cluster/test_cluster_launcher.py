"""The router's process: its ready line, its fronts, its end, and that it never loads jax."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jlora import config as configuration
from jlora.cluster import launcher
from jlora.cluster.proto import directory_pb2 as directory
from jlora.cluster.proto import directory_pb2_grpc as directory_rpc
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.router import Router
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.engine.futures import running
from jlora.errors import Unavailable
from jlora.ports import OsThreads
from jlora.serve import launcher as serving
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.types import Request, SamplingParams
from tests.cluster._links import FakeDirectory, FakeReplica, Loop, answer, request

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class FakeFleet:
    """Replicas of this process."""

    addresses: Mapping[str, str]
    stopped: threading.Event = field(default_factory=threading.Event)

    def start(self, watch: Callable[[Mapping[str, str]], None]) -> None:
        watch(self.addresses)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def replicas(loop: Loop) -> Iterator[list[FakeReplica]]:
    made = [FakeReplica("r0"), FakeReplica("r1")]
    for replica in made:
        loop.run(replica.serve())
    yield made
    for replica in made:
        loop.run(replica.kill())


@pytest.fixture
def signals() -> Iterator[None]:
    """Those of this process are its own again at the end."""
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


async def ready(capsys: pytest.CaptureFixture[str]) -> str:
    """The ready line, once it is printed."""
    while "ready" not in (line := capsys.readouterr().out):
        await asyncio.sleep(0.01)
    return line


def addresses(line: str) -> dict[str, str]:
    """Of the fronts, by kind, from the ready line."""
    return dict(part.split("=") for part in line.split()[3:])


def config_for(model: Path, **values: object) -> configuration.Config:
    return configuration.load(
        None, {"model.path": str(model), "serve.port": 0, "serve.http_port": 0, "serve.drain_s": 5.0, **values}
    )


def test_the_router_serves_both_fronts_until_a_signal(
    replicas: list[FakeReplica], signals: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fleet = FakeFleet({one.name: one.address for one in replicas})
    parts = launcher.Parts(fleet, FakeDirectory(), LeastLoaded(), OsThreads())
    told: list[str] = []

    async def client() -> None:
        told.append(await ready(capsys))
        where = addresses(told[0])
        async with grpc.aio.insecure_channel(where["grpc"]) as channel:
            asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
            asked.sampling.seed, asked.stopping.max_tokens = 5, 12
            got = await rpc.InferenceStub(channel).Generate(asked, timeout=20)
            assert list(got.outputs[0].token_ids) == answer(request(max_tokens=12, seed=5))
            info = await rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
            assert [one.name for one in info.replicas] == ["r0", "r1"]
        async with httpx.AsyncClient(base_url=f"http://{where['http']}") as http:
            body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            assert "jlora_blocks" in (await http.get("/metrics")).text
            while (await http.get("/health")).status_code != 200:  # it is looked at in periods
                await asyncio.sleep(0.01)

    async def both() -> int:
        config = config_for(tmp_path)
        served = asyncio.ensure_future(serving.serve(config, launcher.program(parts, config.cluster)))
        await client()
        os.kill(os.getpid(), signal.SIGTERM)
        return await served

    assert asyncio.run(both()) == 0
    line = r"jlora cluster ready grpc=127\.0\.0\.1:\d+ http=\S+ model=base replicas=2\n"
    assert re.fullmatch(line, told[0])


def test_without_a_replica_health_says_so_and_with_the_next_one_it_serves_again(
    loop: Loop,
    replicas: list[FakeReplica],
    signals: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    fleet = FakeFleet({one.name: one.address for one in replicas})
    parts = launcher.Parts(fleet, FakeDirectory(), LeastLoaded(), OsThreads())

    async def client() -> None:
        where = addresses(await ready(capsys))
        async with (
            grpc.aio.insecure_channel(where["grpc"]) as channel,
            httpx.AsyncClient(base_url=f"http://{where['http']}") as http,
        ):
            health: Any = health_pb2_grpc.HealthStub(channel)

            async def turns(status: int, code: int) -> None:
                asked = health_pb2.HealthCheckRequest(service="jlora.v1.Inference")
                while (await health.Check(asked)).status != status or (await http.get("/health")).status_code != code:
                    await asyncio.sleep(0.01)

            await turns(health_pb2.HealthCheckResponse.SERVING, 200)
            for replica in replicas:
                loop.run(replica.kill())
            await turns(health_pb2.HealthCheckResponse.NOT_SERVING, 503)
            loop.run(replicas[0].serve(int(replicas[0].address.rpartition(":")[2])))
            await turns(health_pb2.HealthCheckResponse.SERVING, 200)

    async def both() -> int:
        config = config_for(tmp_path, **{"serve.heartbeat_s": 0.5})
        served = asyncio.ensure_future(serving.serve(config, launcher.program(parts, config.cluster)))
        await asyncio.wait_for(client(), 60)
        os.kill(os.getpid(), signal.SIGTERM)
        return await served

    assert asyncio.run(both()) == 0


def test_a_replica_that_is_away_does_not_keep_a_router_from_its_start(
    replicas: list[FakeReplica], signals: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The time for the start is shorter than the wait for the other replicas."""
    fleet = FakeFleet({"r0": replicas[0].address, "r1": "127.0.0.1:1"})
    parts = launcher.Parts(fleet, FakeDirectory(), LeastLoaded(), OsThreads())

    async def both() -> int:
        config = config_for(tmp_path, **{"cluster.start_timeout_s": launcher.REST_S - 0.5})
        served = asyncio.ensure_future(serving.serve(config, launcher.program(parts, config.cluster)))
        assert "replicas=1\n" in await asyncio.wait_for(ready(capsys), 60)
        os.kill(os.getpid(), signal.SIGTERM)
        return await served

    assert asyncio.run(both()) == 0


def test_a_router_is_made_for_the_queues_of_all_its_replicas():
    parts = launcher.Parts(FakeFleet({}), FakeDirectory(), LeastLoaded(), OsThreads())
    assert launcher.program(parts, configuration.ClusterConfig(replicas=3)).replicas == 3
    named = configuration.ClusterConfig(fleet="static", addresses=("replicas.example:1",))  # any number of them
    assert launcher.program(parts, named).replicas == launcher.NAMED
    many = configuration.ClusterConfig(fleet="static", addresses=tuple(f"a{i}:1" for i in range(launcher.NAMED + 1)))
    assert launcher.program(parts, many).replicas == launcher.NAMED + 1


def test_a_service_without_replicas_says_so_and_stops_its_fleet(tmp_path: Path):
    fleet = FakeFleet({"r0": "127.0.0.1:1"})
    parts = launcher.Parts(fleet, FakeDirectory(), LeastLoaded(), OsThreads())
    config = config_for(tmp_path, **{"cluster.start_timeout_s": 0.2})
    with pytest.raises(Unavailable, match="cluster.start_timeout_s"):
        asyncio.run(serving.serve(config, launcher.program(parts, config.cluster)))
    assert launcher.launch(config, parts) == 1 and fleet.stopped.is_set()


class Controller(directory_rpc.DirectoryServicer):
    """Of a service without adapters."""

    async def Watch(self, request_iterator: Any, context: Any) -> AsyncIterator[directory.Table]:
        yield directory.Table(epoch=1, whole=True)
        async for _ in request_iterator:
            pass


def test_a_follower_serves_once_it_knows_the_adapters(
    replicas: list[FakeReplica], signals: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        front, back = (f"127.0.0.1:{listening.getsockname()[1]}" for listening in (one, other))
    remote = RemoteDirectory(back, "r", Login(), OsThreads())
    fleet = FakeFleet({one.name: one.address for one in replicas})
    parts = launcher.Parts(fleet, remote, LeastLoaded(), OsThreads(), known=remote.known)
    asked = health_pb2.HealthCheckRequest(service="jlora.v1.Inference")

    async def both() -> int:
        config = config_for(tmp_path, **{"serve.port": front.rpartition(":")[2], "cluster.controller": back})
        served = asyncio.ensure_future(serving.serve(config, launcher.program(parts, config.cluster)))
        while not all(one.epochs for one in replicas):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        async with grpc.aio.insecure_channel(front) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(asked)).status != health_pb2.HealthCheckResponse.SERVING
            assert "ready" not in capsys.readouterr().out
            server = grpc.aio.server()
            directory_rpc.add_DirectoryServicer_to_server(Controller(), server)
            server.add_insecure_port(back)
            await server.start()
            await ready(capsys)
            while (await health.Check(asked)).status != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        code = await served
        await server.stop(0)
        return code

    remote.start()
    assert asyncio.run(asyncio.wait_for(both(), 60)) == 0
    remote.close()


def test_a_follower_whose_controller_does_not_answer_says_so(replicas: list[FakeReplica], tmp_path: Path):
    fleet = FakeFleet({one.name: one.address for one in replicas})
    parts = launcher.Parts(fleet, FakeDirectory(), LeastLoaded(), OsThreads(), known=running())
    config = config_for(tmp_path, **{"cluster.start_timeout_s": 1.0})
    with pytest.raises(Unavailable, match="no controller has answered in cluster.start_timeout_s"):
        asyncio.run(serving.serve(config, launcher.program(parts, config.cluster)))


def test_followers_draw_seeds_of_their_own_and_a_lone_router_those_of_its_configuration(
    replicas: list[FakeReplica], tmp_path: Path
):
    async def seeds(controller: str) -> list[int]:
        fleet = FakeFleet({replicas[0].name: replicas[0].address})
        parts = launcher.Parts(fleet, FakeDirectory(), LeastLoaded(), OsThreads())
        config = config_for(tmp_path, **{"cluster.controller": controller})
        router, _ = await launcher.program(parts, config.cluster).load(config)
        first = len(replicas[0].started)
        for name in "ab":
            unseeded = Request(name, (1, 2, 3), SamplingParams(max_tokens=1))
            await asyncio.wrap_future(router.submit(unseeded, lambda events: None))
        assert isinstance(router, Router)
        await router.aclose()
        return [start.request.sampling.seed for start in replicas[0].started[first:]]

    alone, again, one, other = (asyncio.run(seeds(controller)) for controller in ("", "", "h:1", "h:1"))
    drawn = random.Random(0)
    assert alone == again == [drawn.getrandbits(63) for _ in alone]
    assert len({*alone, *one, *other}) == 6


def test_the_end_of_a_thread_of_its_parts_ends_the_process(
    replicas: list[FakeReplica],
    signals: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    threads, codes = OsThreads(), []
    fleet = FakeFleet({one.name: one.address for one in replicas})
    parts = launcher.Parts(fleet, FakeDirectory(), LeastLoaded(), threads)
    monkeypatch.setattr(serving, "_exit", codes.append)

    def fails() -> None:
        raise RuntimeError("of no use any more")

    async def both() -> int:
        config = config_for(tmp_path)
        served = asyncio.ensure_future(serving.serve(config, launcher.program(parts, config.cluster)))
        await ready(capsys)
        threads.start("jlora-upkeep", fails)
        return await served

    assert asyncio.run(both()) == serving.FAILED and codes == [serving.FAILED]
    assert "thread jlora-upkeep has failed" in caplog.text


def test_the_routers_process_does_not_load_jax():
    code = """
import sys
import jlora.cluster.service
loaded = sorted({"jax", "jaxlib", "flax", "ray"} & set(sys.modules))
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "tls,ca", [({}, ""), ({"tls_cert": "c", "tls_key": "k"}, "c"), ({"tls_client_ca": "a", "tls_cert": "c"}, "a")]
)
def test_what_a_router_shows_a_replica(tls: Mapping[str, str], ca: str):
    config = configuration.Config(serve=configuration.ServeConfig(**tls))  # pyright: ignore[reportArgumentType]
    login = launcher.login(config, "secret")
    assert (login.key, login.ca, login.cert) == ("secret", ca, tls.get("tls_cert", ""))
