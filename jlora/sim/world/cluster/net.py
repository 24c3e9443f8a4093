"""A modelled network that carries the product's own gRPC messages, as bytes, between modelled processes.

A stream is two pipes. Each keeps its order and delays what it carries; different pipes overtake each other. A pipe
holds up to `WINDOW` bytes that nobody has read; then its writer waits, as gRPC's flow control has it.

What can go wrong between two processes: a *slow* path, a *cut* one (what is sent arrives when it heals, as TCP's
retransmissions do), a *reset* (both ends learn it, what was on its way is lost), a *half-open* stream (one end learns
nothing), and an old hello that comes late.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from jlora.errors import JloraError
from jlora.serve.access.caller import Caller
from jlora.serve.client import Login
from jlora.serve.status import status_of
from jlora.sim.world.cluster.loop import Loop, Time

EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
WINDOW = 2 << 10  # as small as the traffic
DELAY_S = (0.0001, 0.002)  # of a message, one way
WRITE_S = (0.0001, 0.02)  # that some writes take
Status = tuple[grpc.StatusCode, str]
RESET: Status = (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
REFUSED: Status = (grpc.StatusCode.UNAVAILABLE, "failed to connect: Connection refused")


class Aborted(Exception):
    """A handler has ended its call with a status."""


@dataclass(slots=True, eq=False)
class Path:
    """Between two processes, both ways."""

    cut: bool = False
    slow: tuple[float, float] = DELAY_S
    stuck: deque[Callable[[], None]] = field(default_factory=deque)  # arrivals that wait until it heals

    def arrive(self, what: Callable[[], None]) -> None:
        if self.cut:
            self.stuck.append(what)
        else:
            what()

    def heal(self) -> None:
        self.cut, self.slow = False, DELAY_S
        while self.stuck:
            self.stuck.popleft()()


class Pipe:
    """One direction of a stream. Items are bytes or a final `Status`; a `listener` takes them as they come."""

    def __init__(self, net: Net, path: Path, reader: Loop):
        self.unread = 0
        self.broken = False
        self.listener: Callable[[bytes | Status], None] | None = None
        self._net, self._path, self._reader = net, path, reader
        self._inbox: deque[bytes | Status] = deque()
        self._last = 0.0  # nothing sent arrives before
        self._waiting: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    def send(self, item: bytes | Status) -> None:
        if isinstance(item, bytes):
            self.unread += len(item)
        self.later(lambda: self._arrive(item))

    def later(self, what: Callable[[], None]) -> None:
        """Does something at the other end, behind all that was sent."""
        self._last = max(self._last, self._net.time.now + self._net.draw.uniform(*self._path.slow))
        self._net.time.at(self._last, lambda: self._path.arrive(what))

    @property
    def late(self) -> bool:
        """Whether something is on its way that was sent while the path was slow."""
        return self._last > self._net.time.now + DELAY_S[1]

    def lose(self, status: Status) -> None:
        """The reader gets a status at once, and nothing of what was on its way."""
        self.broken = True
        self._inbox.clear()
        self._put(status)

    async def get(self) -> bytes | Status:
        while not self._inbox:
            self._waiting = self._reader.create_future()
            await self._waiting
        item = self._inbox.popleft()
        if isinstance(item, bytes):
            self.unread -= len(item)
            self.wake_writer()
        return item

    async def room(self, writer: Loop) -> None:
        """Waits while too much is unread, and always for a moment."""
        await asyncio.sleep(0.0 if self._net.draw.random() < 0.5 else self._net.draw.uniform(*WRITE_S))
        while self.unread > WINDOW and not self.broken:
            self._room = writer.create_future()
            await self._room

    def wake_writer(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _arrive(self, item: bytes | Status) -> None:
        if not self.broken:
            self._put(item)

    def _put(self, item: bytes | Status) -> None:
        if self._reader.dead:
            return
        if self.listener is not None:
            self.listener(item)
            return
        self._inbox.append(item)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Stream:
    """A call with messages both ways, from a client's process to a server's."""

    def __init__(self, net: Net, client: Loop | None, server: Loop, path: Path):
        """Without a client, what the server sends goes nowhere."""
        self.client, self.server, self.path = client, server, path
        self.waited = False  # a thread waits for its one answer
        self.alive_s = math.inf  # after which its client sees that the connection is gone
        self._net = net
        self.up = Pipe(net, path, server)
        self.down = Pipe(net, path, client or server)
        self.task: asyncio.Task[None] | None = None  # the handler
        self.over = False
        self.first: bytes | None = None
        self.address = self.method = ""

    def cancel_handler(self) -> None:
        """The server learns that the call has ended."""
        self.over = self.down.broken = True
        self.down.wake_writer()
        if self.task is not None and not self.server.dead:
            self.task.cancel()

    def reset(self, client: bool = True, server: bool = True) -> None:
        """The connection breaks; each end learns it or not."""
        if client:
            self.down.lose(RESET)
            self.up.broken = True
            self.up.wake_writer()
        if server:
            self.up.broken = True
            self.up.wake_writer()
            self.cancel_handler()
        if not client:
            self.fall_silent()

    def fall_silent(self) -> None:
        """Nobody tells the client that the connection is gone: its pings do, if it sends any."""
        if self.alive_s < math.inf:
            self._net.time.after(self.alive_s, partial(self.reset, True, False))


class Call:
    """The client's end, as `grpc.aio.StreamStreamCall`."""

    def __init__(self, stream: Stream, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]):
        self._stream, self._pack, self._unpack = stream, pack, unpack
        self._status: Status | None = None

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("the call has ended")
        data = self._pack(message)
        if self._stream.first is None:
            self._stream.first = data
        assert self._stream.client is not None
        await self._stream.up.room(self._stream.client)
        self._stream.up.send(data)

    async def read(self) -> Any:
        if self._status is None:
            try:
                item = await self._stream.down.get()
            except asyncio.CancelledError:
                self.cancel()
                raise
            if isinstance(item, bytes):
                return self._unpack(item)
            self._status = item
        if self._status[0] is grpc.StatusCode.OK:
            return EOF
        raise grpc.aio.AioRpcError(self._status[0], grpc.aio.Metadata(), grpc.aio.Metadata(), details=self._status[1])

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._status = (grpc.StatusCode.CANCELLED, "Locally cancelled")
        self._stream.up.later(self._stream.cancel_handler)
        return True


