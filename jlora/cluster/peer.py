"""Adapters from one replica's host tier to another's, in their packed form.

    fetcher = Fetcher(engine, login)                          # takes what others have
    await fetcher.adopt(version)                              # registers it; its weights come with its first request
    fetcher.heard(version)                                    # with every request: whom it comes from now
    servicer = PeerServicer(engine, secret, fetcher.adopt)    # gives what this replica has, keeps what it is told

A version is known by its path and by the peers that have it, and is read from whichever is predicted to be
sooner. The path is the truth: whatever goes wrong with a peer, the next one is tried and then the path. A peer that
lends to `LENDS` others already is passed over in the same way, unless there is no path that is faster.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import numpy as np

from jlora.adapters.packing import NUMPY_DTYPES
from jlora.adapters.registry import Record
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.routing.ways import LENDS, PATH_BPS, PEER_BPS, insists, learned
from jlora.cluster.secret import Secret
from jlora.engine.records import NewAdapter
from jlora.engine.sources import Reader, check_version, scan_adapter
from jlora.errors import AlreadyExists, Busy, DataLoss, JloraError, NotFound, ResourceExhausted, Unavailable
from jlora.serve import convert
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.status import shortened, status_of

if TYPE_CHECKING:  # it imports jax
    from jlora.engine.local import LocalReplica

log = logging.getLogger(__name__)

CHUNK_BYTES = 2 << 20
AT_ONCE = 2  # fetches of one replica
HEAD_S = 5.0  # to learn what a peer has
SLOWEST_BPS = 10e6  # of a transfer that is worth waiting for
RESUMES = 2  # times that a transfer from one peer goes on behind what has come
# A peer whose process stands still, or whose network is gone, in the middle of its data is left after five seconds:
# gRPC sends few pings to one that has been quiet before. Without the last one, a ping waits a minute for its answer.
ALIVE = (("grpc.keepalive_time_ms", 2000), ("grpc.keepalive_timeout_ms", 3000), ("grpc.http2.ping_timeout_ms", 3000))
KNOWN = 4096  # versions whose peers are remembered
CHANNELS = 64  # to the peers that were asked last: a replica that starts again has another address
HEAD_ONLY = -1

Adopt = Callable[[link.Version], Awaitable[None]]
Engine = Callable[[], "LocalReplica"]  # raises Unavailable while it loads


class Late(JloraError):
    """A peer has not sent everything in time."""


CODES: dict[grpc.StatusCode, type[JloraError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: Late,
}


class Head(msgspec.Struct, frozen=True):
    """What a replica must know of a version before its bytes; fields as of `NewAdapter`.

    `fits` is of the pool that the packed form is for (`Reader.fits`): model, block size, dtype, tensor parallelism.
    `stamp` is of the files that the lender has read; () if it has read none.
    """

    key: str
    digest: str
    fits: str
    ranks: dict[str, int]
    target_modules: tuple[str, ...]
    alora_invocation_tokens: tuple[int, ...]
    projections: tuple[str, ...]
    bytes: int
    header: str
    base: str
    stamp: tuple[int, ...] = ()

    @classmethod
    def of(cls, record: Record, fits: str) -> Head:
        return cls(
            record.name,
            record.digest,
            fits,
            dict(record.ranks),
            record.target_modules,
            record.alora_invocation_tokens,
            record.projections,
            record.bytes,
            record.header,
            record.base,
            record.stamp,
        )

    def adapter(self, path: str, reader: Reader, data: np.ndarray | None = None, read_s: float = 0.0) -> NewAdapter:
        """The version, with its weights or without.

        Files that the lender has not read may hold other weights. Without a stamp, the watch reads and compares them.
        """
        stamp = reader.stamp(path)
        return NewAdapter(
            name=self.key,
            digest=self.digest,
            ranks=self.ranks,
            target_modules=self.target_modules,
            alora_invocation_tokens=self.alora_invocation_tokens,
            projections=self.projections,
            data=data,
            bytes=self.bytes,
            read_s=read_s,
            path=path,
            header=self.header,
            stamp=self.stamp if self.stamp == stamp else (),
            base=self.base,
        )


class PeerServicer(rpc.PeerServicer):
    """Serves `jlora.cluster.v1.Peer` from the host tier of this process's engine.

    It lends to `LENDS` others at once, and to more if they insist: or all who need one adapter would wait for each
    other here, although some of them could read its path, and later ones fetch from earlier ones.
    """

    def __init__(self, engine: Engine, secret: Secret, adopt: Adopt):
        self._engine = engine
        self._secret = secret
        self._adopt = adopt
        self._lent = 0  # fetches under way

    async def Keep(self, request: link.Version, context: grpc.aio.ServicerContext) -> pb.AdapterInfo:
        await self._secret.check(context)
        try:
            await self._adopt(request)
            return convert.adapter_info(await asyncio.wrap_future(self._engine().keep(request.key, request.lost)))
        except JloraError as e:
            code, details = status_of(e, "Peer/Keep")
            await context.abort(code, details)
            raise

    async def Fetch(self, request: link.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[link.Chunk]:
        await self._secret.check(context)
        try:
            async with aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (ResourceExhausted, Unavailable) as e:
            code = grpc.StatusCode.UNAVAILABLE if isinstance(e, Unavailable) else grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, shortened(str(e)))
        except JloraError as e:
            await context.abort(grpc.StatusCode.NOT_FOUND, shortened(str(e)))

    async def _chunks(self, request: link.FetchRequest) -> AsyncGenerator[link.Chunk, None]:
        """Raises NotFound, or ResourceExhausted if too many others fetch."""
        engine = self._engine()
        record = next((one for one in engine.records() if one.name == request.key), None)
        if record is None or record.digest != request.digest or not record.digest or not record.node.on_host:
            raise NotFound(f"adapter {request.key!r} with digest {request.digest[:12]}… is not in the host tier")
        head = Head.of(record, engine.reader.fits)
        first = link.Chunk(head=msgspec.json.encode(head), size=head.bytes)
        if request.offset == HEAD_ONLY:
            yield first
            return
        if self._lent >= LENDS and not request.insists:
            raise ResourceExhausted(f"{self._lent} others fetch from this replica")
        self._lent += 1
        try:
            yield first
            async for chunk in _weights(engine, record, request.offset):
                yield chunk
        finally:
            self._lent -= 1


async def _weights(engine: LocalReplica, record: Record, offset: int) -> AsyncIterator[link.Chunk]:
    """The copy may leave the host tier meanwhile: then the transfer ends. One chunk is in memory at a time."""
    step = max(1, CHUNK_BYTES // engine.reader.layout.block_bytes)
    at, sum_ = 0, hashlib.sha256()
    for first in range(0, len(record.projections), step):
        data = await asyncio.to_thread(_piece, engine, record, first, step, sum_)
        for cut in range(max(0, offset - at), len(data), CHUNK_BYTES):
            yield link.Chunk(data=data[cut : cut + CHUNK_BYTES])
        at += len(data)
    yield link.Chunk(size=at, checksum=sum_.digest())


def _piece(engine: LocalReplica, record: Record, first: int, count: int, sum_: Any) -> bytes:
    """Some blocks' bytes; `sum_` takes them in. Raises NotFound if the copy has left."""
    data = engine.host_copy(record, first, count).result()
    if data is None:
        raise NotFound(f"adapter {record.name!r} has left the host tier")
    raw = data.tobytes()
    sum_.update(raw)
    return raw


