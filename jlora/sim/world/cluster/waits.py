"""The calls of a thread that waits for their answers, as `grpc.Channel`'s, for fibers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import grpc

from jlora.sim.world.cluster.fibers import Fibers
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.net import WINDOW, Net, Status, Stream, Wires

CANCELLED: Status = (grpc.StatusCode.CANCELLED, "Locally cancelled")
ROOM_S = 0.01  # between two looks whether a message has room


class Failed(grpc.RpcError):
    """A call that has ended with a status."""

    def __init__(self, status: Status):
        super().__init__(status)
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str:
        return self._status[1]


class Answer:
    """A call under way, as `grpc.Future`."""

    def __init__(self, fibers: Fibers, stream: Stream, unpack: Callable[[bytes], Any]):
        self._fibers, self._stream, self._unpack = fibers, stream, unpack
        self._waiting: list[Callable[[], None]] = []
        self._item: bytes | Status | None = None
        stream.down.listener = self._came

    def _came(self, item: bytes | Status) -> None:
        if self._item is None:
            self._item = item
            for wake in self._waiting:
                wake()

    def result(self, timeout: float = math.inf) -> Any:
        if self._item is None:
            self._fibers.wait(self._waiting, timeout)
        if self._item is None:
            raise grpc.FutureTimeoutError
        if isinstance(self._item, bytes):
            return self._unpack(self._item)
        raise Failed(self._item)

    def add_done_callback(self, told: Callable[[Answer], object]) -> None:
        """Calls it on a thread of gRPC's."""
        begin = partial(self._fibers.start, "grpc", lambda: told(self))
        if self._item is None:
            self._waiting.append(begin)
        else:
            begin()

    def cancel(self) -> bool:
        self._came(CANCELLED)
        self._stream.up.later(self._stream.cancel_handler)
        return True

    def expire(self) -> None:
        """Its time is over."""
        self._came((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


class Streaming:
    """A stream under way, as the iterator that `grpc.StreamStreamMultiCallable` returns."""

    def __init__(self, fibers: Fibers, stream: Stream, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]):
        self._fibers, self._stream, self._pack, self._unpack = fibers, stream, pack, unpack
        self._waiting: list[Callable[[], None]] = []
        self._items: deque[bytes] = deque()
        self._status: Status | None = None
        stream.down.listener = self._came

    def _came(self, item: bytes | Status) -> None:
        if self._status is None:
            if isinstance(item, bytes):
                self._items.append(item)
            else:
                self._status = item
            for wake in self._waiting:
                wake()

    def send(self, messages: Iterable[Any]) -> None:
        """All of them, each when there is room; a fiber of its own calls."""
        up = self._stream.up
        for message in messages:
            while up.unread > WINDOW and self._status is None:
                self._fibers.wait([], ROOM_S)
            if self._status is not None:
                return
            data = self._pack(message)
            self._stream.first = self._stream.first or data
            up.send(data)
        up.send((grpc.StatusCode.OK, ""))

    def __iter__(self) -> Streaming:
        return self

    def __next__(self) -> Any:
        if not self._items and self._status is None:
            self._fibers.wait(self._waiting, math.inf)
        if self._items:
            data = self._items.popleft()
            self._stream.down.unread -= len(data)
            self._stream.down.wake_writer()
            return self._unpack(data)
        assert self._status is not None
        if self._status[0] is grpc.StatusCode.OK:
            raise StopIteration
        raise Failed(self._status)

    def cancel(self) -> bool:
        self._items.clear()
        self._came(CANCELLED)
        self._stream.up.later(self._stream.cancel_handler)
        return True


class Unary:
    """A method, as `grpc.UnaryUnaryMultiCallable`."""

    def __init__(self, begin: Callable[[Any, float], Answer]):
        self._begin = begin

    def future(self, message: Any, timeout: float) -> Answer:
        return self._begin(message, timeout)


class Waits(Wires):
    """The login of a process whose fibers call."""

    __slots__ = ("_fibers",)

    def __init__(self, net: Net, client: Loop, fibers: Fibers):
        super().__init__(net, client)
        object.__setattr__(self, "_fibers", fibers)

    def channel(self, server: str, options: Sequence[tuple[str, Any]] = ()) -> Any:
        pings = dict(options)
        alive_s = sum(pings.get(f"grpc.keepalive_{part}_ms", math.inf) for part in ("time", "timeout")) / 1e3
        return Channel(self._net, self._client, self._fibers, server, alive_s)


class Channel:
    """A connection for fibers."""

    def __init__(self, net: Net, client: Loop, fibers: Fibers, address: str, alive_s: float):
        """`alive_s`: after which it is seen to be gone."""
        self._net, self._client, self._fibers, self._address = net, client, fibers, address
        self._alive_s = alive_s
        self._calls: list[Answer | Streaming] = []

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Unary:
        def begin(message: Any, timeout: float) -> Answer:
            stream = self._net.open(self._client, self._address, method, ())
            stream.waited, stream.alive_s = True, self._alive_s
            answer = Answer(self._fibers, stream, response_deserializer)
            stream.up.send(request_serializer(message))
            self._net.time.after(timeout, answer.expire)
            self._calls.append(answer)
            return answer

        return Unary(begin)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def begin(messages: Iterable[Any]) -> Streaming:
            stream = self._net.open(self._client, self._address, method, ())
            stream.alive_s = self._alive_s
            streaming = Streaming(self._fibers, stream, request_serializer, response_deserializer)
            self._fibers.start("grpc", lambda: streaming.send(messages))
            self._calls.append(streaming)
            return streaming

        return begin

    def unary_stream(self, *_: Any, **__: Any) -> None:
        """A stub has such methods too; no fiber calls one."""

    def close(self) -> None:
        for call in self._calls:
            call.cancel()
