"""Other replicas that have adapters in memory: the product's `Fetcher` reads from them, and they give badly."""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc
import msgspec

from jlora.cluster.peer import AT_ONCE, HEAD_ONLY, Fetcher, Head
from jlora.cluster.proto import link_pb2 as link
from jlora.engine.local import LocalReplica
from jlora.engine.records import NewAdapter
from jlora.engine.sources import Reader, read_adapter
from jlora.layout import PoolLayout
from jlora.sim.world import disk
from jlora.sim.world.disk import BLOCK_TOKENS, SPEC, Disk, versions
from jlora.sim.world.sites import Site, Sites
from jlora.sim.world.tasks import Tasks, Wait

SITES = {
    "peer.reads": Site("an adapter is read from another replica", 0.0),
    "peer.absent": Site("another replica does not have an adapter any more", 0.6),
    "peer.slow": Site("another replica takes up to two seconds for a message", 0.4),
    "peer.breaks": Site("the connection to another replica breaks while it sends", 0.4),
    "peer.short": Site("what another replica sends ends early", 0.4),
    "peer.damaged": Site("a byte that another replica sends is another one", 0.7),
    "peer.other": Site("another replica sends another version", 0.7),
}

NAMES = ("p0", "p1")
MESSAGES = 3  # that an adapter comes in


class Failed(grpc.RpcError):
    """A call that has failed."""

    def __init__(self, code: grpc.StatusCode):
        super().__init__(code.name)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._code.name


class Call:
    """A call under way, as gRPC's."""

    def __init__(self, chunks: Iterator[link.Chunk]):
        self._chunks = chunks

    def __iter__(self) -> Iterator[link.Chunk]:
        return self._chunks

    def cancel(self) -> None:
        """What it would bring is not read."""


class Peers:
    """A login whose channels all lead to replicas that have every version."""

    def __init__(self, reader: Reader, sites: Sites, tasks: Tasks):
        self._reader, self._sites, self._tasks = reader, sites, tasks

    def channel(self, server: str, options: Sequence[tuple[str, Any]] = ()) -> Peers:
        """To any of them."""
        return self

    def unary_unary(self, *_: Any, **__: Any) -> None:
        """Nobody asks them to keep anything."""

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        """`Peer.Fetch`."""
        return lambda request, timeout: Call(self._chunks(request))

    def _chunks(self, request: link.FetchRequest) -> Iterator[link.Chunk]:
        fires = self._sites.fires
        self._wait()
        if fires("peer.absent"):
            raise Failed(grpc.StatusCode.NOT_FOUND)
        new = packed()[request.digest]
        data = bytearray(new.data.tobytes())
        checksum = hashlib.sha256(data).digest()
        if fires("peer.damaged"):
            data[self._tasks.draw.randrange(len(data))] ^= 1
        yield link.Chunk(head=self._head(request, new, "other" if fires("peer.other") else new.digest), size=len(data))
        if request.offset == HEAD_ONLY:
            return
        step = -(-len(data) // MESSAGES)
        for at in range(request.offset, len(data), step):
            self._wait()
            if fires("peer.breaks"):
                raise Failed(grpc.StatusCode.UNAVAILABLE)
            if fires("peer.short"):
                return
            yield link.Chunk(data=bytes(data[at : at + step]))
        yield link.Chunk(size=len(data), checksum=checksum)

    def _head(self, request: link.FetchRequest, new: NewAdapter, digest: str) -> bytes:
        head = Head(
            request.key, digest, self._reader.fits, dict(new.ranks), new.target_modules, new.alora_invocation_tokens,
            new.projections, new.bytes, new.header, new.base,
        )  # fmt: skip
        return msgspec.json.encode(head)

    def _wait(self) -> None:
        draw = self._tasks.draw
        self._tasks.sleep(0.01 * draw.random() + (2 * draw.random() if self._sites.fires("peer.slow") else 0.0))


class Slots:
    """`threading.BoundedSemaphore` for tasks."""

    def __init__(self, tasks: Tasks, free: int):
        self._tasks, self._free = tasks, free
        self._waiting: list[Wait] = []

    def __enter__(self) -> None:
        while not self._free:
            self._tasks.park(self._waiting)
        self._free -= 1

    def __exit__(self, *_: object) -> None:
        self._free += 1
        self._tasks.wake(self._waiting, 1)


def fetcher(replica: LocalReplica, sites: Sites, tasks: Tasks, names: Sequence[str], first: bool) -> Fetcher:
    """Lets a replica read adapters of these names from its peers, `first`, or where their files do not serve."""
    login: Any = Peers(replica.reader, sites, tasks)
    made = Fetcher(lambda: replica, login)
    slots: Any = Slots(tasks, AT_ONCE)
    made._slots = slots
    made._peers = dict.fromkeys(names, NAMES)
    made._path_bps = 0.0 if first else math.inf
    replica.read_with(made.read)
    return made


@functools.cache
def packed() -> Mapping[str, NewAdapter]:
    """Every version in its packed form, by digest."""
    calm = Disk(random.Random(0), Sites(disk.SITES, random.Random(0)), lambda seconds: None)
    calm.sites.heal()
    reader = Reader(SPEC, PoolLayout.of(SPEC, 8, BLOCK_TOKENS), 8, ("base",), calm, lambda: 0.0)
    found = {}
    for version in versions():
        calm.put("a", version)
        found[version.digest] = replace(read_adapter("a", "a", reader), read_s=0.0)
    return found
