"""F8, F10, F11 and F13: cancels, deadlines, bursts and ids, at a running server."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from benchmarks.faults.client import ANSWER_S, Client, Figures, in_parallel, prompt
from jlora.loadgen.server import exactly
from jlora.machine import resident_bytes
from jlora.serve.proto import jlora_pb2 as pb

WORKERS = 64
CONNECTIONS = 10  # of F11: one connection takes fewer calls
WAIT_S = 60.0  # for all refusals of F11
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
    return {"injected": count, **ends, **left, "holds": not any(left.values())}


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
        "holds": set(ends) <= {"OK", "DEADLINE_EXCEEDED"} and not any(left.values()),
    }


async def burst(client: Client, count: int, room: int, pid: int) -> Figures:
    """F11: as many long requests at once as the server takes, its `room`; then `count` more, and all are cancelled."""
    late: list[float] = []
    before, callers = resident_bytes(pid), [Client(client.address) for _ in range(CONNECTIONS)]

    async def one(number: int) -> str:
        began = time.monotonic()
        status, _ = await callers[number % CONNECTIONS].answer(exactly(900, (5, 6, 7)))
        if status == "RESOURCE_EXHAUSTED":
            late.append(time.monotonic() - began)
        return status

    first, end = [asyncio.create_task(one(number)) for number in range(room)], time.monotonic() + ANSWER_S
    while (info := await client.info()).live_requests < 0.99 * room and time.monotonic() < end:
        await asyncio.sleep(0.1)
    queued, most = info.live_requests, resident_bytes(pid)
    second = [asyncio.create_task(one(number)) for number in range(count)]
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
        "injected": room + count, **ends, **left, "queued_at_most": queued,
        "bytes_per_queued": (most - before) / max(queued, 1),
        "refused_p50_s": sorted(late)[len(late) // 2] if late else 0.0,
        "holds": well and len(late) > 0.9 * count and not any(left.values()),
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
    return {"injected": count, **ends, **left, "holds": set(ends) == {"right"} and not any(left.values())}
