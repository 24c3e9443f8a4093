"""Messages between the processes of a service, as a replica, a controller and a follower of one receive them.

An input is a list of messages, each behind its length in two bytes. What is no message is left out: gRPC ends such a
stream before a handler sees it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from jlora.adapters.registry import Record
from jlora.cache.tree import AdapterNode
from jlora.cluster import wire
from jlora.cluster.controller import Controller
from jlora.cluster.directory import Version
from jlora.cluster.directory_server import DirectoryServicer
from jlora.cluster.link import LinkServicer
from jlora.cluster.peer import PeerServicer
from jlora.cluster.proto import directory_pb2 as directory_proto
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.registry import Registry
from jlora.cluster.remote_directory import RemoteDirectory
from jlora.cluster.secret import Secret
from jlora.engine.futures import done
from jlora.errors import AlreadyExists, NotFound
from jlora.ports import OsThreads, System
from jlora.replica import Load
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import Done, Request, SamplingParams
from tests.cluster import _port as port
from tests.fuzz._adapters import reader
from tests.fuzz._double import Aborted, Context, Double, adapter_info
from tests.fuzz._engine import Target, status
from tests.fuzz._fronts import run
from tests.fuzz._structure import Change, of_list, of_message

M = TypeVar("M", bound=Message)

OPEN = Secret()


def joined(messages: Iterable[Message | bytes]) -> bytes:
    """Messages as one input."""
    parts = [one if isinstance(one, bytes) else one.SerializeToString() for one in messages]
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts if len(part) < 1 << 16)


def parts(data: bytes) -> list[bytes]:
    """The messages of an input as bytes."""
    found, at = [], 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        found.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return found


def split(data: bytes, kind: type[M]) -> list[M]:
    """The messages of an input."""
    found = []
    for part in parts(data):
        try:
            found.append(kind.FromString(part))
        except DecodeError:
            pass
    return found


def changing(kind: type[Message], skip: int = 0) -> Change:
    """Changes messages of that kind behind the first bytes of an input."""

    def change(data: bytes, draw: random.Random) -> bytes:
        changed = of_list(parts(data[skip:]), lambda part, draw: of_message(part, kind, draw), draw)
        return data[:skip] + joined(changed)

    return change


class _Slow(Context):
    """A router whose messages come one by one: answers go out between them."""

    async def read(self) -> Any:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().read()


def link_replica() -> Target:
    """A router's messages, as a replica reads them."""

    async def attach(data: bytes) -> str:
        replica = Double(patient=True)
        servicer = LinkServicer(Backend(replica), "one", OPEN, _adopt)
        context: Any = _Slow(split(data, link.ToReplica))
        try:
            await servicer.Attach(None, context)
        except Aborted:
            pass
        assert not replica.live and not port.streams(servicer)
        failed = [failure for message in context.written for failure in message.failures]
        if any(not failure.kind for failure in failed):
            return "INTERNAL"
        return "OK" if context.code is None else context.code.name

    return Target(
        "link-replica",
        lambda data: run(attach(data)),
        list(_starts()),
        (b"sql@1", b"router", b"base"),
        changing(link.ToReplica),
    )


async def _adopt(version: link.Version) -> None:
    if version.key != "sql@1":
        raise NotFound("its files are gone")
    raise AlreadyExists("it is known")


def _starts() -> Iterator[bytes]:
    hello = link.ToReplica(hello=link.Hello(router="r", epoch=1, protocol=wire.PROTOCOL))
    plain = Request("a", (1, 2, 3), SamplingParams(max_tokens=5, seed=1))
    sampling = SamplingParams(
        n=2, max_tokens=9, logprobs=1, prompt_logprobs=1, stop_token_ids=(3,), logit_bias={3: 1.0}
    )
    adapted = Request("b", (1, 2), sampling, "sql@1", done=(Done((4, 5)), Done((), True)), tenant="t", cache_salt="s")
    version = Version("sql", 1, "/a", "d" * 64)
    starts = [
        link.ToReplica(start=wire.start(1, plain, None)),
        link.ToReplica(start=wire.start(2, adapted, version, ["h:1"])),
        link.ToReplica(stop=link.Stop(rid=2, index=0, outputs=2)),
        link.ToReplica(cancel=link.Cancel(rid=1)),
    ]
    yield joined([hello, *starts])
    yield joined([hello, starts[1], starts[2]])
    yield joined([starts[0]])


