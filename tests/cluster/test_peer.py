"""Adapters between host tiers: real engines, real sockets, and transfers that go wrong."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest

from jlora import config as configuration
from jlora.cluster import peer as peers
from jlora.cluster.launcher import login
from jlora.cluster.peer import Fetcher, PeerServicer
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.secret import Secret
from jlora.engine.local import LocalReplica
from jlora.errors import DataLoss, NotFound, Unavailable
from jlora.serve.access.tls import Tls
from jlora.serve.client import Login
from jlora.types import Request, SamplingParams, TokenEvent
from tests import _make
from tests.cluster import _port as port
from tests.cluster._links import Loop, wait_for
from tests.cluster._relay import Relay
from tests.cluster._service import SMALL, text_spec
from tests.cluster.test_link_tls import config_of
from tests.port import look

SECRET = Secret("the token of these tests")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
Damage = Callable[[link.Chunk], link.Chunk]


class Servicer(PeerServicer):
    """One whose chunks a test may change, and which counts what it is asked."""

    def __init__(self, engine: LocalReplica, fetcher: Fetcher):
        super().__init__(lambda: engine, SECRET, fetcher.adopt)
        self.damage: Damage = lambda chunk: chunk
        self.offsets: list[int] = []

    async def _chunks(self, request: link.FetchRequest) -> AsyncIterator[link.Chunk]:
        self.offsets.append(request.offset)
        async for chunk in super()._chunks(request):
            yield self.damage(chunk)


@dataclass
class Side:
    engine: LocalReplica
    servicer: Servicer
    address: str
    fetcher: Fetcher
    stop: Callable[[], object]

    def adopt(self, version: link.Version) -> None:
        asyncio.run(self.fetcher.adopt(version))

    def generate(self, adapter: str) -> list[int]:
        """Greedy tokens. Raises the error that ended the request."""
        events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
        self.engine.submit(Request(f"g-{adapter}", (3, 4, 5), GREEDY, adapter=adapter), events.put).result(60)
        tokens: list[int] = []
        while True:
            for event in events.get(timeout=60):
                if event.error is not None:
                    raise event.error
                tokens += [] if event.token_id is None else [event.token_id]
                if event.finish_reason is not None:
                    return tokens


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def side(loop: Loop, model: Path, **settings: Any) -> Side:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    engine = LocalReplica.start(configuration.load(None, {**SMALL, "model.path": str(model), **keys}), progress=False)
    fetcher = Fetcher(lambda: engine, Login(SECRET.token))
    servicer = Servicer(engine, fetcher)

    async def start() -> str:
        server = grpc.aio.server()
        rpc.add_PeerServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stops.append(server)
        return f"127.0.0.1:{port}"

    stops: list[grpc.aio.Server] = []
    address = loop.run(start())
    return Side(engine, servicer, address, fetcher, lambda: loop.run(stops[0].stop(0)))


@pytest.fixture(scope="module")
def pair(loop: Loop, text_model: Path) -> Iterator[tuple[Side, Side]]:
    both = side(loop, text_model), side(loop, text_model)
    yield both
    for one in both:
        one.fetcher.close()
        one.stop()
        one.engine.check_integrity().result(20)
        one.engine.close()


@dataclass
class World:
    giver: Side
    taker: Side
    version: link.Version
    path: Path


@pytest.fixture
def world(pair: tuple[Side, Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A version that the giver has in its host tier, and the taker does not know; in many small chunks."""
    monkeypatch.setattr(peers, "CHUNK_BYTES", 3000)
    giver, taker = pair
    path = _make.make_adapter(tmp_path / "a", text_spec(), seed=5, r=8, targets=tuple(_make.MODULES))
    info = giver.engine.load_adapter("a@1", str(path)).result(60)
    giver.servicer.offsets.clear()
    giver.servicer.damage = lambda chunk: chunk
    taker.fetcher.fetched = 0
    port.pace(taker.fetcher, path_bps=1e6)
    version = link.Version(key="a@1", path=str(path), digest=info.digest, peers=[giver.address])
    yield World(giver, taker, version, path)
    for one in pair:
        if any(record.name == "a@1" for record in one.engine.records()):
            one.engine.unload_adapter("a@1").result(20)


