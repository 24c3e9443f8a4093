"""What a router costs: its processor time for each token, and how much later tokens arrive than from a replica.

Two replicas are processes with the product's link and fronts over a stand-in for the engine, which gives every
stream a token at each step. The router's process has the product's fronts with the demo model's tokenizer. Clients
run in a process of their own. A token's id is the time of its step, so its reader knows how late it is.

The floor is what gRPC itself takes: a server of `grpc.aio` that writes one message to each stream at each step, and
does nothing else.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import grpc

from benchmarks.clients import second_process
from benchmarks.micro.stand_in import StandIn, ask, token_now
from benchmarks.runner import Options
from jlora.cluster.attach import Terms
from jlora.cluster.link import LinkServicer
from jlora.cluster.proto import link_pb2_grpc
from jlora.cluster.router import Router
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.secret import Secret
from jlora.config import Config
from jlora.demo import assets
from jlora.loadgen.rounds import Sample, Side
from jlora.serve.backend import Backend
from jlora.serve.pauses import Pauses
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.server import GrpcServer
from jlora.serve.tokenizer import Tokenizer

STREAMS, SECONDS, REPLICAS = 64, 4.0, 2
Context = grpc.aio.ServicerContext


def replica(step_s: float, told: Any) -> None:
    """Runs in a process of its own until it is killed; tells its address."""

    async def serve() -> None:
        def add(backend: Backend, server: grpc.aio.Server) -> None:
            link_pb2_grpc.add_LinkServicer_to_server(LinkServicer(backend, "one", Secret()), server)

        stand_in: Any = StandIn(step_s, token_now)
        server = GrpcServer(Backend(replica=stand_in), Config().serve, services=[add])
        port = server.bind("127.0.0.1", 0)
        await server.start()
        told.put(f"127.0.0.1:{port}")
        await asyncio.Event().wait()

    asyncio.run(serve())


def run(options: Options) -> None:
    """Rounds of two steps, with and without coalescing. Times of arrival are measured without a tokenizer."""
    streams, seconds = (4, 0.5) if options.quick else (STREAMS, SECONDS)
    records = options.records("router-python", {"streams": streams, "seconds": seconds, "replicas": REPLICAS})
    cases = {f"{s * 1e3:g} ms, coalesced over {c * 1e3:g} ms": (s, c) for s in (0.005, 0.02) for c in (0.0, 0.02)}
    sides = [
        Side(name, lambda case=case: asyncio.run(_measure(*case, streams, seconds))) for name, case in cases.items()
    ]
    sides += [
        Side(f"{s * 1e3:g} ms, floor", lambda s=s: asyncio.run(_floor(s, streams, int(seconds / s))))
        for s in (0.005, 0.02)
    ]
    records.measure("rounds", sides, options.budget(5))


async def _measure(step_s: float, coalesce_s: float, streams: int, seconds: float) -> Sample:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    replicas = [context.Process(target=replica, args=(step_s, told), daemon=True) for _ in range(REPLICAS)]
    for process in replicas:
        process.start()
    try:
        loop = asyncio.get_running_loop()
        addresses = [await loop.run_in_executor(None, told.get, True, 60) for _ in replicas]
        return await _routed(addresses, coalesce_s, streams, int(seconds / step_s))
    finally:
        for process in replicas:
            process.kill()
            process.join()


async def _routed(addresses: Sequence[str], coalesce_s: float, streams: int, tokens: int) -> Sample:
    directory: Any = _NoAdapters()
    router = Router(directory, LeastLoaded(), Terms("router"))
    router.place({f"r{i}": address for i, address in enumerate(addresses)})
    await router.ready()
    while len(router.replicas) < len(addresses):
        await asyncio.sleep(0.01)
    backend = Backend(replica=router, tokenizer=Tokenizer.from_dir(assets.MODEL), pauses=Pauses.of(coalesce_s))
    server = GrpcServer(backend, Config().serve)
    front = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    loop, sample = asyncio.get_running_loop(), {}
    with second_process() as clients:
        await loop.run_in_executor(clients, ask, front, streams, 2)  # imports
        cpu = time.process_time()
        got = await loop.run_in_executor(clients, ask, front, streams, tokens)
        sample["cpu_s_per_token"] = (time.process_time() - cpu) / (streams * tokens)
        sample["clients_cpu_s_per_token"] = got["cpu_s"] / (streams * tokens)
        sample["deltas_per_token"] = got["deltas"] / (streams * tokens)
        backend.tokenizer = None
        for name, where in (("routed", [front]), ("direct", addresses)):
            shares = [streams // len(where)] * len(where)
            lates = [await loop.run_in_executor(clients, ask, w, n, tokens) for w, n in zip(where, shares, strict=True)]
            sample |= {f"{name}_{key}": max(late[key] for late in lates) for key in ("p50_s", "p99_s")}
    await server.stop(0)
    await router.aclose()
    return sample


async def _floor(step_s: float, streams: int, tokens: int) -> Sample:
    server = grpc.aio.server()
    rpc.add_InferenceServicer_to_server(_Bare(step_s), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    loop = asyncio.get_running_loop()
    with second_process() as clients:
        await loop.run_in_executor(clients, ask, address, streams, 2)
        cpu = time.process_time()
        got = await loop.run_in_executor(clients, ask, address, streams, tokens)
        used = time.process_time() - cpu
    await server.stop(0)
    return {"cpu_s_per_token": used / got["deltas"], "deltas_per_token": got["deltas"] / (streams * tokens)}


class _Bare(rpc.InferenceServicer):
    """Writes a token to all streams at each step."""

    def __init__(self, step_s: float):
        self._step_s = step_s
        self._step: asyncio.Future[None] | None = None

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        for count in range(request.stopping.max_tokens):
            await self._next()
            output = pb.Output(token_ids=[token_now(count)], text="a word")
            await context.write(pb.GenerateResponse(outputs=[output]))

    def _next(self) -> asyncio.Future[None]:
        """The next step, the same for all who wait now."""
        if self._step is None:
            loop = asyncio.get_running_loop()
            self._step = step = loop.create_future()
            loop.call_at(self._step_s * (loop.time() // self._step_s + 1), self._end, step)
        return self._step

    def _end(self, step: asyncio.Future[None]) -> None:
        self._step = None
        step.set_result(None)


class _NoAdapters:
    """A directory of no adapters."""

    def follow(self, members: Any) -> None:
        del members