class Fetcher:
    """Registers versions at this process's engine, and reads them from peers or from their paths."""

    def __init__(self, engine: Engine, login: Login | None = None):
        """`login` holds the token of the service."""
        self._engine = engine
        self._login = login or Login()
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._peers: dict[str, tuple[str, ...]] = {}  # by key
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._peer_bps, self._path_bps = PEER_BPS, PATH_BPS
        self.fetched = 0  # versions that came from peers

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes per second that it expects from peers, and from paths."""
        return self._peer_bps, self._path_bps

    def close(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    async def adopt(self, version: link.Version) -> None:
        """Makes a version known. Raises JloraError if neither a peer nor its path describes it."""
        self.heard(version)
        engine = self._engine()
        new = await asyncio.to_thread(self._described, engine.reader, version)
        try:
            await asyncio.wrap_future(engine.register(new))
        except AlreadyExists:
            log.debug("adapter %s is known already", version.key)

    def heard(self, version: link.Version) -> None:
        """Whom a version comes from, from now on, however it came before. For the event loop's thread."""
        self._engine().read_with(self.read)
        self._peers.pop(version.key, None)
        if version.peers:
            self._peers[version.key] = tuple(version.peers)  # the last one
            if len(self._peers) > KNOWN:
                del self._peers[next(iter(self._peers))]

    def _described(self, reader: Reader, version: link.Version) -> NewAdapter:
        """From a peer, which spares the disk, or from the headers of its files."""
        for peer in version.peers if version.digest else ():
            try:
                return self._head(peer, version.key, version.digest, reader).adapter(version.path, reader)
            except JloraError as e:
                log.info("adapter %s is not described by the replica at %s: %s", version.key, peer, e)
        new = scan_adapter(version.key, version.path, reader)
        return replace(new, digest=version.digest)  # what the first read must find

    def _head(self, peer: str, key: str, digest: str, reader: Reader) -> Head:
        request = link.FetchRequest(key=key, digest=digest, offset=HEAD_ONLY)
        return _head_of(next(self._chunks(peer, request, HEAD_S), link.Chunk()), key, digest, reader)

    # -- weights ------------------------------------------------------------------------------

    def read(self, record: Record, from_files: Callable[[], NewAdapter], unwanted: Callable[[], bool]) -> NewAdapter:
        """A registered version; runs on a loader's thread. Raises what reading its files raises."""
        peers = self._peers.get(record.name, ()) if record.digest else ()
        if peers and self._peer_bps >= self._path_bps:
            new, peers = self._from_peers(peers, record, unwanted, insists(self._peer_bps, self._path_bps))
            if new is not None:
                return new
        try:
            new = from_files()
            check_version(record, new.digest, new.header)
        except (NotFound, DataLoss, Busy):
            new, _ = self._from_peers(peers, record, unwanted, insist=True)
            if new is None:
                raise
            return replace(new, stamp=())  # no files are behind it: it must not leave memory
        self._path_bps = learned(self._path_bps, new.bytes, new.read_s)
        return new

    def _from_peers(
        self, peers: Sequence[str], record: Record, unwanted: Callable[[], bool], insist: bool
    ) -> tuple[NewAdapter | None, Sequence[str]]:
        """From the first peer that has it whole; None if there is none, and the peers that are busy."""
        busy: list[str] = []
        if not peers:
            return None, busy
        with self._slots:
            for peer in peers:
                try:
                    return self._from_peer(peer, record, unwanted, insist), busy
                except JloraError as e:
                    log.info("adapter %s does not come from the replica at %s: %s", record.name, peer, e)
                    busy += [peer] if isinstance(e, ResourceExhausted) else []
                if unwanted():
                    break
        return None, busy

    def _from_peer(self, peer: str, record: Record, unwanted: Callable[[], bool], insist: bool) -> NewAdapter:
        """In several calls, as long as each brings something: a peer that hangs is not asked again."""
        reader, clock = self._engine().reader, self._engine().reader.clock
        began = clock()
        transfer = _Transfer(record, reader)
        for attempt in range(RESUMES + 1):
            before = transfer.got
            request = link.FetchRequest(key=record.name, digest=record.digest, offset=transfer.got, insists=insist)
            try:
                for chunk in self._chunks(peer, request, HEAD_S + transfer.size / SLOWEST_BPS):
                    transfer.take(chunk)
                    if unwanted():
                        raise Unavailable("nobody waits for it any more")
                break
            except Unavailable:
                if attempt == RESUMES or transfer.got == before or unwanted():
                    raise
        data, head = transfer.whole()
        took = clock() - began
        self._peer_bps = learned(self._peer_bps, data.nbytes, took)
        self.fetched += 1
        log.info("adapter %s has come from the replica at %s: %d bytes in %.3f s", record.name, peer, data.nbytes, took)
        return head.adapter(record.path, reader, data, took)

    def _chunks(self, peer: str, request: link.FetchRequest, timeout_s: float) -> Iterator[link.Chunk]:
        """A peer's answer. Raises Unavailable, Late; NotFound if it lacks the version, ResourceExhausted if busy."""
        call = rpc.PeerStub(self._channel(peer)).Fetch(request, timeout=timeout_s)
        try:
            yield from call
        except grpc.RpcError as e:
            kind = CODES.get(e.code(), Unavailable)
            raise kind(e.details() or e.code().name) from e
        finally:
            call.cancel()

    def _channel(self, peer: str) -> grpc.Channel:
        with self._lock:
            channel = self._channels.pop(peer, None) or self._login.channel(peer, ALIVE)
            self._channels[peer] = channel  # the last one
            oldest = next(iter(self._channels))
            if len(self._channels) > CHANNELS:
                self._channels.pop(oldest).close()
            return channel


