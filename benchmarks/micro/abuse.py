"""What hostile connections cost a good client and the server's memory (C25 of docs/security.md).

The server is a process of the product with the built-in model. Attackers are tasks of a second process, which send
bytes on raw sockets. A good client asks for four tokens ten times a second, whatever became of its calls before, on
one connection that was there before; others try to connect during the attack. The goal is a p99 below twice that of
the calm, and less than 200 MB of additional memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import numpy as np

from benchmarks.clients import connection, second_process, status_of
from benchmarks.runner import Options
from jlora.demo import assets
from jlora.loadgen.rounds import Sample, Side
from jlora.loadgen.server import ServerProcess, exactly, flags_of
from jlora.machine import resident_bytes
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

CONNECTIONS, SECONDS = 10_000, 60.0
SPARE = 500  # descriptors of the attackers that are no connections
GAP_S = 0.1  # between the beginnings of two calls of the good client
ANSWER_S = 180.0  # longer than the server keeps a call that no handler takes
AT_ONCE = 200  # connections that are being opened
RESETTERS = 8  # connections that reset their calls
BATCH = 64  # calls that are begun and reset before the attacker waits for the socket
SETTINGS = {"engine.max_seqs": 4, "engine.max_step_tokens": 64, "engine.layers": "scan"}

# HTTP/2 by hand: the preface with empty settings and their acknowledgement, and a call of Generate.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"
PATH = b"/jlora.v1.Inference/Generate"
HEADERS = b"".join((
    b"\x83\x86",  # :method POST, :scheme http
    b"\x04", bytes([len(PATH)]), PATH,
    b"\x01\x09localhost",
    b"\x0f\x10\x10application/grpc",
    b"\x00\x02te\x08trailers",
))  # fmt: skip

Attack = Callable[[str, float, int], Coroutine[Any, Any, Counter[str]]]


async def silent(address: str, seconds: float, count: int) -> Counter[str]:
    """Connections that say nothing."""
    return await _held(address, seconds, count, b"")


async def idle(address: str, seconds: float, count: int) -> Counter[str]:
    """Connections that speak HTTP/2 and ask nothing."""
    return await _held(address, seconds, count, HELLO)


async def _held(address: str, seconds: float, count: int, hello: bytes) -> Counter[str]:
    host, port = address.rsplit(":", 1)
    ends, end, room = Counter[str](), time.monotonic() + seconds, asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        try:
            async with room:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(hello)
            ends["opened"] += 1
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + end - time.monotonic()):
                while await reader.read(4096):
                    pass
            ends["closed by the server"] += 1
        except TimeoutError:
            ends["held"] += 1
        except OSError:
            ends["closed by the server"] += 1
        else:
            writer.close()

    await asyncio.gather(*(one() for _ in range(count)))
    return ends


async def resets(address: str, seconds: float, count: int) -> Counter[str]:
    """Calls that are reset as soon as they have begun, as many as the sockets take. `count` is not used."""
    del count
    host, port = address.rsplit(":", 1)
    ends, end = Counter[str](), time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                ends["opened"] += 1
                writer.write(HELLO)
                reading = asyncio.create_task(_drop(reader))
                call = 1
                while time.monotonic() < end and not reading.done():
                    writer.write(b"".join(map(begun_and_reset, range(call, call + 2 * BATCH, 2))))
                    await writer.drain()
                    await asyncio.sleep(0)
                    call += 2 * BATCH
                    ends["resets"] += BATCH
                reading.cancel()
                writer.close()

    await asyncio.gather(*(one() for _ in range(RESETTERS)))
    return ends


def begun_and_reset(call: int) -> bytes:
    """A call of Generate by its number, which is odd, and its reset."""
    head = len(HEADERS).to_bytes(3) + b"\1\4" + call.to_bytes(4) + HEADERS
    return head + b"\0\0\4\3\0" + call.to_bytes(4) + b"\0\0\0\x08"


async def _drop(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


ATTACKS: dict[str, Attack] = {"silent": silent, "idle": idle, "resets": resets}


def run(options: Options) -> None:
    """Each attack against a server of its own; with as many connections as the attackers' descriptors allow."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = CONNECTIONS if most == resource.RLIM_INFINITY else min(CONNECTIONS, most - SPARE)
    seconds, count = (2.0, 50) if options.quick else (options.seconds or SECONDS, room)
    records = options.records("abuse-python", {"seconds": seconds, "connections": count})
    for name in ["resets"] if options.quick else ATTACKS:
        side = Side(name, lambda name=name: _measured(name, seconds, count))
        records.measure(name, [side], options.budget(1, quick=1))


def _measured(name: str, seconds: float, count: int) -> Sample:
    with ServerProcess(["--model", str(assets.MODEL), *flags_of({}, SETTINGS)]) as server:
        return asyncio.run(_measure(server, name, seconds, count))


async def _measure(server: ServerProcess, name: str, seconds: float, count: int) -> Sample:
    async with grpc.aio.insecure_channel(server.address) as channel:
        good = Good(rpc.InferenceStub(channel), server.pid)
        await good.ask(asyncio.ensure_future(asyncio.sleep(2.0)))  # not counted: programs that compile
        calm, before = await good.ask(asyncio.ensure_future(asyncio.sleep(seconds))), resident_bytes(server.pid)
        good.ends.clear()
        good.peak = 0
        with second_process() as attackers:
            loop = asyncio.get_running_loop()
            attack = loop.run_in_executor(attackers, _attack, name, server.address, seconds, count)
            attacked, others = await asyncio.gather(good.ask(attack), _others(server.address, attack))
        done = await attack
    quantiles = {
        f"{phase}_{q}_s": float(np.percentile(times or [0.0], p))
        for phase, times in (("calm", calm), ("attack", attacked))
        for q, p in (("p50", 50), ("p99", 99))
    }
    grown = {"rss_before": before, "rss_grown": good.peak - before}
    return {**quantiles, **grown, "calls": dict(good.ends), "others": others, "attack": dict(done)}


def _attack(name: str, address: str, seconds: float, count: int) -> Counter[str]:
    """Runs in the second process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return asyncio.run(ATTACKS[name](address, seconds, count))


class Good:
    """The good client: how its calls have ended, and the most memory of the server meanwhile."""

    def __init__(self, stub: rpc.InferenceStub, pid: int):
        self.ends: Counter[str] = Counter()
        self.peak = 0
        self._stub = stub
        self._pid = pid

    async def ask(self, until: asyncio.Future[Any]) -> list[float]:
        """Seconds of each call that began before `until` was done."""
        calls: list[asyncio.Task[float]] = []
        while not until.done():
            calls.append(asyncio.create_task(self._call()))
            self.peak = max(self.peak, resident_bytes(self._pid))
            await asyncio.sleep(GAP_S)
        times = await asyncio.gather(*calls)
        self.peak = max(self.peak, resident_bytes(self._pid))
        return times

    async def _call(self) -> float:
        began = time.perf_counter()
        self.ends[await status_of(self._stub.Generate(exactly(4, range(5, 20)), timeout=ANSWER_S))] += 1
        return time.perf_counter() - began


async def _others(address: str, attack: asyncio.Future[Counter[str]]) -> dict[str, int]:
    """How calls on new connections ended while the attack lasted: one each second."""
    ends: Counter[str] = Counter()
    while not attack.done():
        async with connection(address) as channel:
            ends[await status_of(rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=5))] += 1
        await asyncio.sleep(1.0)
    return dict(ends)
