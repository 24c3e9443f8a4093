"""What hostile or merely busy clients do to a server. Runs in a process of its own: see `play`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from benchmarks.clients import NARROW, connection, status_of
from benchmarks.gaps.files import PINNED, library_name
from jlora.loadgen.server import exactly
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

MIB = 1 << 20
ANSWER_S = 120.0  # a guard against hanging
CONNECTIONS = 10  # of a burst
CLASHES, UNKNOWN, LISTS = 500, 200, 4  # calls of one round
READERS, STALL_S = 16, 2.0  # who do not read, and serve.stall_s
GENERATE, DETOKENIZE = "/jlora.v1.Inference/Generate", "/jlora.v1.Inference/Detokenize"


@dataclass(frozen=True, slots=True)
class Target:
    """The server, the hostile files, how many adapters it knows, for how long to attack, and the largest burst."""

    address: str
    folder: Path
    adapters: int
    seconds: float
    burst: int


@dataclass(frozen=True, slots=True)
class Attacker:
    """Stubs over some connections, and how calls ended."""

    target: Target
    channels: list[grpc.aio.Channel]
    ends: Counter[str]

    @property
    def inference(self) -> rpc.InferenceStub:
        """On the first connection."""
        return rpc.InferenceStub(self.channels[0])

    @property
    def adapters(self) -> rpc.AdaptersStub:
        """On the first connection."""
        return rpc.AdaptersStub(self.channels[0])

    async def ask(self, call: Awaitable[Any]) -> str:
        """Awaits a call; counts and returns its status."""
        status = await status_of(call)
        self.ends[status] += 1
        return status

    async def ask_all(self, calls: Iterable[Awaitable[Any]]) -> None:
        """At once."""
        await asyncio.gather(*map(self.ask, calls))


Attack = Callable[[Attacker], Awaitable[None]]  # one round of it


async def nothing(attacker: Attacker) -> None:
    """The idle server: only the streams run."""
    await asyncio.sleep(0.5)


def field(kind: type, name: str, payload: bytes) -> bytes:
    """A field of a message as it is sent, without the objects of millions of entries."""
    number = kind.DESCRIPTOR.fields_by_name[name].number  # type: ignore[attr-defined]
    size, left = bytearray(), len(payload)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes((number << 3 | 2, *size, left)) + payload


async def _sent(attacker: Attacker, method: str, body: bytes, packed: bool) -> None:
    """Two at once."""
    call = attacker.channels[0].unary_unary(method)
    how = grpc.Compression.Gzip if packed else grpc.Compression.NoCompression
    await attacker.ask_all(call(body, timeout=ANSWER_S, compression=how) for _ in range(2))


def sent(method: str, body: Callable[[], bytes], packed: bool = False) -> Attack:
    """A large message, again and again."""
    made: list[bytes] = []

    async def attack(attacker: Attacker) -> None:
        if not made:
            made.append(body())
        await _sent(attacker, method, made[0], packed)

    return attack


def text(size: int) -> bytes:
    """A request with so many bytes of text."""
    return pb.GenerateRequest(text=("How many users signed up in May? " * (size // 33 + 1))[:size]).SerializeToString()


def prompt_ids(count: int) -> bytes:
    """A request with so many ids of one byte."""
    return field(pb.GenerateRequest, "token_ids", field(pb.TokenIds, "ids", b"\x05" * count))


def detokenized(count: int) -> bytes:
    """Likewise."""
    return field(pb.DetokenizeRequest, "token_ids", b"\x05" * count)


def chat(count: int) -> bytes:
    """A request with so many messages that say nothing."""
    return field(pb.GenerateRequest, "chat", field(pb.Chat, "messages", b"") * count)


async def burst(attacker: Attacker, count: int) -> None:
    """Short requests, all at once."""
    asked = _short(2)
    stubs = [rpc.InferenceStub(channel) for channel in attacker.channels]
    count = min(count, attacker.target.burst)
    await attacker.ask_all(stubs[i % len(stubs)].Generate(asked, timeout=ANSWER_S) for i in range(count))


async def unknown(attacker: Attacker) -> None:
    """Names near those of adapters that are there."""
    names = [library_name(i % attacker.target.adapters) + "x" for i in range(UNKNOWN)]
    await attacker.ask_all(attacker.inference.Generate(_short(2, model=name), timeout=ANSWER_S) for name in names)


async def hostile(attacker: Attacker, kind: str) -> None:
    """Loads every adapter of a kind, and unloads what the server took."""
    for path in sorted((attacker.target.folder / kind).iterdir()):
        asked = pb.LoadAdapterRequest(name="hostile", path=str(path))
        if await attacker.ask(attacker.adapters.LoadAdapter(asked, timeout=ANSWER_S)) == "OK":
            await attacker.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="hostile"), timeout=ANSWER_S)


async def _listed(attacker: Attacker, view: Any) -> None:
    asked = pb.ListAdaptersRequest(view=view)
    while True:
        page = await attacker.adapters.ListAdapters(asked, timeout=ANSWER_S)
        if not page.next_page_token:
            return
        asked.page_token = page.next_page_token


async def lists(attacker: Attacker) -> None:
    """Every adapter in pages, for some clients at once."""
    views = (pb.ListAdaptersRequest.FULL, pb.ListAdaptersRequest.SUMMARY)
    await attacker.ask_all(_listed(attacker, views[i % 2]) for i in range(LISTS))


async def pins(attacker: Attacker) -> None:
    """Pins large adapters until the server refuses, then unpins them."""
    names = [library_name(i) for i in range(min(PINNED, attacker.target.adapters))]
    for name in names:
        asked = pb.PinAdapterRequest(name=name, pinned=True)
        if await attacker.ask(attacker.adapters.PinAdapter(asked, timeout=ANSWER_S)) != "OK":
            break
    for name in names:
        await attacker.adapters.PinAdapter(pb.PinAdapterRequest(name=name, pinned=False), timeout=ANSWER_S)


async def stalled(attacker: Attacker) -> None:
    """Streams of large messages that nobody reads until the server has had time to cut them."""
    asked = _short(900, logprobs=20)
    async with connection(attacker.target.address, *NARROW) as channel:
        calls = [rpc.InferenceStub(channel).GenerateStream(asked, timeout=ANSWER_S) for _ in range(READERS)]
        await asyncio.sleep(4 * STALL_S)
        await attacker.ask_all(_read(call) for call in calls)


async def _read(call: Any) -> None:
    async for _ in call:
        pass


async def clashes(attacker: Attacker) -> None:
    """Requests with one id at once."""
    asked = _short(200, request_id="the-same")
    await attacker.ask_all(attacker.inference.Generate(asked, timeout=ANSWER_S) for _ in range(CLASHES))


def _short(tokens: int, **fields: Any) -> pb.GenerateRequest:
    return exactly(tokens, range(5, 15), **fields)


ATTACKS: Mapping[str, Attack] = {
    "idle": nothing,
    "text of 1 MiB": sent(GENERATE, partial(text, MIB)),
    "text just below 4 MiB": sent(GENERATE, partial(text, 4 * MIB - 64)),
    "text of 64 MiB": sent(GENERATE, partial(text, 64 * MIB)),
    "text of 64 MiB, compressed": sent(GENERATE, partial(text, 64 * MIB), packed=True),
    "4 million ids": sent(GENERATE, partial(prompt_ids, 4_000_000)),
    "64 million ids": sent(GENERATE, partial(prompt_ids, 64_000_000)),
    "Detokenize of 4 million ids": sent(DETOKENIZE, partial(detokenized, 4_000_000)),
    "Detokenize of 40 million ids": sent(DETOKENIZE, partial(detokenized, 40_000_000)),
    "2 million empty messages": sent(GENERATE, partial(chat, 2_000_000)),
    "regular expressions": partial(hostile, kind="bombs"),
    "a header of a million entries": partial(hostile, kind="headers"),
    "8 million invocation tokens": partial(hostile, kind="invocations"),
    "odd shapes": partial(hostile, kind="shapes"),
    "lora_alpha of 1e29": partial(hostile, kind="scales"),
    "FIFOs for files": partial(hostile, kind="fifos"),
    "2,000 calls at once": partial(burst, count=2000),
    "10,000 calls at once": partial(burst, count=10_000),
    "unknown names": unknown,
    "ListAdapters": lists,
    "pins up to the bound": pins,
    "stalled readers": stalled,
    "one id for all": clashes,
    "idle again": nothing,
}


def play(name: str, target: Target) -> dict[str, int]:
    """Attacks for so long, at least once; how calls ended. Blocks: for a process of its own."""
    return dict(asyncio.run(_play(ATTACKS[name], target)))


async def _play(attack: Attack, target: Target) -> Counter[str]:
    end = time.monotonic() + target.seconds
    async with _attacker(target) as attacker:
        while True:
            await attack(attacker)
            if time.monotonic() >= end:
                return attacker.ends


@asynccontextmanager
async def _attacker(target: Target) -> AsyncIterator[Attacker]:
    large = ("grpc.max_receive_message_length", 64 * MIB)
    channels = [connection(target.address, large) for _ in range(CONNECTIONS)]
    try:
        yield Attacker(target, channels, Counter())
    finally:
        for channel in channels:
            await channel.close()