class _Transfer:
    """A packed form on its way, from the first byte to the last, over any number of calls."""

    def __init__(self, record: Record, reader: Reader):
        self._record, self._reader = record, reader
        self.size = record.node.size * reader.layout.block_bytes
        self._head: Head | None = None
        self._data = np.empty(0, np.uint8)
        self._checksum = b""
        self.got = 0

    def take(self, chunk: link.Chunk) -> None:
        """Raises DataLoss for what cannot be of this version."""
        if chunk.head:
            self._head = _head_of(chunk, self._record.name, self._record.digest, self._reader)
            if not len(self._data):
                self._data = np.empty(self.size, np.uint8)
            return
        if self.got + len(chunk.data) > len(self._data):
            raise DataLoss(f"more than {self.size} bytes have come")
        self._data[self.got : self.got + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
        self.got += len(chunk.data)
        self._checksum = self._checksum or chunk.checksum

    def whole(self) -> tuple[np.ndarray, Head]:
        """All blocks [n, L, B, 2K, H] in the pool's dtype. Raises DataLoss unless they are what was sent."""
        if self._head is None or self.got != self.size:
            raise DataLoss(f"{self.got} of {self.size} bytes have come")
        if hashlib.sha256(self._data).digest() != self._checksum:
            raise DataLoss("the checksum is of other bytes")
        layout = self._reader.layout
        blocks = self._data.view(NUMPY_DTYPES[layout.dtype]).reshape(-1, *layout.block_shape)
        return blocks, self._head


def _head_of(chunk: link.Chunk, key: str, digest: str, reader: Reader) -> Head:
    """Raises DataLoss unless the chunk describes this version for this pool."""
    try:
        head = msgspec.json.decode(chunk.head, type=Head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:  # ValueError: no UTF-8
        raise DataLoss(f"its head cannot be read: {e}") from e
    if (head.key, head.digest) != (key, digest):
        raise DataLoss(f"it has sent adapter {head.key[:64]!r} with digest {head.digest[:12]}…")
    if head.fits != reader.fits:
        raise DataLoss("its pool has another model, dtype, block size or tensor parallelism")
    if unknown := set(head.projections) - reader.layout.units.keys():
        raise DataLoss(f"it has sent blocks of {min(unknown)[:64]!r}, which is no projection")
    if head.bytes != len(head.projections) * reader.layout.block_bytes:
        raise DataLoss(f"{head.bytes} bytes for {len(head.projections)} blocks")
    return head
