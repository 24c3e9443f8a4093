"""A stand-in for an engine, and its clients: fronts, links and routers are measured without one."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from jlora.config import Config
from jlora.engine.futures import done, running
from jlora.replica import ReplicaInfo, ReplicaState, Sink
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.types import CacheState, EngineStats, Request, TierState, Timing, TokenEvent, Usage
from jlora.validation import Limits

VOCAB = 1 << 20
TICK_S = 1e-5  # ids count time in steps of 10 µs, and come again after ten seconds
INFO = ReplicaInfo("base", "float32", Limits(VOCAB, 1 << 20, 1 << 20), (), 16, 4096, "cpu", ("cpu:0",), Config())
TIER = TierState(1, 1, 0, 0, 0)
STATE = ReplicaState(
    CacheState("jlora", TIER, TIER, *(0,) * 21),
    EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0),
    longest_gap_s=0.0,
)


def token_now(count: int) -> int:
    """The time, whichever token it is."""
    del count
    return int(time.monotonic() / TICK_S) % VOCAB


class StandIn:
    """A replica's events: at each step every live request gets `token(n)`, its n-th token."""

    info = INFO
    compiling = False
    programs_left = 0

    def __init__(self, step_s: float, token: Callable[[int], int]):
        self._step_s = step_s
        self._token = token
        self._live: dict[int, tuple[Request, Sink]] = {}
        self._counts: dict[int, int] = {}
        self._handles = 0
        self._sending = False
        self._asks: list[Future[ReplicaState]] = []  # while it sends
        self._closed = threading.Event()
        self.failure: Future[BaseException] = running()
        threading.Thread(target=self._play, daemon=True).start()

    def check(self, request: Request) -> Future[None]:
        return done(None)

    def submit(self, request: Request, sink: Sink) -> Future[int]:
        self._handles += 1
        self._live[self._handles] = (request, sink)
        return done(self._handles)

    def abort(self, handle: int) -> Future[bool]:
        return done(self._live.pop(handle, None) is not None)

    def state(self) -> Future[ReplicaState]:
        """As a replica's: those who ask while a step's events are sent get it behind them."""
        if not self._sending:
            return done(STATE)
        self._asks.append(running())
        return self._asks[-1]

    def adapters(self, after: str = "", most: int | None = None) -> Future[list[Any]]:
        return done([])

    def heartbeat_age(self) -> float:
        return 0.0

    def close(self) -> None:
        """Ends its thread."""
        self._closed.set()

    def _play(self) -> None:
        due = time.monotonic() + self._step_s
        while not self._closed.wait(max(0.0, due - time.monotonic())):
            due += self._step_s
            self._sending = True
            self._send()
            self._sending = False
            asks, self._asks = self._asks, []
            for asked in asks:
                asked.set_result(STATE)

    def _send(self) -> None:
        for handle, (request, sink) in list(self._live.items()):
            count = self._counts[handle] = self._counts.get(handle, 0) + 1
            last: dict[str, Any] = {}
            if count == request.sampling.max_tokens:
                last = {"finish_reason": "length", "usage": Usage(8, 0, count), "timing": Timing(ttft=0.01)}
                del self._live[handle]
            sink([TokenEvent(request.id, 0, self._token(count), handle=handle, **last)])


def ask(address: str, streams: int, tokens: int) -> dict[str, float]:
    """Runs in the clients' process: how late tokens are, in how many deltas they come, and the process's own time."""
    late: list[float] = []
    began = time.process_time()
    deltas = 0

    async def one(stub: rpc.InferenceStub) -> None:
        nonlocal deltas
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(8)), stopping={"max_tokens": tokens})
        async for delta in stub.GenerateStream(message):
            now, deltas = int(time.monotonic() / TICK_S), deltas + 1
            late.extend(((now - token) % VOCAB) * TICK_S for out in delta.outputs for token in out.token_ids)

    async def all_of_them() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = rpc.InferenceStub(channel)
            await asyncio.gather(*(one(stub) for _ in range(streams)))

    asyncio.run(all_of_them())
    cpu_s = time.process_time() - began
    cuts = statistics.quantiles(late, n=100)
    return {"deltas": float(deltas), "cpu_s": cpu_s, "p50_s": cuts[49], "p99_s": cuts[98]}