@pytest.mark.slow
def test_a_version_comes_from_a_peer_without_its_files(world: World):
    expected = world.giver.generate("a@1")
    shutil.rmtree(world.path)
    world.taker.adopt(world.version)
    assert world.taker.engine.adapter("a@1").result(20).tier == "DISK"
    assert world.taker.generate("a@1") == expected
    info = world.taker.engine.adapter("a@1").result(20)
    assert info.digest == world.version.digest and world.taker.fetcher.fetched == 1
    peer_bps, path_bps = world.taker.fetcher.rates
    assert 0 < peer_bps != 1e9 and path_bps == 1e6  # it has measured the one, and the test has told it the other
    assert world.giver.servicer.offsets == [-1, 0]


def test_a_version_comes_over_mutual_tls_and_not_to_one_who_proves_nothing(world: World, loop: Loop, tmp_path: Path):
    config = config_of(tmp_path)

    async def serve() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        rpc.add_PeerServicer_to_server(world.giver.servicer, server)
        port = server.add_secure_port("127.0.0.1:0", Tls(config.serve).grpc())
        await server.start()
        return server, port

    server, port = loop.run(serve())
    shutil.rmtree(world.path)
    version = link.Version(key="a@1", path=str(world.path), digest=world.version.digest, peers=[f"127.0.0.1:{port}"])
    engine, mine = world.taker.engine, world.taker.fetcher
    for login_, known in (
        (Login(SECRET.token, ca=config.serve.tls_client_ca), False),
        (login(config, SECRET.token), True),
    ):
        world.taker.fetcher = Fetcher(lambda: engine, login_)
        if known:
            world.taker.adopt(version)
            assert world.taker.generate("a@1") == world.giver.generate("a@1")
        else:
            with pytest.raises(NotFound):
                world.taker.adopt(version)
        assert world.taker.fetcher.fetched == known
        world.taker.fetcher.close()
    world.taker.fetcher = mine
    loop.run(server.stop(0))


