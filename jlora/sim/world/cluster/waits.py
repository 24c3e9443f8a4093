"""The calls of a thread that waits for their answers, as `grpc.Channel`'s, for fibers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from jlora.sim.world.cluster.fibers import Fibers
from jlora.sim.world.cluster.loop import Loop
from jlora.sim.world.cluster.net import Net, Status, Stream, Wires


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

    def result(self, timeout: float) -> Any:
        if self._item is None:
            self._waiting = []
            self._fibers.wait(self._waiting, timeout)
        if self._item is None:
            raise grpc.FutureTimeoutError
        if isinstance(self._item, bytes):
            return self._unpack(self._item)
        raise Failed(self._item)

    def cancel(self) -> bool:
        self._came((grpc.StatusCode.CANCELLED, "Locally cancelled"))
        self._stream.up.later(self._stream.cancel_handler)
        return True

    def expire(self) -> None:
        """Its time is over."""
        self._came((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


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
        self._calls: list[Answer] = []

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

    def unary_stream(self, *_: Any, **__: Any) -> None:
        """A stub has such methods too; no fiber calls one."""

    def close(self) -> None:
        for call in self._calls:
            call.cancel()
