"""The server's processor time per token behind 64 HTTP streams, against 64 gRPC streams.

The fronts are the product's. A stand-in for the engine hands every stream one token at each tick, so both fronts
send the same deltas, and the time is the fronts' own. Clients run in a second process and only read.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc

from benchmarks.runner import Options
from jlora.config import Config
from jlora.demo import assets
from jlora.engine.futures import done
from jlora.loadgen.rounds import Sample, Side
from jlora.replica import Sink
from jlora.serve.backend import Backend
from jlora.serve.http.server import HttpServer
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.server import GrpcServer
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Request, Timing, TokenEvent, Usage
from jlora.validation import Limits

STREAMS, TOKENS, TICK_S = 64, 200, 0.025
TEXT = "the quick world loves sweet music and every answer has a beginning and an end "


class StandIn:
    """Plays a replica's events: every live stream gets a token at each tick, once all streams are there."""

    def __init__(self, tokens: list[int], streams: int):
        config, limits = Config(), Limits(vocab=1 << 20, max_len=1 << 20, capacity_tokens=1 << 20)
        self.info = SimpleNamespace(model="base", config=config, limits=limits, eos_ids=frozenset())
        self._tokens, self._streams = tokens, streams
        self._live: dict[int, tuple[Request, Sink]] = {}
        self._full = threading.Event()

    def check(self, request: Request) -> Future[None]:
        return done(None)

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        handle = len(self._live)
        self._live[handle] = (request, sink)
        if len(self._live) == self._streams:
            self._full.set()
        return done(handle)

    def abort(self, handle: int) -> Future[bool]:
        return done(False)

    def heartbeat_age(self) -> float:
        return 0.0

    def play(self, count: int) -> None:
        """Runs on a thread of its own: `count` tokens for every stream."""
        self._full.wait(60)
        live, began = list(self._live.items()), time.monotonic()
        for i in range(count):
            time.sleep(max(0.0, began + i * TICK_S - time.monotonic()))
            last: dict[str, Any] = {}
            if i == count - 1:
                last = {"finish_reason": "length", "usage": Usage(8, 0, count), "timing": Timing(ttft=TICK_S)}
            for handle, (request, sink) in live:
                sink([TokenEvent(request.id, 0, self._tokens[i % len(self._tokens)], handle=handle, **last)])
        self._live.clear()
        self._full.clear()


def run(options: Options) -> None:
    """Processor seconds per token of both fronts, in turn."""
    streams, tokens = (4, 20) if options.quick else (STREAMS, TOKENS)
    records = options.records("fronts-python", {"streams": streams, "tokens": tokens, "tick_s": TICK_S})
    sides = [
        Side(name, lambda ask=ask: asyncio.run(_measure(ask, streams, tokens)))
        for name, ask in (("grpc", _grpc), ("http", _http), ("control", _grpc))
    ]
    records.measure("rounds", sides, options.budget(5))


Ask = Callable[[str, int, int], int]


async def _measure(ask: Ask, streams: int, tokens: int) -> Sample:
    tokenizer = Tokenizer.from_dir(assets.MODEL)
    assert tokenizer is not None
    replica: Any = StandIn(list(tokenizer.encode(TEXT)), streams)
    config = Config()
    backend = Backend(replica=replica, tokenizer=tokenizer)
    servers: dict[Ask, GrpcServer | HttpServer] = {
        _grpc: GrpcServer(backend, config.serve),
        _http: HttpServer(backend, config.serve),
    }
    ports = {front: server.bind("127.0.0.1", 0) for front, server in servers.items()}
    for server in servers.values():
        await server.start()
    loop, spent = asyncio.get_running_loop(), 0.0
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        deltas = 0
        for count in (2, tokens):  # the first one is not counted: imports
            playing = loop.run_in_executor(None, replica.play, count)
            spent = time.process_time()
            deltas = await loop.run_in_executor(clients, ask, f"127.0.0.1:{ports[ask]}", streams, count)
            spent = time.process_time() - spent
            await playing
    await asyncio.gather(*(server.stop(0) for server in servers.values()))
    return {"cpu_s_per_token": spent / (streams * tokens), "deltas_per_token": deltas / (streams * tokens)}


def _grpc(address: str, streams: int, tokens: int) -> int:
    """Runs in the second process: the deltas that the streams got."""

    async def all_of_them() -> int:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = rpc.InferenceStub(channel)

            async def one() -> int:
                message = pb.GenerateRequest(text="Hello", stopping={"max_tokens": tokens})
                return len([delta async for delta in stub.GenerateStream(message)])

            return sum(await asyncio.gather(*(one() for _ in range(streams))))

    return asyncio.run(all_of_them())


def _http(address: str, streams: int, tokens: int) -> int:
    """The same over HTTP."""
    body = json.dumps({"prompt": "Hello", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"

    async def one(host: str, port: int) -> int:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"{head}{kind}\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        return answer.count(b"data: {")

    async def all_of_them() -> int:
        host, _, port = address.partition(":")
        return sum(await asyncio.gather(*(one(host, int(port)) for _ in range(streams))))

    return asyncio.run(all_of_them())
