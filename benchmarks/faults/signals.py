"""F1 and F14: processes that are killed or told to end, over a paced device."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.failures import study as failures
from benchmarks.failures.replica import token_at
from benchmarks.faults.client import Client, Figures
from jlora.demo import assets
from jlora.loadgen.server import ServerProcess, exactly
from jlora.serve.proto import jlora_pb2 as pb

STREAMS = 4  # of a server that is told to end
GRACE_S = 0.3  # of those that are to be past their grace
KILL_EVERY_S = 12.0
RECOVERY_S = 5.0
WAYS = ("SIGTERM", "SIGINT", "two SIGTERM", "past grace")


async def drains(count: int) -> Figures:
    """F14: every way to end a server, in turn."""
    ends: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {"not_serving": [], "exit": []}
    for number in range(count):
        way = WAYS[number % len(WAYS)]
        ends[f"{way}: {await _drain(way, seconds)}"] += 1
    return {
        "injected": count, **ends, "not_serving_max_s": max(seconds["not_serving"]), "exit_max_s": max(seconds["exit"]),
        "holds": all(end.endswith(": as promised") for end in ends),
    }  # fmt: skip


async def _drain(way: str, seconds: dict[str, list[float]]) -> str:
    """How it went: "as promised", or what did not."""
    late = way in ("past grace", "two SIGTERM")
    flags = ["--model", str(assets.MODEL), "--set", f"serve.drain_s={GRACE_S if way == 'past grace' else 30}"]
    process = ServerProcess(
        [*flags, "cache.hbm_blocks=400", "serve.log_level=warning"], ("benchmarks.servers", "paced")
    )
    client = Client(process.address)
    asked = [exactly(900 if late else 60, range(10, 20), seed) for seed in range(STREAMS)]
    calls = [client.inference.GenerateStream(one) for one in asked]
    firsts = [await call.read() for call in calls]
    vocab = (await client.info()).vocab
    reading = [
        asyncio.create_task(_rest(call, first, one, vocab))
        for call, first, one in zip(calls, firsts, asked, strict=True)
    ]
    process.signal(signal.SIGINT if way == "SIGINT" else signal.SIGTERM)
    began = time.monotonic()
    refused = "" if await _not_serving(client) else "health stayed SERVING; "
    seconds["not_serving"].append(time.monotonic() - began)
    if way != "past grace" and (status := (await client.answer(asked[0]))[0]) != "UNAVAILABLE":
        refused += f"a new request ended with {status}; "
    if way == "two SIGTERM":
        process.signal(signal.SIGTERM)
        began = time.monotonic()
    ended = Counter(await asyncio.gather(*reading))
    code = await asyncio.to_thread(process.wait, 60)
    seconds["exit"].append(time.monotonic() - began)
    await client.channel.close()
    wanted = {"two SIGTERM": (143, None), "past grace": (0, "UNAVAILABLE")}.get(way, (0, "whole"))
    if wanted[1] is not None and set(ended) != {wanted[1]}:
        refused += f"streams ended {dict(ended)}; "
    if code != wanted[0]:
        refused += f"exit code {code}; "
    return refused or "as promised"


async def _rest(call: Any, first: pb.GenerateResponse, asked: pb.GenerateRequest, vocab: int) -> str:
    """How a stream ended: "whole" with the right tokens, "wrong", or a status."""
    tokens = list(first.outputs[0].token_ids)
    try:
        while delta := await call.read():  # what ends a stream is false
            tokens += [token for output in delta.outputs for token in output.token_ids]
    except grpc.aio.AioRpcError as e:
        return e.code().name
    begin = len(asked.token_ids.ids)
    right = [token_at(asked.sampling.seed, begin + i, vocab) for i in range(asked.stopping.max_tokens)]
    return "whole" if tokens == right else "wrong"


async def _not_serving(client: Client) -> bool:
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    for _ in range(1000):
        try:
            if (await health.Check(health_pb2.HealthCheckRequest())).status != 1:
                return True
        except grpc.aio.AioRpcError:  # it has closed its port already
            return True
        await asyncio.sleep(0.005)
    return False


async def kills(count: int) -> Figures:
    """F1: 64 streams over two replicas, one of which is killed again and again."""
    plan = failures.Plan(2, 32 if count > 2 else 4, count * KILL_EVERY_S, KILL_EVERY_S)
    with failures.start(plan) as process:
        rows = dict(await failures.play(process, plan))
    (total,) = rows["killed in all"]
    (clean,) = rows["clean in all"]
    well = not (total["wrong_tokens"] or total["errors"] or clean["wrong_tokens"] or clean["errors"])
    back = sorted(kill["back_s"] - kill["at_s"] for kill in rows["kill"])
    return {"injected": len(back), **total, "back_max_s": back[-1], "holds": well and total["gap_p99_s"] < RECOVERY_S}
