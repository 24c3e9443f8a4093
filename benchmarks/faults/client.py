"""A client of the faults' server: requests of token ids, and what the server says of itself."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from benchmarks.clients import connection
from jlora.loadgen.checkpoints import TINY
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

ANSWER_S = 300.0  # a guard against hanging
# Steps until the last request is gone: two, and those while its end is on the wire. An answer takes 100 and more.
LATE_STEPS = 32
Figures = dict[str, Any]  # of one fault; "holds" says whether the promise held


class Client:
    """Stubs over one channel."""

    def __init__(self, address: str):
        self.channel = connection(address)
        self.address = address
        self.inference = rpc.InferenceStub(self.channel)
        self.adapters = rpc.AdaptersStub(self.channel)
        self.control = rpc.ControlStub(self.channel)

    async def info(self) -> pb.ServerInfo:
        """Counters."""
        return await self.control.GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_S)

    async def cache(self) -> pb.CacheState:
        """Blocks."""
        return await self.control.GetCacheState(pb.GetCacheStateRequest(), timeout=ANSWER_S)

    async def answer(self, asked: pb.GenerateRequest, timeout: float = ANSWER_S) -> tuple[str, tuple[int, ...]]:
        """The status, and the tokens of a whole answer."""
        try:
            reply = await self.inference.Generate(asked, timeout=timeout)
        except grpc.aio.AioRpcError as e:
            return e.code().name, ()
        return "OK", tuple(reply.outputs[0].token_ids)

    async def load(self, name: str, path: Path, replace: bool = False) -> tuple[str, str]:
        """The status of a load, and the digest of what was loaded."""
        asked = pb.LoadAdapterRequest(name=name, path=str(path), replace=replace)
        try:
            return "OK", (await self.adapters.LoadAdapter(asked, timeout=ANSWER_S)).digest
        except grpc.aio.AioRpcError as e:
            return e.code().name, ""

    async def unload(self, name: str) -> None:
        """Waits until it is gone."""
        await self.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=ANSWER_S)

    async def bytes_of(self, name: str) -> int:
        """Of an adapter on the device."""
        return (await self.adapters.GetAdapter(pb.GetAdapterRequest(name=name), timeout=ANSWER_S)).bytes

    async def left(self) -> Figures:
        """What requests leave behind when their clients have gone; see `clean`."""
        gone, end = await self.info(), time.monotonic() + 60
        while (await self.info()).live_requests and time.monotonic() < end:
            await asyncio.sleep(0.02)
        first, _ = await self.info(), await asyncio.sleep(0.5)
        last, cache = await self.info(), await self.cache()
        return {
            "requests_left": last.live_requests,
            "blocks_left": cache.hbm.running_kv,
            "zombie_tokens": last.generated_tokens - first.generated_tokens,
            "late_steps": first.steps - gone.steps,
        }


def clean(left: Figures, late_steps: float = LATE_STEPS) -> bool:
    """Whether nothing is left of them, no token was drawn for nobody, and soon no step worked for them."""
    return not any(value for key, value in left.items() if key != "late_steps") and left["late_steps"] <= late_steps


def prompt(rng: random.Random, most: int = 32) -> list[int]:
    """Random ids."""
    return [rng.randrange(3, TINY.vocab) for _ in range(rng.randint(4, most))]


async def in_parallel(count: int, workers: int, act: Callable[[int], Awaitable[str]]) -> Counter[str]:
    """Runs `act` for each number below `count`, so many at a time; how often each word came back."""
    ends: Counter[str] = Counter()
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            ends[await act(number)] += 1

    await asyncio.gather(*(work() for _ in range(workers)))
    return ends
