"""The server's processor time per token behind 64 HTTP streams, against 64 gRPC streams.

The fronts are the product's. A stand-in for the engine hands every stream one token at each tick, so both fronts
send the same deltas, and the time is the fronts' own. Clients run in a second process and only read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks.clients import second_process
from benchmarks.micro import stand_in
from benchmarks.runner import Options
from jlora.config import Config
from jlora.demo import assets
from jlora.loadgen.rounds import Sample, Side
from jlora.serve.backend import Backend
from jlora.serve.http.server import HttpServer
from jlora.serve.server import GrpcServer
from jlora.serve.tokenizer import Tokenizer

STREAMS, TOKENS, TICK_S = 64, 200, 0.025
TEXT = "the quick world loves sweet music and every answer has a beginning and an end "


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
    text, config = list(tokenizer.encode(TEXT)), Config()
    replica: Any = stand_in.StandIn(TICK_S, lambda count: text[count % len(text)])
    backend = Backend(replica=replica, tokenizer=tokenizer)
    servers: dict[Ask, GrpcServer | HttpServer] = {
        _grpc: GrpcServer(backend, config.serve),
        _http: HttpServer(backend, config.serve),
    }
    ports = {front: server.bind("127.0.0.1", 0) for front, server in servers.items()}
    for server in servers.values():
        await server.start()
    loop, spent, deltas = asyncio.get_running_loop(), 0.0, 0
    with second_process() as clients:
        for count in (2, tokens):  # the first one is not counted: imports
            spent = time.process_time()
            deltas = await loop.run_in_executor(clients, ask, f"127.0.0.1:{ports[ask]}", streams, count)
            spent = time.process_time() - spent
    replica.close()
    await asyncio.gather(*(server.stop(0) for server in servers.values()))
    return {"cpu_s_per_token": spent / (streams * tokens), "deltas_per_token": deltas / (streams * tokens)}


def _grpc(address: str, streams: int, tokens: int) -> int:
    """Runs in the second process: the deltas that the streams got."""
    return int(stand_in.ask(address, streams, tokens)["deltas"])


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
