"""A service in real processes: `jlora cluster` with its replicas, streams that run while something is done to it."""

from __future__ import annotations

import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil

from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests.cluster._wait import gone, until
from tests.serve import _server

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 120.0  # a guard against hanging
READY = re.compile(r"jlora.* ready grpc=(\S+)(?: http=(\S+))?")
SMALL: Mapping[str, Any] = {
    "cache.block_tokens": 8,
    "cache.hbm_blocks": 400,
    "engine.max_seqs": 8,
    "engine.max_step_tokens": 32,
    "engine.layers": "scan",
    "engine.one_row": "off",  # the same tokens to the last bit at every replica
    "engine.warmup": False,
}


@dataclass
class Service:
    """A running `jlora cluster`."""

    process: subprocess.Popen[str]
    channel: grpc.Channel
    address: str
    http: str = ""
    inference: rpc.InferenceStub = field(init=False)
    adapters: rpc.AdaptersStub = field(init=False)
    control: rpc.ControlStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = rpc.InferenceStub(self.channel)
        self.adapters = rpc.AdaptersStub(self.channel)
        self.control = rpc.ControlStub(self.channel)

    def replicas(self) -> dict[str, pb.ReplicaStatus]:
        """What the router knows of each replica."""
        info = self.control.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        return {replica.name: replica for replica in info.replicas}

    def up(self) -> set[str]:
        """The replicas that take requests."""
        return {name for name, replica in self.replicas().items() if replica.health == "up"}

    def pid(self, replica: str) -> int:
        """The replica's process, among those that this service has started."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if f"cluster.replica={replica}" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
            except psutil.NoSuchProcess:
                continue
        raise AssertionError(f"no process of {replica}")

    def busiest(self) -> str:
        """The replica with most requests of the router."""
        return max(self.replicas().values(), key=lambda replica: replica.sent).name


@contextmanager
def service(
    model: Path, adapters: Mapping[str, Path], *flags: str, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[Service]:
    """Starts `jlora cluster`, and stops it by SIGTERM unless a test has; no process is left then, ports are free.

    `credentials`: of its clients, where it serves over TLS.
    """
    settings = [f"{key}={value}" for key, value in SMALL.items()]
    command = [sys.executable, "-m", "jlora", "cluster", "--model", str(model), "--port", "0"]
    command += ["--set", *settings, "cluster.env.JAX_PLATFORMS=cpu", "cluster.resources.CPU=0.5"]
    command += [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    started: set[int] = {process.pid}
    assert process.stdout is not None
    try:
        ready = next((found for line in process.stdout if (found := READY.match(line))), None)
        assert ready, f"ended with code {process.wait()} before it was ready"
        started |= descendants(process.pid)
        secure = grpc.insecure_channel if credentials is None else partial(_secure, credentials)
        with secure(ready[1]) as channel:
            yield Service(process, channel, ready[1], ready[2] or "")
        started |= descendants(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_S) == 0
    finally:
        started |= descendants(process.pid)
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
    until(lambda: all(map(gone, started)), "every process of the service ends")
    for where in filter(None, ready.groups()):
        host, _, port = where.rpartition(":")
        socket.create_server((host, int(port))).close()  # it is free


def _secure(credentials: grpc.ChannelCredentials, address: str) -> grpc.Channel:
    return grpc.secure_channel(address, credentials)


def descendants(pid: int) -> set[int]:
    """The processes below a process; none if it has ended."""
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


class Stream:
    """A request that streams on a thread of its own."""

    def __init__(self, inference: rpc.InferenceStub, request: pb.GenerateRequest):
        self.tokens: list[list[int]] = [[] for _ in range(request.sampling.n or 1)]
        self.finish: list[str] = ["" for _ in self.tokens]
        self.error: grpc.RpcError | None = None
        self.longest_s = 0.0  # pause between two messages
        self._call = inference.GenerateStream(request, timeout=STOP_S)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            came = math.inf
            for delta in self._call:
                now = time.monotonic()
                self.longest_s, came = max(self.longest_s, now - came), now
                for out in delta.outputs:
                    self.tokens[out.index].extend(out.token_ids)
                    self.finish[out.index] = out.finish_reason or self.finish[out.index]
        except grpc.RpcError as e:
            self.error = e

    def cancel(self) -> None:
        """Its client leaves."""
        self._call.cancel()

    def has(self, count: int) -> bool:
        """Whether each completion has so many tokens."""
        return min(map(len, self.tokens)) >= count

    def result(self) -> list[list[int]]:
        """All tokens, once it has ended."""
        self._thread.join(STOP_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.tokens


def requests(adapters: Sequence[str], max_tokens: int) -> list[pb.GenerateRequest]:
    """Greedy and sampled ones, with penalties, and several completions, for base and adapters."""
    how: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 8, "n": 2},
        {"temperature": 1.0, "seed": 9, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ]
    made = []
    for i, fields in enumerate(how):
        for j, model in enumerate(("", *adapters)):
            request = _server.request(range(5 + i, 25 + 3 * j), max_tokens, **fields)
            request.model = model
            made.append(request)
    return made


def undisturbed(model: Path, adapters: Mapping[str, Path], asked: Sequence[pb.GenerateRequest]) -> list[Any]:
    """The tokens of a single engine."""
    with _server.serve(model, {**SMALL, **{f"adapters.paths.{n}": str(p) for n, p in adapters.items()}}) as served:
        return [Stream(served.inference, one).result() for one in asked]
