"""A real server for the tests of this folder: engine, gRPC on a loop of its own, stubs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jlora import config as configuration
from jlora.config import ServeConfig
from jlora.engine.local import LocalReplica
from jlora.model import checkpoint
from jlora.model.spec import ModelSpec
from jlora.ports import System
from jlora.serve.backend import Backend
from jlora.serve.http.server import HttpServer
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.server import GrpcServer, Service
from jlora.serve.tokenizer import Tokenizer
from jlora.types import CacheState, EngineStats
from tests import _make
from tests.serve import _tokenizers

VOCAB = 400
END = 2  # </s>

# Long enough that a request to the end of the context is still running when a test looks at it.
MAX_LEN = 4096

SMALL: Mapping[str, Any] = {
    "cache.block_tokens": 16,
    "cache.hbm_blocks": 700,
    "engine.max_seqs": 8,
    "engine.max_step_tokens": 32,
    "engine.max_queue": 72,  # the most completions of a request, beside one for every slot
    "serve.compile_cache": "",
}

PATIENT = ServeConfig(heartbeat_s=60.0)


@dataclass
class Served:
    """Stubs over one channel to a server in this process, its HTTP address, and its replica."""

    backend: Backend
    channel: grpc.Channel
    address: str
    http: str
    inference: rpc.InferenceStub = field(init=False)
    adapters: rpc.AdaptersStub = field(init=False)
    control: rpc.ControlStub = field(init=False)
    health: health_pb2_grpc.HealthStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = rpc.InferenceStub(self.channel)
        self.adapters = rpc.AdaptersStub(self.channel)
        self.control = rpc.ControlStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    @property
    def replica(self) -> LocalReplica:
        """The engine behind it."""
        assert isinstance(self.backend.replica, LocalReplica)
        return self.backend.replica

    @property
    def spec(self) -> ModelSpec:
        """The base model's shape."""
        return checkpoint.read_spec(Path(self.replica.info.config.model.path), "auto", 0)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.replica.state().result(20).stats

    def cache(self) -> CacheState:
        """The engine's blocks, not through gRPC."""
        return self.replica.state().result(20).cache

    def check_integrity(self) -> None:
        """Fails if the pool or the tree is inconsistent."""
        self.replica.check_integrity().result(20)

    def generate(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Unary."""
        return self.inference.Generate(request, timeout=60)

    def streamed(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """The deltas of a stream, put together."""
        whole = pb.GenerateResponse(outputs=[pb.Output(index=i) for i in range(request.sampling.n or 1)])
        for delta in self.inference.GenerateStream(request, timeout=60):
            add(whole, delta)
        return whole

    def status(self, service: str = "") -> str:
        """The health of a service: SERVING or NOT_SERVING."""
        reply = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

    def check_idle(self) -> None:
        """Nothing runs or waits, no block belongs to a running request, and pool and tree are consistent."""
        wait_until(lambda: not self.stats().live_requests)
        wait_until(lambda: self.cache().hbm.running_kv == 0)
        self.check_integrity()


def add(whole: pb.GenerateResponse, delta: pb.GenerateResponse) -> None:
    """Puts what a delta brings to the answer so far."""
    for part in delta.outputs:
        out = whole.outputs[part.index]
        out.text += part.text
        out.token_ids.extend(part.token_ids)
        out.logprobs.extend(part.logprobs)
        out.finish_reason = part.finish_reason or out.finish_reason
    delta.ClearField("outputs")
    whole.MergeFrom(delta)


def wait_until(true: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Polls until `true()`; fails after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.005)


def write_text_model(directory: Path, **overrides: Any) -> ModelSpec:
    """A random Llama with a byte-level tokenizer and a chat template."""
    spec = _make.make_model(directory, vocab=VOCAB, **{"max_len": MAX_LEN, "eos_ids": (END,), **overrides})
    _tokenizers.write(directory, _tokenizers.byte_level(VOCAB))
    return spec


@contextmanager
def serve(
    model: Path, overrides: Mapping[str, Any], system: System | None = None, services: Sequence[Service] = ()
) -> Iterator[Served]:
    """Loads a model and serves it on a free port, with further gRPC services; stops both at the end."""
    config = configuration.load(None, {**SMALL, "model.path": str(model), **overrides})
    replica = LocalReplica.start(config, progress=False, system=system)
    try:
        backend = Backend(replica, Tokenizer.from_dir(model), stall_s=config.serve.stall_s)
        with serving(backend, config.serve, services=services) as served:
            yield served
    finally:
        replica.close()


@contextmanager
def serving(
    backend: Backend, config: ServeConfig = PATIENT, http_port: int = 0, services: Sequence[Service] = ()
) -> Iterator[Served]:
    """A gRPC and an HTTP server over `backend` on one loop thread of their own."""

    async def start() -> tuple[list[GrpcServer | HttpServer], list[int]]:
        servers = [GrpcServer(backend, config, services=services), HttpServer(backend, config)]
        ports = [server.bind("127.0.0.1", port) for server, port in zip(servers, (0, http_port), strict=True)]
        for server in servers:
            await server.start()
        return servers, ports

    async def stop(servers: list[GrpcServer | HttpServer]) -> None:
        await asyncio.gather(*(server.stop(0) for server in servers))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="grpc", daemon=True)
    thread.start()
    try:
        servers, (port, http) = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(backend, channel, f"127.0.0.1:{port}", f"http://127.0.0.1:{http}")
        asyncio.run_coroutine_threadsafe(stop(servers), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def listening(pid: int) -> list[str]:
    """ADDRESS:PORT of every port that a process listens on; none if it has ended."""
    try:
        found = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    listens = [one.laddr for one in found if one.status == psutil.CONN_LISTEN]
    return [f"{where.ip.removeprefix('::ffff:')}:{where.port}" for where in listens]  # gRPC's sockets take both stacks


def request(prompt: Any = (5, 6, 7), max_tokens: int | None = 8, **fields: Any) -> pb.GenerateRequest:
    """A greedy request that does not stop early; fields of sampling and stopping go by their names."""
    made = pb.GenerateRequest()
    if isinstance(prompt, str):
        made.text = prompt
    elif isinstance(prompt, pb.Chat):
        made.chat.CopyFrom(prompt)
    else:
        made.token_ids.ids.extend(prompt)
    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **fields}
    for name, value in values.items():
        if value is None:
            continue
        where = next(m for m in (made, made.sampling, made.stopping) if name in m.DESCRIPTOR.fields_by_name)
        if name == "logit_bias":
            made.sampling.logit_bias.update(value)
        elif isinstance(value, list | tuple):
            getattr(where, name).extend(value)
        else:
            setattr(where, name, value)
    return made


@contextmanager
def refused(code: grpc.StatusCode, *said: str) -> Iterator[pytest.ExceptionInfo[grpc.RpcError]]:
    """The call inside must end with this status, its message holding every one of `said`."""
    with pytest.raises(grpc.RpcError) as e:
        yield e
    assert e.value.code() == code, f"{e.value.code()}: {e.value.details()}"
    for part in said:
        assert part in e.value.details(), f"{part!r} is not in {e.value.details()!r}"
