"""Real replicas in this process behind real sockets, and a router's end of a link that a test drives by hand."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from jlora.cluster import wire
from jlora.cluster.directory import Version
from jlora.cluster.fetches import Fetches
from jlora.cluster.link import Adopt, LinkServicer
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.proto import link_pb2_grpc as rpc
from jlora.cluster.secret import Secret
from jlora.config import ServeConfig
from jlora.replica import Replica
from jlora.serve.backend import Backend
from jlora.serve.server import GrpcServer
from jlora.types import Done, Request, TokenEvent

SECRET = Secret("the token of the tests")


@dataclass
class Linked:
    """A replica's server with a link."""

    backend: Backend
    servicer: LinkServicer
    address: str

    @contextmanager
    def attach(self, router: str = "r", epoch: int = 1, secret: Secret = SECRET, **hello: Any) -> Iterator[Router]:
        """A stream whose first message has been sent."""
        with grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            one = Router(channel, secret)
            one.send(hello=link.Hello(**{"router": router, "epoch": epoch, "protocol": wire.PROTOCOL, **hello}))
            try:
                yield one
            finally:
                one.close()


@contextmanager
def linked(replica: Replica, adopt: Adopt | None = None, fetches: Fetches | None = None) -> Iterator[Linked]:
    """Serves a replica on a free port, on a loop thread of its own."""
    backend, made = Backend(replica=replica), []

    def add(backend: Backend, server: grpc.aio.Server) -> None:
        made.append(LinkServicer(backend, "one", SECRET, adopt, fetches=fetches))
        rpc.add_LinkServicer_to_server(made[0], server)

    async def start() -> tuple[GrpcServer, int]:
        server = GrpcServer(backend, ServeConfig(heartbeat_s=60.0), services=[add])
        port = server.bind("127.0.0.1", 0)
        await server.start()
        return server, port

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="link", daemon=True)
    thread.start()
    try:
        server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        yield Linked(backend, made[0], f"127.0.0.1:{port}")
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@dataclass
class Router:
    """The other end; a thread of its own reads what comes."""

    channel: grpc.Channel
    secret: Secret
    hello: link.HelloBack | None = None
    messages: list[link.FromReplica] = field(default_factory=list)
    ended: grpc.StatusCode | None = None
    said: str = ""  # the status's details

    def __post_init__(self) -> None:
        self._out: queue.SimpleQueue[link.ToReplica | None] = queue.SimpleQueue()
        self._call = rpc.LinkStub(self.channel).Attach(iter(self._out.get, None), metadata=self.secret.metadata)
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        code, said = grpc.StatusCode.OK, ""
        try:
            for message in self._call:
                with self._changed:
                    self.messages.append(message)
                    self._changed.notify_all()
        except grpc.RpcError as e:
            code, said = e.code(), e.details()  # pyright: ignore[reportAttributeAccessIssue]
        with self._changed:
            self.ended, self.said = code, said or ""
            self._changed.notify_all()

    def send(self, **what: Any) -> None:
        """A message of one kind: `start=...`."""
        self._out.put(link.ToReplica(**what))

    def start(self, rid: int, request: Request, version: Version | None = None) -> None:
        """A request."""
        self.send(start=wire.start(rid, request, version))

    def close(self) -> None:
        """Ends the stream."""
        self._out.put(None)
        self._call.cancel()

    def until(self, true: Callable[[Router], Any], timeout_s: float = 60.0) -> Any:
        """Waits for something that came; fails when nothing more can come."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while not (found := true(self)):
                assert self.ended is None, f"the stream has ended: {self.ended} {self.said}"
                assert self._changed.wait(end - time.monotonic()), f"not within {timeout_s} s"
        return found

    def until_ended(self) -> grpc.StatusCode:
        """Waits for the end of the stream."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended is not None, 60)
        assert self.ended is not None
        return self.ended

    def tokens(self, rid: int) -> list[link.Token]:
        """All of a request, in the order they came."""
        return [token for message in self.messages for token in message.tokens if token.rid == rid]

    def failures(self, rid: int) -> list[link.Failure]:
        """Those of a request."""
        return [failure for message in self.messages for failure in message.failures if failure.rid == rid]

    def finished(self, rid: int, completions: int = 1) -> bool:
        """Whether so many completions of a request have ended."""
        return len([token for token in self.tokens(rid) if token.finish_reason]) >= completions

    def whole(self, rid: int, completions: int = 1) -> list[link.Token]:
        """Waits for the end of a request; its tokens."""
        self.until(lambda r: r.failures(rid) or r.finished(rid, completions))
        assert not self.failures(rid), self.failures(rid)
        return self.tokens(rid)


def outputs(tokens: list[link.Token], index: int = 0) -> list[int]:
    """A completion's token ids, whose positions have no gap."""
    mine = [token for token in tokens if token.index == index and token.HasField("id")]
    assert [token.position for token in mine] == list(range(mine[0].position, mine[0].position + len(mine)))
    return [token.id for token in mine]


def done_of(tokens: list[link.Token], request: Request) -> tuple[Done, ...]:
    """What has been delivered, as a router counts it."""
    found = []
    for index in range(request.sampling.n):
        mine = [token for token in tokens if token.index == index]
        found.append(Done(tuple(t.id for t in mine if t.HasField("id")), any(t.finish_reason for t in mine)))
    return tuple(found)


def events_of(tokens: list[link.Token]) -> list[TokenEvent]:
    """As a router's front sees them."""
    return [wire.event(token, "r", 0) for token in tokens]
