"""A Ray that runs already, with two nodes: a service joins it, its router is killed, then one of the nodes."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from jlora.cluster.ray_process import LOOPBACK, SETTINGS
from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.cluster import _processes
from tests.cluster._processes import ROOT, Service, Stream, service
from tests.cluster._wait import gone, until
from tests.cluster.test_ray import ray_starts

__all__ = ["ray_starts"]  # skips this module, too, where Ray does not start

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOKENS = 100
STARTS = 3  # a Ray that gets no processor for a while gives itself up
START_S = 150.0  # or it goes on without a node, and nobody says so


@dataclass
class Nodes:
    """The head's address, and the files that a service over it needs."""

    process: subprocess.Popen[str]
    address: str
    folder: Path
    model: Path

    def service(self) -> tuple[str, ...]:
        """Flags of `jlora cluster`: the same name and secret each time."""
        settings = [f"cluster.ray_token_file={self.folder / 'ray'}", f"serve.compile_cache={self.folder / 'programs'}"]
        flags = ["--fleet", "ray", "--replicas", "2", "--ray-address", self.address]
        return (*flags, "--token-file", str(self.folder / "jlora"), "--set", *settings)

    def replicas(self) -> dict[str, int]:
        """The replicas' processes on all nodes, by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "jlora.cluster.child" in words:
                found |= {word.partition("=")[2]: child.pid for word in words if word.startswith("cluster.replica=")}
        return found

    def kill_one(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    for name in ("ray", "jlora"):
        (folder / name).write_text(secrets.token_urlsafe(32))
    _make.make_model(folder / "model", max_len=512)
    patch = pytest.MonkeyPatch()
    for name, value in LOOPBACK.items():  # for the service, too: Ray would look for a head on the loopback elsewhere
        patch.setenv(name, value)
    env = {**os.environ, **SETTINGS, "RAY_AUTH_TOKEN_PATH": str(folder / "ray"), "HOME": str(folder)}
    with tempfile.TemporaryDirectory(prefix="jlora-", ignore_cleanup_errors=True) as short:  # Ray's sockets
        process, address = started([sys.executable, "-m", "tests.cluster._ray_cluster", short], env)
        try:
            yield Nodes(process, address, folder, folder / "model")
        finally:
            patch.undo()
            end(process)


def started(command: list[str], env: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    """A Ray that runs, and its address."""
    for _ in range(STARTS):
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        late = threading.Timer(START_S, lambda process=process: kill(family(process)))
        late.start()
        address = next((line.strip() for line in process.stdout if ":" in line), "")
        late.cancel()
        if address:
            return process, address
        end(process)
    raise AssertionError("Ray has not started")


def end(process: subprocess.Popen[str]) -> None:
    """Ends a Ray, with all that it has left."""
    left = family(process)
    process.communicate()  # it shuts Ray down
    kill(left)


def family(process: subprocess.Popen[str]) -> set[int]:
    return {process.pid} | _processes.descendants(process.pid)


def kill(pids: set[int]) -> None:
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def asked() -> list[pb.GenerateRequest]:
    return _processes.requests([], TOKENS)


def run(running: Service) -> list[Stream]:
    """Streams of all requests, of which half run."""
    streams = [Stream(running.inference, one) for one in asked()]
    until(lambda: sum(stream.has(3) for stream in streams) >= len(streams) // 2, "half of the streams run")
    return streams


def test_a_service_without_room_says_what_ray_has(nodes: Nodes):
    """It neither waits in silence nor leaves anything."""
    words = [sys.executable, "-m", "jlora", "cluster", "--model", str(nodes.model), "--port", "0", *nodes.service()]
    settings = ["cluster.name=large", "cluster.resources.CPU=64", "cluster.place_s=20"]
    ended = subprocess.run([*words, *settings], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert re.search(r"Ray finds no room for so many with CPU 64 each .* it has CPU 2 \(2 free\)", ended.stderr)
    assert not nodes.replicas()


def test_a_service_joins_survives_its_router_and_a_node_and_leaves_nothing(nodes: Nodes):
    with service(nodes.model, {}, *nodes.service()) as first:
        before = nodes.replicas()
        assert before.keys() == {"r0", "r1"}
        expected = [stream.result() for stream in run(first)]
        processes = _processes.descendants(first.process.pid)
        first.process.kill()
        until(lambda: all(map(gone, processes)), "the driver ends with its router")
    with service(nodes.model, {}, *nodes.service()) as second:
        assert nodes.replicas() == before, "the replicas have lived on"
        assert [stream.result() for stream in run(second)] == expected
        streams = run(second)
        nodes.kill_one()
        assert [stream.result() for stream in streams] == expected
        until(lambda: second.up() == {"r0", "r1"}, "both replicas serve, one of them on the other node now")
        assert len(set(before.items()) & set(nodes.replicas().items())) == 1
        assert [stream.result() for stream in run(second)] == expected
    assert not nodes.replicas()