def test_a_version_that_was_loaded_from_its_path_comes_from_the_peers_that_a_later_request_names(world: World):
    """Its files are gone by then, and its copy has left memory."""
    world.taker.engine.load_adapter("a@1", str(world.path), lazy=True).result(60)
    shutil.rmtree(world.path)
    with pytest.raises(NotFound):
        world.taker.generate("a@1")
    world.taker.fetcher.heard(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 1
    port.pace(world.taker.fetcher, path_bps=1e6)
    (record,) = world.taker.engine.records()
    world.version.peers[:] = []
    world.taker.fetcher.heard(world.version)
    with pytest.raises(NotFound):
        world.taker.fetcher.read(record, no_files, lambda: False)


def no_files() -> NoReturn:
    raise NotFound("they are gone")


def test_both_host_tiers_hold_the_same_bytes(world: World):
    world.taker.adopt(world.version)
    world.taker.generate("a@1")
    copies = []
    for one in (world.giver, world.taker):
        (record,) = (record for record in one.engine.records() if record.name == "a@1")
        copies.append(one.engine.host_copy(record, 0, 10_000).result(20))
    assert copies[0] is not None and copies[0].nbytes > 10 * peers.CHUNK_BYTES
    np.testing.assert_array_equal(copies[0], copies[1])


def test_a_transfer_that_breaks_goes_on_behind_what_has_come(world: World):
    left = [3]

    def breaks(chunk: link.Chunk) -> link.Chunk:
        left[0] -= bool(chunk.data)
        if chunk.data and left[0] == 0:
            raise Unavailable("as if the socket broke")
        return chunk

    world.giver.servicer.damage = breaks
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1")
    first, second = world.giver.servicer.offsets[1:]
    assert first == 0 < second and world.taker.fetcher.fetched == 1


def test_a_peer_that_falls_silent_in_a_transfer_is_left_long_before_its_time_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Its files are gone; the next peer has it whole."""
    monkeypatch.setattr(peers, "HEAD_S", 100.0)
    shutil.rmtree(world.path)
    with closing(Relay(world.giver.address)) as relay:

        def last(chunk: link.Chunk) -> link.Chunk:
            if chunk.data and len(world.giver.servicer.offsets) == 2:
                relay.stop("down")
            return chunk

        world.giver.servicer.damage = last
        world.version.peers.insert(0, relay.address)
        world.taker.adopt(world.version)
        began = time.monotonic()
        assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 1
        assert time.monotonic() - began < 30


def flipped(chunk: link.Chunk) -> link.Chunk:
    if chunk.data:
        return link.Chunk(data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:])
    return chunk


def truncated(chunk: link.Chunk) -> link.Chunk:
    return link.Chunk(data=chunk.data[:-1], head=chunk.head, size=chunk.size, checksum=chunk.checksum)


def endless(chunk: link.Chunk) -> link.Chunk:
    return link.Chunk(data=chunk.data * 100, head=chunk.head, size=chunk.size, checksum=chunk.checksum)


def of_another_pool(chunk: link.Chunk) -> link.Chunk:
    return link.Chunk(head=chunk.head.replace(b'"fits":"', b'"fits":"x'), data=chunk.data, size=chunk.size)


def of_another_version(chunk: link.Chunk) -> link.Chunk:
    return link.Chunk(head=chunk.head.replace(b'"digest":"', b'"digest":"x'), data=chunk.data, size=chunk.size)


def without_sense(chunk: link.Chunk) -> link.Chunk:
    return link.Chunk(head=b"{", data=chunk.data, size=chunk.size)


@pytest.mark.parametrize(
    "damage",
    [flipped, truncated, endless, of_another_pool, of_another_version, without_sense],
    ids=lambda d: d.__name__,
)
def test_a_bad_transfer_is_seen_and_the_files_are_read_instead(world: World, damage: Damage):
    world.giver.servicer.damage = damage
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1")
    assert world.taker.fetcher.fetched == 0 and world.giver.servicer.offsets


def test_after_a_bad_peer_the_next_one_is_asked(world: World):
    """The first does not answer at all, and the files are gone."""
    shutil.rmtree(world.path)
    world.version.peers.insert(0, "127.0.0.1:1")
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_a_peer_that_sends_nothing_is_asked_once(world: World, monkeypatch: pytest.MonkeyPatch, hangs: bool):
    """It takes connections and says nothing, or takes none."""
    monkeypatch.setattr(peers, "HEAD_S", 0.5)
    shutil.rmtree(world.path)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        silent = f"127.0.0.1:{listening.getsockname()[1] if hangs else 1}"
        world.version.peers.insert(0, silent)
        world.taker.adopt(world.version)
        asked: list[tuple[str, int]] = []
        chunks = getattr(*port.fetches())

        def seen(self: Fetcher, peer: str, request: link.FetchRequest, timeout_s: float) -> Iterator[link.Chunk]:
            asked.append((peer, request.offset))
            return chunks(self, peer, request, timeout_s)

        monkeypatch.setattr(*port.fetches(), seen)
        assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 1
    assert asked == [(silent, 0), (world.giver.address, 0)]


def test_after_a_damaged_transfer_the_next_peer_is_asked(world: World):
    """The files are gone. The second peer is the first under another name, which is damaged no more."""
    shutil.rmtree(world.path)
    (first,), offsets = world.version.peers, world.giver.servicer.offsets
    world.giver.servicer.damage = lambda chunk: flipped(chunk) if sum(at >= 0 for at in offsets) < 2 else chunk
    world.version.peers.append(first.replace("127.0.0.1", "localhost"))
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 1
    assert [at for at in offsets if at >= 0] == [0, 0], "what a bad transfer has brought counts for nothing"


def test_files_that_are_read_sooner_are_read(world: World):
    port.pace(world.taker.fetcher, path_bps=1e12)
    world.taker.adopt(world.version)
    world.taker.generate("a@1")
    assert world.taker.fetcher.fetched == 0 and world.giver.servicer.offsets == [-1]


def test_files_that_have_changed_are_not_served_and_the_peer_still_has_the_version(world: World):
    port.pace(world.taker.fetcher, path_bps=1e12)
    _make.make_adapter(world.path, text_spec(), seed=77, r=8, targets=tuple(_make.MODULES))
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 1
    (record,) = world.taker.engine.records()
    look(world.taker.engine)
    assert not record.node.backed  # it stays in memory, since no files of it are left


def test_a_copy_whose_files_were_overwritten_before_it_came_stays_in_memory(world: World):
    _make.make_adapter(world.path, text_spec(), seed=77, r=8, targets=tuple(_make.MODULES))
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 1
    look(world.taker.engine)
    (record,) = world.taker.engine.records()
    assert not record.node.backed


@pytest.mark.parametrize("touched", [False, True])
def test_a_copy_whose_files_are_its_own_may_leave_memory(world: World, touched: bool):
    """Those that the lender has read are known by their stamp; others are read again."""
    if touched:
        os.utime(world.path / "adapter_model.safetensors", (1, 1))
    world.taker.adopt(world.version)
    world.taker.generate("a@1")
    (record,) = world.taker.engine.records()
    own = world.taker.engine.reader.stamp(str(world.path))
    assert record.stamp == (() if touched else own)
    look(world.taker.engine)
    assert record.stamp == own and record.node.backed and world.taker.fetcher.fetched == 1


def test_a_digest_that_nobody_has_is_data_loss(world: World):
    world.version.digest = "0" * 64
    world.taker.adopt(world.version)
    with pytest.raises(DataLoss, match="files have changed"):
        world.taker.generate("a@1")


def test_a_peer_that_sends_nothing_is_passed_over(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*port.fetches(), lambda *_: iter(()))
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == world.giver.generate("a@1") and world.taker.fetcher.fetched == 0


def test_some_versions_come_from_peers_at_once_and_others_wait(world: World, monkeypatch: pytest.MonkeyPatch):
    world.taker.adopt(world.version)
    (record,) = world.taker.engine.records()
    asked, answer = [], threading.Event()

    def blocked(*_: Any) -> Iterator[link.Chunk]:
        asked.append(threading.current_thread())
        assert answer.wait(20)
        raise DataLoss("nothing comes")

    def read() -> None:
        with pytest.raises(NotFound):
            world.taker.fetcher.read(record, no_files, lambda: False)

    monkeypatch.setattr(*port.fetches(), blocked)
    threads = [threading.Thread(target=read) for _ in range(peers.AT_ONCE + 1)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(asked) == peers.AT_ONCE)
    threads[0].join(0.2)
    assert len(asked) == peers.AT_ONCE, "one of them has to wait"
    answer.set()
    for thread in threads:
        thread.join(20)
    assert len(set(asked)) == len(threads)


def test_a_busy_peer_lends_no_more_and_the_path_or_insisting_helps(world: World, monkeypatch: pytest.MonkeyPatch):
    expected = world.giver.generate("a@1")
    monkeypatch.setattr(peers, "LENDS", 0)
    port.pace(world.taker.fetcher, path_bps=0.5e9)  # a part of the peer's link is slower
    world.taker.adopt(world.version)
    assert world.taker.generate("a@1") == expected
    assert world.taker.fetcher.fetched == 0 and world.giver.servicer.offsets == [-1, 0]
    (record,) = world.taker.engine.records()

    assert world.taker.fetcher.read(record, no_files, lambda: False).digest == world.version.digest
    port.pace(world.taker.fetcher, path_bps=1e6)
    assert world.taker.fetcher.read(record, no_files, lambda: False).digest == world.version.digest
    assert world.taker.fetcher.fetched == 2
    assert world.giver.servicer.offsets == [-1, 0, 0, 0, 0]  # refused, insists behind its path, insists at once


class Refused(Exception):
    """A call was aborted."""


class Caller:
    """Of a servicer, without a connection."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Refused(f"{code.name}: {details}")


def test_a_replica_lends_to_some_at_once_and_to_others_when_these_have_ended(world: World):
    engine = world.giver.engine
    servicer = PeerServicer(lambda: engine, Secret(), world.giver.fetcher.adopt)

    def fetch(**more: Any) -> Any:
        caller: Any = Caller()
        return servicer.Fetch(link.FetchRequest(key="a@1", digest=world.version.digest, **more), caller)

    async def lent() -> None:
        first, *others = [fetch() for _ in range(peers.LENDS)]
        for one in (first, *others, fetch(offset=peers.HEAD_ONLY), insisting := fetch(insists=True)):
            assert (await anext(one)).head
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED: 5 others"):
            await anext(fetch())
        await insisting.aclose()
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED: 4 others"):
            await anext(fetch())
        await first.aclose()
        again = fetch()
        assert (await anext(again)).head
        for one in (again, *others):
            await one.aclose()

    asyncio.run(lent())


def test_a_version_that_nobody_has_is_not_found(world: World):
    with pytest.raises(NotFound):
        world.taker.adopt(link.Version(key="b@2", path="/nowhere", digest="0" * 64, peers=[world.giver.address]))


def test_without_the_token_nothing_is_given(world: World):
    with grpc.insecure_channel(world.giver.address) as channel, pytest.raises(grpc.RpcError) as e:
        list(rpc.PeerStub(channel).Fetch(link.FetchRequest(key="a@1", digest=world.version.digest)))
    assert e.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_pool_of_another_block_size_takes_nothing_from_a_peer(world: World, loop: Loop, text_model: Path):
    other = side(loop, text_model, cache__block_tokens=32)
    try:
        other.adopt(world.version)  # from its files: the peer's head is of another pool
        with pytest.raises(DataLoss, match="block size"):
            port.head(other.fetcher, world.giver.address, world.version, other.engine.reader)
        assert other.engine.adapter("a@1").result(20).digest == world.version.digest
    finally:
        other.fetcher.close()
        other.stop()
        other.engine.close()