class Context:
    """The server's end, as `grpc.aio.ServicerContext`."""

    def __init__(self, stream: Stream, handler: grpc.RpcMethodHandler, metadata: Sequence[tuple[str, str]]):
        self._stream, self._handler, self._metadata = stream, handler, metadata

    @property
    def caller(self) -> Caller:
        """Everybody may do everything."""
        return Caller(None, True, True)

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    async def read(self) -> Any:
        item = await self._stream.up.get()
        assert isinstance(item, bytes)
        return self._handler.request_deserializer(item)  # pyright: ignore[reportOptionalCall]

    async def messages(self) -> AsyncIterator[Any]:
        """All that come."""
        while isinstance(item := await self._stream.up.get(), bytes):
            yield self._handler.request_deserializer(item)  # pyright: ignore[reportOptionalCall]

    async def write(self, message: Any) -> None:
        stream = self._stream
        if stream.over:
            raise asyncio.CancelledError
        await stream.down.room(stream.server)
        stream.down.send(self._handler.response_serializer(message))  # pyright: ignore[reportOptionalCall]

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._stream.down.send((code, details))
        raise Aborted(f"{code.name} {details}")


class Channel:
    """A client's connection to an address, as `grpc.aio.Channel`."""

    def __init__(self, net: Net, client: Loop, address: str):
        self._net, self._client, self._address = net, client, address
        self._calls: list[Call] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        for call in self._calls:
            call.cancel()

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def begin(metadata: Sequence[tuple[str, str]] = ()) -> Call:
            stream = self._net.open(self._client, self._address, method, metadata)
            call = Call(stream, request_serializer, partial(self._net.unpacked, stream, response_deserializer))
            self._calls.append(call)
            return call

        return begin


