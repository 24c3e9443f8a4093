"""A real server for the tests of this folder: engine, gRPC on a loop of its own, stubs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jlora import config as configuration
from jlora.engine.service import Service
from jlora.model.spec import ModelSpec
from jlora.serve import launcher
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.server import GrpcServer
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


@dataclass
class Served:
    """Stubs over one channel to a server in this process, and what is behind it."""

    backend: Backend
    channel: grpc.Channel
    address: str
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
    def service(self) -> Service:
        """The engine."""
        return self.backend.engine

    @property
    def spec(self) -> ModelSpec:
        """The base model's shape."""
        return self.service.spec

    def generate(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Unary."""
        return self.inference.Generate(request, timeout=60)

    def streamed(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """The deltas of a stream, put together."""
        whole = pb.GenerateResponse(outputs=[pb.Output(index=i) for i in range(request.sampling.n or 1)])
        for delta in self.inference.GenerateStream(request, timeout=60):
            for part in delta.outputs:
                out = whole.outputs[part.index]
                out.text += part.text
                out.token_ids.extend(part.token_ids)
                out.logprobs.extend(part.logprobs)
                out.finish_reason = part.finish_reason or out.finish_reason
            delta.ClearField("outputs")
            whole.MergeFrom(delta)
        return whole

    def status(self, service: str = "") -> str:
        """The health of a service: SERVING or NOT_SERVING."""
        reply = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

    def check_idle(self) -> None:
        """Nothing runs or waits, and no block belongs to a running request."""
        wait_until(lambda: not self.service.stats().running and not self.service.stats().waiting)
        wait_until(lambda: self.control.GetCacheState(pb.GetCacheStateRequest()).hbm.running_kv == 0)


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
def serve(model: Path, overrides: Mapping[str, Any]) -> Iterator[Served]:
    """Loads as the launcher does and serves on a free port; stops both at the end."""
    config = configuration.load(None, {**SMALL, "model.path": str(model), **overrides})
    service, tokenizer = launcher.load(config)
    try:
        with serving(Backend(service=service, tokenizer=tokenizer), config.serve.heartbeat_s) as served:
            yield served
    finally:
        service.stop()


@contextmanager
def serving(backend: Backend, heartbeat_s: float = 60.0, threads: int | None = None) -> Iterator[Served]:
    """A gRPC server over `backend` on a loop thread of its own; `threads`: for calls of the engine."""

    async def start() -> tuple[GrpcServer, int]:
        server = GrpcServer(backend, heartbeat_s)
        port = server.bind("127.0.0.1", 0)
        await server.start()
        return server, port

    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="serve"))
    thread = threading.Thread(target=loop.run_forever, name="grpc", daemon=True)
    thread.start()
    try:
        server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(backend, channel, f"127.0.0.1:{port}")
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


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
