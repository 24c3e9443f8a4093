"""F9: clients that read slowly and then not at all, beside clients that read.

The device is paced, so what a stream takes longer than a step for each token is the server's and its clients' delay.
Streams run at once, first all of them read well, then some of them do not, in turn. Those that do not are of a second
process, and have connections of their own with small windows, so that the server soon has to wait for them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.clients import connection, second_process
from benchmarks.faults.client import ANSWER_S, Client, Figures, clean
from jlora.loadgen.server import ServerProcess, exactly, flags_of
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

PROMPT = 16
BLOCK = 16
EACH_S = 1.0  # between two messages that a slow reader reads
SHARED = 8  # slow readers of one connection
SMALL = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))  # a window that does not grow
SETTINGS = {
    "engine.max_step_tokens": 256, "engine.layers": "scan", "cache.block_tokens": BLOCK, "serve.log_level": "warning",
    "serve.coalesce_s": 0.05,  # or Python's part of thousands of messages a second would be longer than a step
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Streams, how many read slowly, tokens of each, rounds, and the most that others may take longer.

    Slow readers read for `slow_s` seconds, then nothing for `unread_s`. The server's patience is `stall_s`.
    """

    streams: int
    slow: int
    tokens: int
    rounds: int
    most: float
    slow_s: float
    unread_s: float
    stall_s: float


FULL, QUICK = Plan(256, 64, 900, 5, 1.1, 5.0, 30.0, 10.0), Plan(16, 4, 700, 1, 1.5, 2.0, 18.0, 3.0)


def delays(model: Path, plan: Plan) -> Figures:
    """What slow readers add to the time per token of the others, as medians over the rounds; how all streams ended."""
    blocks = plan.streams * (2 + (PROMPT + plan.tokens) // BLOCK)
    own = {"engine.max_seqs": plan.streams, "cache.hbm_blocks": blocks, "serve.stall_s": plan.stall_s}
    flags = ["--model", str(model), *flags_of({}, {**SETTINGS, **own})]
    with ServerProcess(flags, ("benchmarks.servers", "paced")) as server:
        return asyncio.run(_delays(server.address, plan))


@dataclass(frozen=True, slots=True)
class Read:
    """A stream that was read well: how it ended, seconds per token after the first message, and the longest pause."""

    status: str
    token_s: float = 0.0
    pause_s: float = 0.0


async def _delays(address: str, plan: Plan) -> Figures:
    ends: Counter[str] = Counter()
    ratios: dict[int, list[float]] = {50: [], 99: []}
    pauses = []
    for _ in range(plan.rounds):
        calm, disturbed = await _round(address, plan, False, ends), await _round(address, plan, True, ends)
        for q, found in ratios.items():
            found.append(_percentile(disturbed, q) / _percentile(calm, q))
        pauses.append(max(read.pause_s for read in disturbed))
    client = Client(address)
    left = await client.left()
    await client.channel.close()
    others = {f"others_p{q}": statistics.median(found) for q, found in ratios.items()}
    all_well = ends["others OK"] == 2 * plan.rounds * (plan.streams - plan.slow)
    # Whoever waits for a slow reader waits until the server has cut it.
    apart = others["others_p99"] <= plan.most and max(pauses) < plan.stall_s
    return {
        "injected": plan.rounds * plan.slow, **ends, **left, **others, "others_pause_max_s": max(pauses),
        "holds": all_well and apart and clean(left),
    }  # fmt: skip


async def _round(address: str, plan: Plan, slowly: bool, ends: Counter[str]) -> list[Read]:
    """The streams that are always read well."""
    loop = asyncio.get_running_loop()
    with second_process() as process:
        await loop.run_in_executor(process, _idle)  # not counted: imports
        reading = loop.run_in_executor(process, _read, address, plan, slowly)
        async with connection(address) as channel:
            stub = rpc.InferenceStub(channel)
            asked = (_request(i, plan.tokens) for i in range(plan.streams - plan.slow))
            found = await asyncio.gather(*(_timed(stub, one) for one in asked))
        ends.update(f"others {read.status}" for read in found)
        ends.update({f"{'slow' if slowly else 'well'} {status}": n for status, n in (await reading).items()})
    return found


def _percentile(found: Sequence[Read], q: int) -> float:
    return float(np.percentile([read.token_s for read in found if read.status == "OK"] or [np.inf], q))


async def _timed(stub: rpc.InferenceStub, asked: pb.GenerateRequest) -> Read:
    times, tokens = list[float](), 0
    try:
        async for delta in stub.GenerateStream(asked, timeout=ANSWER_S):
            tokens += sum(len(output.token_ids) for output in delta.outputs) if times else 0
            times.append(time.perf_counter())
    except grpc.aio.AioRpcError as e:
        return Read(e.code().name)
    return Read("OK", (times[-1] - times[0]) / max(tokens, 1), float(max(np.diff(times), default=0.0)))


def _idle() -> None:
    """Begins the second process."""


def _read(address: str, plan: Plan, slowly: bool) -> Counter[str]:
    """Runs in the second process: how the streams of those that may read slowly ended."""
    return asyncio.run(_readers(address, plan, slowly))


async def _readers(address: str, plan: Plan, slowly: bool) -> Counter[str]:
    channels = [connection(address, *SMALL) for _ in range(-(-plan.slow // SHARED))]
    stubs = [rpc.InferenceStub(channel) for channel in channels]
    calls = [
        stubs[i // SHARED].GenerateStream(_request(plan.streams + i, plan.tokens), timeout=ANSWER_S)
        for i in range(plan.slow)
    ]
    ends = Counter(await asyncio.gather(*(_reader(call, plan if slowly else None) for call in calls)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return ends


async def _reader(call: Any, slowly: Plan | None) -> str:
    end = time.monotonic() + (slowly.slow_s if slowly else 0.0)
    try:
        while slowly and time.monotonic() < end:
            await call.read()
            await asyncio.sleep(EACH_S)
        await asyncio.sleep(slowly.unread_s if slowly else 0.0)
        while await call.read():  # what ends a stream is false
            pass
    except grpc.aio.AioRpcError as e:
        return e.code().name
    return "OK"


def _request(number: int, tokens: int) -> pb.GenerateRequest:
    """Its id is in every message: a stream that nobody reads is soon more than what gRPC keeps of it, 64 KiB."""
    return exactly(tokens, range(3 + number, 3 + number + PROMPT), number, request_id=f"{number:0255}")