class _Inline(OsThreads):
    """Runs at once what goes to a pool."""

    def pool(self, name: str, size: int) -> Executor:
        return _Now()


class _Now(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return done(fn(*args, **kwargs))


class _Found:
    """Reads the headers of adapters: each is the same."""

    def scan(self, version: Version) -> Any:
        return adapter_info(version.key)

    def leave(self, row: Any) -> None:
        """It is unloaded."""


def directory() -> Target:
    """What routers ask a controller: a byte for the call, then its messages."""
    calls = (
        ("Load", pb.LoadAdapterRequest), ("Unload", pb.UnloadAdapterRequest), ("Pin", pb.PinAdapterRequest),
        ("Get", pb.GetAdapterRequest), ("Watch", directory_proto.Using),
    )  # fmt: skip

    async def ask(data: bytes) -> str:
        controller = _controller()
        name, kind = calls[data[0] % len(calls)] if data else calls[0]
        context: Any = Context(())
        servicer = DirectoryServicer(controller, OPEN)
        try:
            if name == "Watch":
                await _watched(servicer, split(data[1:], directory_proto.Using), context)
            else:
                for message in split(data[1:], kind):
                    await getattr(servicer, name)(message, context)
        except Aborted:
            pass
        finally:
            controller.close()
            controller.registry.close()
        return "OK" if context.code is None else context.code.name

    seeds = [
        b"\x00" + joined([pb.LoadAdapterRequest(name="sql", path="/a", lazy=True, replace=True, pinned=False)]),
        b"\x01" + joined([pb.UnloadAdapterRequest(name="old")]),
        b"\x02" + joined([pb.PinAdapterRequest(name="old", pinned=True)]),
        b"\x03" + joined([pb.GetAdapterRequest(name="old")]),
        b"\x04" + joined([directory_proto.Using(router="r", epoch=e, keys=["old@1", "x@2"]) for e in (0, 1, 5)]),
    ]

    def change(data: bytes, draw: random.Random) -> bytes:
        return changing(calls[data[0] % len(calls)][1], 1)(data, draw) if data else data

    words = (b"old", b"old@1", b"sql", b"../x", b"x@" + b"9" * 40)
    return Target("directory", lambda data: run(ask(data)), seeds, words, change)


def _controller() -> Controller:
    calls: Any = _NoCalls()
    found: Any = _Found()
    controller = Controller(Registry("", _Inline()), found, calls, System(threads=_Inline()))
    controller.load(Load("old", "/old", lazy=True)).result(5)
    return controller


class _NoCalls:
    """No replica is up."""

    def close(self) -> None:
        """Nothing to close."""


async def _watched(servicer: DirectoryServicer, messages: Sequence[Any], context: Any) -> None:
    async def received() -> AsyncIterator[Any]:
        for message in messages:
            yield message
            await asyncio.sleep(0)

    controller = port.served(servicer)
    async for table in servicer.Watch(received(), context):
        table.SerializeToString()
    controller.uses.look()
    assert controller.uses.holds("old@1") in (True, False)


def table() -> Target:
    """A controller's tables, as a router that follows it reads them."""

    def follow(data: bytes) -> str:
        login: Any = _Login(split(data, directory_proto.Table))
        remote = RemoteDirectory("c:1", "r", login, OsThreads())
        port.watch(remote)
        known = remote.adapters().result(0)
        assert [info.name for info in known] == [name for name in port.names_of(remote) if name]
        for info in known:
            version = remote.current(info.name)
            remote.begin(version)
            remote.end(version)
        assert not port.requests_of(remote)
        return "OK"

    info = pb.AdapterInfo(name="sql", uid=3, digest="d", rank=4, target_modules=["q"], bytes=9, blocks=1, tier=1)
    entries = [directory_proto.Entry(info=info, path="/a")]
    full = directory_proto.Table
    seeds = [
        joined([full(epoch=1, whole=True, entries=entries), full(epoch=2, gone=["sql"]), full(epoch=2)]),
        joined([full(epoch=1, whole=True, more=True, entries=entries), full(epoch=1, entries=entries), full(epoch=1)]),
    ]
    return Target("table", follow, seeds, (b"sql", b"old"), changing(directory_proto.Table))


class _Login:
    """Channels whose streams bring the tables."""

    def __init__(self, tables: Sequence[Any]):
        self._tables = tables

    def channel(self, address: str, options: Any = ()) -> Any:
        return self

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return None

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return lambda sent: iter(self._tables)


def peer() -> Target:
    """A byte: what a replica asks another one for its adapter, or what it gets."""
    record, files = _record(), reader({})
    data = np.arange(record.node.size * files.layout.block_bytes, dtype=np.uint64).astype(np.uint8)
    engine: Any = _Engine(record, files, data)
    chunks = asyncio.new_event_loop().run_until_complete(
        _fetched(engine, link.FetchRequest(key="sql@1", digest="d" * 64))
    )

    def take(messages: Sequence[link.Chunk]) -> None:
        transfer = port.transfer(record, files)
        for chunk in messages:
            transfer.take(chunk)
        blocks, head = transfer.whole()
        assert blocks.nbytes == len(data) and blocks.tobytes() == data.tobytes()
        new = head.adapter("/a", files, blocks)
        assert new.bytes == blocks.nbytes and new.blocks == len(blocks)
        assert set(new.projections) <= set(files.layout.units)

    def ask(content: bytes) -> str:
        if content[:1] == b"\x01":
            return status(lambda: take(split(content[1:], link.Chunk)))
        for request in split(content[1:], link.FetchRequest):
            try:
                run(_answered(engine, request))
            except Aborted:
                return "NOT_FOUND"
        return "OK"

    requests = [link.FetchRequest(key="sql@1", digest="d" * 64, offset=offset) for offset in (0, -1, 5)]
    seeds = [b"\x01" + joined(chunks), b"\x00" + joined(requests)]

    def change(data: bytes, draw: random.Random) -> bytes:
        return changing(link.Chunk if data[:1] == b"\x01" else link.FetchRequest, 1)(data, draw)

    words = (b"sql@1", b"d" * 64, b'"projections":', b'"bytes":', b'"ranks":{', b'"q"')
    return Target("peer", ask, seeds, words, change)


class _Engine:
    """A replica whose host tier has one adapter."""

    def __init__(self, record: Record, reader: Any, data: np.ndarray):
        self.reader, self._record = reader, record
        self._data = data.reshape(record.node.size, -1)

    def records(self) -> list[Record]:
        return [self._record]

    def host_copy(self, record: Record, first: int, count: int) -> Future[np.ndarray]:
        return done(self._data[first : first + count])


def _record() -> Record:
    node = AdapterNode(1, 2)
    node.host = (1, 2)
    ranks = {"layers.0.self_attn.q_proj": 4}
    return Record("sql@1", "d" * 64, ranks, ("q",), (), ("q", "q"), 2 * reader({}).layout.block_bytes, node, 0.1)


async def _fetched(engine: Any, request: link.FetchRequest) -> list[link.Chunk]:
    return await port.chunks(PeerServicer(lambda: engine, OPEN, _adopt), request)


async def _answered(engine: Any, request: link.FetchRequest) -> str:
    context: Any = Context(())
    async for chunk in PeerServicer(lambda: engine, OPEN, _adopt).Fetch(request, context):
        chunk.SerializeToString()
    return "OK"
