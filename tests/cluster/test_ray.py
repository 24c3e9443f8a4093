"""Two replicas on a Ray of this machine: killed, stopped, drained; every token exactly once, as of one engine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from jlora.cluster.ray_process import LOOPBACK, SETTINGS
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests import _make
from tests.cluster import _processes
from tests.cluster._processes import Service, Stream, descendants, service
from tests.cluster._wait import until
from tests.serve import _server
from tests.serve._server import listening

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOKENS = 100
# A stream's longest pause: until the silence is noticed, and for its prompt at the other replica.
PAUSE_S = 10.0  # generous: idle machines measure 2.6 s (docs/results/pauses.md), busy ones run this
RAYS_PATIENCE_S = 66.0  # by default, Ray ends all of a node's processes 60 s after its head
RAY_ALONE = "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False); ray.shutdown()"


@pytest.fixture(scope="module", autouse=True)
def ray_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where Ray itself, without a line of jlora, does not start: some sandboxes forbid what it needs.

    With JLORA_RAY=required, as in continuous integration, that is a failure.
    """
    home = str(tmp_path_factory.mktemp("home"))  # where Ray writes a token
    alone = {**os.environ, **SETTINGS, **LOOPBACK, "HOME": home}
    try:
        subprocess.run([sys.executable, "-c", RAY_ALONE], env=alone, check=True, capture_output=True, timeout=180)
    except subprocess.SubprocessError as e:
        if os.environ.get("JLORA_RAY") == "required":
            pytest.fail(f"JLORA_RAY=required, and Ray does not start on this machine: {e}")
        pytest.skip(f"Ray does not start on this machine: {e}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cluster") / "model"
    _make.make_model(directory, max_len=512)
    return directory


@pytest.fixture(scope="module")
def adapters(tiny_adapters: dict[str, Path]) -> dict[str, Path]:
    return {name: tiny_adapters[name] for name in ("small", "large")}


@pytest.fixture(scope="module")
def asked(adapters: dict[str, Path]) -> list[pb.GenerateRequest]:
    return _processes.requests(list(adapters), TOKENS)


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, Path], asked: list[pb.GenerateRequest]) -> list[list[list[int]]]:
    return _processes.undisturbed(model, adapters, asked)


@pytest.fixture(scope="module")
def running(model: Path, adapters: dict[str, Path]) -> Iterator[Service]:
    cache = f"serve.compile_cache={Path(os.environ['XDG_CACHE_HOME'], 'jlora', 'xla')}"  # Ray's workers do not know it
    with service(model, adapters, "--fleet", "ray", "--replicas", "2", "--set", cache) as made:
        yield made


@pytest.fixture
def both(running: Service) -> Service:
    """The service with both replicas up."""
    until(lambda: running.up() == {"r0", "r1"}, "both replicas are up")
    return running


def disturbed(running: Service, asked: list[pb.GenerateRequest], disturb: Callable[[], None]) -> list[list[list[int]]]:
    """The tokens of all requests at once, where something happens once half of them run."""
    streams = [Stream(running.inference, one) for one in asked]
    until(lambda: sum(stream.has(3) for stream in streams) >= len(streams) // 2, "half of the streams run")
    disturb()
    tokens = [stream.result() for stream in streams]
    assert max(stream.longest_s for stream in streams) < PAUSE_S
    return tokens


def test_undisturbed(both: Service, asked: list[pb.GenerateRequest], expected: list[list[list[int]]]):
    assert disturbed(both, asked, lambda: None) == expected


def test_replicas_run_with_the_routers_priority(both: Service):
    """Ray's own choice, niceness 15, lets every other program of the machine go first."""
    nice = {name: psutil.Process(both.pid(name)).nice() for name in ("r0", "r1")}
    assert set(nice.values()) == {psutil.Process(both.process.pid).nice()}


def test_every_port_is_on_loopback(both: Service):
    """Also those of Ray, which runs any code that it is sent: a router that starts it starts it for itself."""
    ports = [one for pid in (both.process.pid, *descendants(both.process.pid)) for one in listening(pid)]
    assert both.address in ports and len(ports) >= 3
    assert [one for one in ports if not one.startswith(("127.", "::1:"))] == []


def test_an_adapter_whose_files_are_gone_comes_from_the_other_replica(
    both: Service, model: Path, adapters: dict[str, Path], tmp_path: Path
):
    asked = [_server.request(range(5 + i, 30), 400, temperature=1.0, seed=i) for i in range(12)]
    for one in asked:
        one.model = "lent"
    expected = _processes.undisturbed(model, {"lent": adapters["large"]}, asked)
    files = shutil.copytree(adapters["large"], tmp_path / "lent")
    both.adapters.LoadAdapter(pb.LoadAdapterRequest(name="lent", path=str(files)), timeout=60)
    shutil.rmtree(files)

    def known() -> bool:
        listed = both.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=60).adapters
        return any(one.name == "lent" and one.tier in (pb.AdapterInfo.HBM, pb.AdapterInfo.HOST) for one in listed)

    def wait() -> None:
        until(lambda: all(one.running for one in both.replicas().values()), "both replicas run with the adapter")

    until(known, "the router knows who has it")
    assert disturbed(both, asked, wait) == expected
    both.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="lent"), timeout=60)


