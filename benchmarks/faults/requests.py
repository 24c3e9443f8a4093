"""F8, F10, F11 and F13: cancels, deadlines, bursts and ids, at a running server."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.faults.client import ANSWER_S, Client, Figures, clean, in_parallel, prompt
from jlora.loadgen.server import exactly
from jlora.machine import resident_bytes
from jlora.serve.proto import jlora_pb2 as pb

WORKERS = 64
CONNECTIONS = 10  # of F11: one connection takes fewer calls
TENANTS = ("a", "b", "c", "d")  # of F11, in turn
WAIT_S = 60.0  # for all refusals of F11
MORE = 1.05  # requests over the room of F11: the queue is full, and stays so for a while
STEPS, CALLS, CALM_S = 100, 500, 20.0  # that F11 times while the queue is full, and the most seconds of the calls
PLACE_S = 1.0  # after which a call has found a place, and waits in it
IDS = 10  # requests of one round of F13


async def cancels(client: Client, count: int) -> Figures:
    """F8: cancels a stream at once, while it waits or is prefilled, or after some of its tokens."""
    rng = random.Random(8)

    async def one(number: int) -> str:
        long = 512 if number % 4 == 0 else 32  # a prefill of more than one step
        call = client.inference.GenerateStream(exactly(200, prompt(rng, long)), timeout=ANSWER_S)
        when = ("at once", "soon", "later", "decoding")[number % 4 if number % 8 else 3]
        if when == "decoding":
            for _ in range(rng.randint(1, 20)):
                await call.read()
        elif when != "at once":
            await asyncio.sleep(rng.random() * (0.02 if when == "soon" else 0.5))
        call.cancel()
        return when

    ends = await in_parallel(count, WORKERS, one)
    left = await client.left()
    return {"injected": count, **ends, **left, "holds": clean(left)}


async def deadlines(client: Client, count: int) -> Figures:
    """F10: from a millisecond to more than an answer takes; nothing works on after one."""
    rng = random.Random(10)

    async def one(number: int) -> str:
        seconds = (0.001, 0.01, 0.05, 0.2, 1.0)[number % 5]
        status, _ = await client.answer(exactly(100, prompt(rng, 256)), seconds)
        return status

    ends = await in_parallel(count, WORKERS, one)
    left = await client.left()
    return {
        "injected": count,
        **ends,
        **left,
        "holds": set(ends) <= {"OK", "DEADLINE_EXCEEDED"} and clean(left),
    }


@dataclass(frozen=True, slots=True)
class Full:
    """A server to fill: how many requests it holds, its process, and the adapters that requests ask for."""

    room: int
    pid: int
    names: Sequence[str]


async def burst(client: Client, count: int, full: Full) -> Figures:
    """F11: more long requests at once than the server takes; then `count` more, and all are cancelled.

    Adapters are drawn by Zipf's law, tenants in turn. Between the two, with the queue full, steps are timed, and the
    refusals of a client that asks for one thing at a time.
    """
    rng, late = random.Random(11), list[float]()
    weights = [1 / (i + 1) for i in range(len(full.names))]
    many = int(MORE * full.room)
    models = rng.choices(full.names, weights, k=many + count)
    before, callers = resident_bytes(full.pid), [Client(client.address) for _ in range(CONNECTIONS)]

    async def one(number: int) -> str:
        began = time.monotonic()
        asked = exactly(900, (5, 6, 7), model=models[number], tenant=TENANTS[number % len(TENANTS)])
        status, _ = await callers[number % CONNECTIONS].answer(asked)
        if status == "RESOURCE_EXHAUSTED":
            late.append(time.monotonic() - began)
        return status

    first, end = [asyncio.create_task(one(number)) for number in range(many)], time.monotonic() + ANSWER_S
    while (info := await client.info()).live_requests < 0.99 * full.room and time.monotonic() < end:
        await asyncio.sleep(0.1)
    queued, most = info.live_requests, resident_bytes(full.pid)
    meanwhile = await _while_full(client, count)
    second = [asyncio.create_task(one(many + number)) for number in range(count)]
    await asyncio.wait(second, timeout=WAIT_S)  # those that found a place wait in the queue
    for task in (*first, *second):
        task.cancel()
    ended = await asyncio.gather(*first, *second, return_exceptions=True)
    ends = Counter("cancelled" if isinstance(end, asyncio.CancelledError) else str(end) for end in ended)
    await asyncio.gather(*(caller.channel.close() for caller in callers))
    left = await client.left()
    served, _ = await client.answer(exactly(4, (5, 6, 7)))
    well = set(ends) <= {"OK", "RESOURCE_EXHAUSTED", "cancelled"} and served == "OK"
    return {
        "injected": many + count, **ends, **left, "queued_at_most": queued,
        "bytes_per_queued": (most - before) / max(queued, 1), **meanwhile,
        "refused_p50_s": sorted(late)[len(late) // 2] if late else 0.0,
        "holds": well and len(late) > 0.9 * count and clean(left, math.inf),  # thousands of cancels take a while
    }  # fmt: skip


async def _while_full(client: Client, count: int) -> Figures:
    """Milliseconds of a step, and the host's part; then of the refusals of one caller, a few of which find a place."""
    before, began = await client.info(), time.monotonic()
    while (after := await client.info()).steps < before.steps + STEPS and time.monotonic() < began + WAIT_S:
        await asyncio.sleep(0.1)
    steps, seconds = max(after.steps - before.steps, 1), time.monotonic() - began
    host = after.host_s_per_step * after.steps - before.host_s_per_step * before.steps
    caller, refused, end = Client(client.address), list[float](), time.monotonic() + CALM_S
    while len(refused) < min(count, CALLS) and time.monotonic() < end:
        began = time.monotonic()
        if (await caller.answer(exactly(1, (5, 6, 7)), PLACE_S))[0] == "RESOURCE_EXHAUSTED":
            refused.append(1e3 * (time.monotonic() - began))
    await caller.channel.close()
    return {
        "step_ms": 1e3 * seconds / steps, "host_step_ms": 1e3 * host / steps,
        "calm_refusals": len(refused), "calm_refusal_p99_ms": float(np.percentile(refused or [0.0], 99)),
    }  # fmt: skip


async def ids(client: Client, count: int) -> Figures:
    """F13: an id that is live, at its tenant's, at another tenant's, and once it has ended."""
    rng = random.Random(13)

    async def one(number: int) -> str:
        def named(tokens: int, tenant: str) -> pb.GenerateRequest:
            return exactly(tokens, prompt(rng), request_id=f"id{number}", tenant=tenant)

        holder = client.inference.GenerateStream(named(900, "a"), timeout=ANSWER_S)
        await holder.read()
        same = await asyncio.gather(*(client.answer(named(2, "a")) for _ in range(IDS - 3)))
        other, _ = await client.answer(named(2, "b"))
        holder.cancel()
        while (again := (await client.answer(named(2, "a")))[0]) == "ALREADY_EXISTS":
            await asyncio.sleep(0.005)  # the cancel is on its way
        right = {status for status, _ in same} == {"ALREADY_EXISTS"} and other == again == "OK"
        return "right" if right else f"same {Counter(s for s, _ in same)}, other {other}, again {again}"

    ends = await in_parallel(count // IDS, 8, one)
    left = await client.left()
    return {"injected": count, **ends, **left, "holds": set(ends) == {"right"} and clean(left)}