class Server:
    """What a process serves at an address; services are added as to a `grpc.aio.Server`."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self.handlers |= {f"/{service}/{method}": handler for method, handler in handlers.items()}


class Net:
    """All processes' addresses, the paths between them, and the streams that are open."""

    def __init__(self, time: Time, draw: random.Random):
        self.time, self.draw = time, draw
        self.failures: list[str] = []  # of handlers: each is a bug
        self.heard: Callable[[Stream, Any], None] = lambda stream, message: None  # of what clients read on streams
        self.streams: list[Stream] = []
        self.opened: deque[Stream] = deque(maxlen=40)
        self._servers: dict[str, Server] = {}
        self._paths: dict[tuple[str, str], Path] = {}

    def listen(self, address: str, server: Server) -> None:
        self._servers[address] = server

    def path(self, one: str, other: str) -> Path:
        """Between two processes, whatever lives they have."""
        return self._paths.setdefault((min(one, other), max(one, other)), Path())

    def between(self, one: str, other: str) -> list[Stream]:
        """Open streams."""
        self.streams = [s for s in self.streams if not s.over]
        names = {one, other}
        return [s for s in self.streams if s.client is not None and {s.client.name, s.server.name} == names]

    def calls(self) -> list[Stream]:
        """Those of threads, under way."""
        return [s for s in self.streams if s.waited and not s.over]

    def open(self, client: Loop, address: str, method: str, metadata: Sequence[tuple[str, str]]) -> Stream:
        """A call begins. Nobody listens: it is refused."""
        server = self._servers.get(address)
        path = self.path(client.name, server.loop.name if server is not None else address)
        stream = Stream(self, client, client if server is None else server.loop, path)
        stream.up.later(lambda: self._accept(stream, address, method, metadata))
        stream.address, stream.method = address, method
        self.streams.append(stream)
        self.opened.append(stream)
        return stream

    def unpacked(self, stream: Stream, unpack: Callable[[bytes], Any], data: bytes) -> Any:
        """A message that a client reads."""
        message = unpack(data)
        self.heard(stream, message)
        return message

    def late_hello(self, stream: Stream) -> None:
        """Sends a stream's first message again; nobody reads the answer."""
        ghost = Stream(self, None, stream.server, stream.path)
        assert stream.first is not None
        ghost.up.send(stream.first)
        self._accept(ghost, stream.address, stream.method, ())

    def died(self, loop: Loop, silent: bool) -> None:
        """A process is gone. Its peers learn it, unless its machine is gone too."""
        for stream in self.streams:
            if stream.over:
                continue
            if stream.server is loop:
                stream.over = True
                if silent:
                    stream.fall_silent()
                else:
                    self._tell(stream, client=True)
            elif stream.client is loop and not silent:
                self._tell(stream, client=False)

    def _tell(self, stream: Stream, client: bool) -> None:
        """One end learns that the other is gone."""
        reset = partial(stream.reset, client, not client)
        self.time.after(self.draw.uniform(*DELAY_S), lambda: stream.path.arrive(reset))

    def _accept(self, stream: Stream, address: str, method: str, metadata: Sequence[tuple[str, str]]) -> None:
        server = self._servers.get(address)
        if server is None or server.loop.dead or server.loop is not stream.server:
            stream.over = True
            stream.down.send(REFUSED)
            return
        handler = server.handlers[method]
        serve = self._serve if handler.stream_stream is not None else self._answer

        def begin() -> None:
            if not stream.over:
                work = serve(handler, stream, Context(stream, handler, metadata))
                stream.task = server.loop.create_task(work, name=method)

        server.loop.call_soon(begin)

    async def _serve(self, handler: grpc.RpcMethodHandler, stream: Stream, context: Context) -> None:
        method: Any = handler.stream_stream
        try:
            if inspect.isasyncgenfunction(method):
                async with aclosing(method(context.messages(), context)) as told:
                    async for message in told:
                        await context.write(message)
            else:
                await method(None, context)
            stream.down.send((grpc.StatusCode.OK, ""))
        except (Aborted, asyncio.CancelledError):
            pass  # `abort` has told the status; a cancelled stream's other end knows
        except Exception as e:
            self.failures.append(f"{stream.server.name}: a handler has failed: {type(e).__name__}: {e}")
            stream.down.send((grpc.StatusCode.UNKNOWN, str(e)))
        finally:
            stream.over = True

    async def _answer(self, handler: grpc.RpcMethodHandler, stream: Stream, context: Context) -> None:
        """A call of one message each way; errors as the server's interceptor maps them."""
        method: Any = handler.unary_unary
        try:
            answer = await method(await context.read(), context)
            stream.down.send(handler.response_serializer(answer))  # pyright: ignore[reportOptionalCall]
        except JloraError as e:
            stream.down.send(status_of(e, "unary"))
        except (Aborted, asyncio.CancelledError):
            pass  # it has told the status itself; or the call was reset or given up, and nobody waits for the answer
        except Exception as e:
            self.failures.append(f"{stream.server.name}: a handler has failed: {type(e).__name__}: {e}")
        finally:
            stream.over = True


class Wires(Login):
    """The login of a modelled process: it connects through the network."""

    __slots__ = ("_client", "_net")

    def __init__(self, net: Net, client: Loop):
        super().__init__()
        object.__setattr__(self, "_net", net)
        object.__setattr__(self, "_client", client)

    def aio(self, server: str, options: Sequence[tuple[str, Any]] = ()) -> Any:
        return Channel(self._net, self._client, server)