def test_a_replica_is_killed(both: Service, asked: list[pb.GenerateRequest], expected: list[list[list[int]]]):
    victim = ""
    before = {name: both.pid(name) for name in ("r0", "r1")}

    def kill() -> None:
        nonlocal victim
        victim = both.busiest()
        os.kill(before[victim], signal.SIGKILL)

    assert disturbed(both, asked, kill) == expected
    until(lambda: both.up() == {"r0", "r1"}, f"{victim} serves again")
    assert both.pid(victim) != before[victim]


def test_a_replica_hangs_and_goes_on(both: Service, asked: list[pb.GenerateRequest], expected: list[list[list[int]]]):
    name = both.busiest()
    pid = both.pid(name)
    try:
        got = disturbed(both, asked, lambda: os.kill(pid, signal.SIGSTOP))
        assert name not in both.up()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert got == expected
    until(lambda: both.up() == {"r0", "r1"}, f"{name} is taken back")
    assert both.pid(name) == pid, "it was not started again"


def test_all_replicas_restart_in_turn(both: Service, asked: list[pb.GenerateRequest], expected: list[list[list[int]]]):
    def restart(name: str) -> None:
        pid = both.pid(name)
        os.kill(pid, signal.SIGTERM)
        until(lambda: pid not in pids(both), f"{name} ends")
        until(lambda: both.up() == {"r0", "r1"}, f"{name} serves again")

    for name in ("r0", "r1"):
        assert disturbed(both, asked, lambda name=name: restart(name)) == expected


def test_rays_head_is_killed(both: Service, asked: list[pb.GenerateRequest], expected: list[list[list[int]]]):
    """From here on Ray starts nothing again; what runs, serves, also when Ray's own patience would be over."""
    before = {name: both.pid(name) for name in ("r0", "r1")}
    (head,) = (p for p in psutil.Process(both.process.pid).children(recursive=True) if p.name() == "gcs_server")
    assert disturbed(both, asked, head.kill) == expected
    time.sleep(RAYS_PATIENCE_S)
    assert disturbed(both, asked, lambda: None) == expected
    until(lambda: both.up() == {"r0", "r1"}, "both serve")  # a busy machine may have let a heartbeat come late
    assert {name: both.pid(name) for name in before} == before


def pids(running: Service) -> set[int]:
    return _processes.descendants(running.process.pid)


def test_a_killed_router_leaves_nothing(both: Service, asked: list[pb.GenerateRequest]):
    """Last: its fixture finds that no process is left."""
    stream = Stream(both.inference, asked[0])
    until(lambda: stream.has(3), "the stream runs")
    left = pids(both)
    both.process.kill()
    with pytest.raises(grpc.RpcError) as e:
        stream.result()
    assert e.value.code() == grpc.StatusCode.UNAVAILABLE
    until(lambda: all(map(_processes.gone, left)), "Ray and its replicas end")
    with grpc.insecure_channel(both.address) as channel, pytest.raises(grpc.RpcError):
        rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
