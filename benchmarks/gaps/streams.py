"""What users see of a server: streams that run all the time, and the longest gap between two messages of one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from benchmarks.clients import connection
from jlora.loadgen.rounds import Sample
from jlora.loadgen.server import exactly
from jlora.machine import resident_bytes
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

WINDOW_S = 3  # what a forgetful server's stall monitor remembers (`benchmarks.servers`)
LOOK_S = 1.0  # between two looks at the monitor: less than what it remembers
AGAIN_S = 0.1  # until a stream that has failed begins anew
ANSWER_S = 300.0  # a guard against hanging
PRIORITY = 10  # a stream that begins anew overtakes the attack's requests


class Streams:
    """Streams to one server; leave them with `running`."""

    def __init__(self, address: str, count: int, tokens: int):
        self._address, self._count, self._tokens = address, count, tokens
        self._last: dict[int, float] = {}  # when a stream that is under way had its last message
        self._longest = 0.0
        self._messages = 0
        self._failed: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """They run: each has had a token, or was refused."""
        async with connection(self._address) as channel:
            stub = rpc.InferenceStub(channel)
            tasks = [asyncio.create_task(self._repeat(stub, i)) for i in range(self._count)]
            while len(self._last) < self._count:
                await asyncio.sleep(AGAIN_S)
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def taken(self) -> Sample:
        """What they have seen since the last call; a gap that lasts counts as far as it has come."""
        now = time.perf_counter()
        longest = max([self._longest, *(now - last for last in self._last.values())])
        seen = {"tokens_s": longest, "messages": self._messages, "failed": dict(self._failed)}
        self._longest, self._messages = 0.0, 0
        self._failed.clear()
        return seen

    async def _repeat(self, stub: rpc.InferenceStub, number: int) -> None:
        asked = exactly(self._tokens, range(10 + number, 20 + number), priority=PRIORITY)
        while True:
            try:
                async for _ in stub.GenerateStream(asked, timeout=ANSWER_S):
                    self._heard(number)
                self._last.pop(number, None)
            except grpc.aio.AioRpcError as e:
                self._failed[e.code().name] += 1
                self._last.setdefault(number, time.perf_counter())  # its user waits until it has a place
                await asyncio.sleep(AGAIN_S)

    def _heard(self, number: int) -> None:
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._last.get(number, now))
        self._last[number] = now
        self._messages += 1


class Monitor:
    """The server's own stall monitor, and its memory."""

    def __init__(self, address: str, pid: int):
        self._channel = connection(address)
        self._control = rpc.ControlStub(self._channel)
        self._pid = pid

    async def info(self) -> pb.ServerInfo:
        """Counters, as soon as the server answers."""
        while True:
            with suppress(grpc.aio.AioRpcError):
                return await self._control.GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_S)
            await asyncio.sleep(AGAIN_S)

    async def watch(self, until: asyncio.Future[Any]) -> Sample:
        """The longest gaps of loop and engine until the future is done, and the bytes by which the memory grew."""
        before = peak = resident_bytes(self._pid)
        loop_s = engine_s = 0.0
        while True:
            over = until.done()
            info, peak = await self.info(), max(peak, resident_bytes(self._pid))
            loop_s, engine_s = max(loop_s, info.longest_loop_gap_s), max(engine_s, info.longest_engine_gap_s)
            if over:
                return {"loop_s": loop_s, "engine_s": engine_s, "rss_grown": peak - before}
            await asyncio.wait((until,), timeout=LOOK_S)

    async def close(self) -> None:
        """Closes its connection."""
        await self._channel.close()


async def during(streams: Streams, monitor: Monitor, attack: asyncio.Future[Any]) -> Sample:
    """What streams and monitor see until the attack is over."""
    began = time.perf_counter()
    seen = await monitor.watch(attack)
    return {"seconds": time.perf_counter() - began, **seen, **streams.taken()}


async def calm(streams: Streams, seconds: float = WINDOW_S + LOOK_S) -> None:
    """Lets the monitor forget what was."""
    await asyncio.sleep(seconds)
    streams.taken()
