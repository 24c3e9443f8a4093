"""What a full queue costs: seconds from a handler's entry to its refusal, and refusals per second of one core.

The server is the product's, with every place taken and no engine behind it: a refusal never reaches one. Callers
are tasks of a second process. Each asks again as soon as it is refused, on one of a few connections. The server's
own processor time counts, all of its threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np

from benchmarks.clients import connection, second_process, status_of
from benchmarks.runner import Options
from jlora.config import Config
from jlora.loadgen.rounds import Sample, Side
from jlora.serve.backend import Backend
from jlora.serve.gate import BURST
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.server import GrpcServer

CALLERS = (100, 1000, BURST)
CONNECTIONS = 10
SECONDS = 10.0
TEXT = "How many users signed up in May? " * 32  # a kilobyte that nothing should read


class Clock(grpc.aio.ServerInterceptor):
    """Times every refusal, from before the server's own interceptor until the status is sent."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        began = time.perf_counter()
        handler: Any = await continuation(handler_call_details)
        if handler.stream_stream is None:  # not a refusal
            return handler

        async def timed(requests: Any, context: Any) -> None:
            try:
                await handler.stream_stream(requests, context)
            finally:
                self.seconds.append(time.perf_counter() - began)

        return grpc.stream_stream_rpc_method_handler(timed)


def run(options: Options) -> None:
    """Refuses that many callers for some seconds."""
    seconds, counts = (1.0, (10, 100)) if options.quick else (options.seconds or SECONDS, CALLERS)
    records = options.records("refusals-python", {"seconds": seconds, "connections": CONNECTIONS})
    sides = [
        Side(f"{callers} callers", lambda callers=callers: asyncio.run(_measure(callers, seconds)))
        for callers in counts
    ]
    records.measure("rounds", sides, options.budget(5))


async def _measure(callers: int, seconds: float) -> Sample:
    clock, config = Clock(), Config()
    replica: Any = SimpleNamespace(info=SimpleNamespace(config=config), heartbeat_age=lambda: 0.0)
    backend = Backend(replica=replica)
    server = GrpcServer(backend, config.serve, [clock])
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    loop = asyncio.get_running_loop()
    with (
        backend.gate.completions(backend.room, backend.room.most),
        second_process() as clients,
    ):
        await loop.run_in_executor(clients, _callers, address, 1, 0.0)  # not counted: imports
        clock.seconds.clear()
        cpu = time.process_time()
        ends = await loop.run_in_executor(clients, _callers, address, callers, seconds)
        cpu = time.process_time() - cpu
    await server.stop(0)
    p50, p99, longest = np.percentile(clock.seconds, [50, 99, 100])
    return {
        "callers": callers,
        "refused": ends.pop("RESOURCE_EXHAUSTED", 0),
        "otherwise": sum(ends.values()),
        "p50_s": p50,
        "p99_s": p99,
        "max_s": longest,
        "per_core_s": len(clock.seconds) / cpu,
        "loop_gap_s": backend.gaps.longest(),
    }


def _callers(address: str, callers: int, seconds: float) -> Counter[str]:
    """Runs in the second process: the statuses that the callers got."""
    return asyncio.run(_call(address, callers, seconds))


async def _call(address: str, callers: int, seconds: float) -> Counter[str]:
    ends: Counter[str] = Counter()
    channels = [connection(address) for _ in range(CONNECTIONS)]
    stubs = [rpc.InferenceStub(channel) for channel in channels]
    request, end = pb.GenerateRequest(text=TEXT), time.monotonic() + seconds

    async def caller(stub: rpc.InferenceStub) -> None:
        while True:
            ends[await status_of(stub.Generate(request, timeout=120))] += 1
            if time.monotonic() >= end:
                return

    await asyncio.gather(*(caller(stubs[i % CONNECTIONS]) for i in range(callers)))
    for channel in channels:
        await channel.close()
    return ends
