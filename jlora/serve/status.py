"""Errors as gRPC status codes, in one place: servicers just raise.

A `JloraError` becomes its code and its message. Any other error is our bug: the client gets INTERNAL
and an opaque id, and the log gets the same id with the trace.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError

from jlora import errors
from jlora.serve.backend import Backend

log = logging.getLogger(__name__)

T = TypeVar("T")

PACKAGE = "/jlora.v1."
QUEUED = frozenset({f"{PACKAGE}Inference/Generate", f"{PACKAGE}Inference/GenerateStream"})

# gRPC sends a message as one percent-encoded header, and peers take 8 KiB of headers.
MESSAGE_BYTES = 6000
# A message that does not fit keeps both ends, where the field and the limit are. A character takes at most 12 bytes.
MESSAGE_END = MESSAGE_BYTES // 24


# Counts a call with so many bytes until it ends.
Enter = Callable[[int], AbstractContextManager[None]]


class DeadlineExceeded(errors.JloraError):
    """The client's deadline passed."""


CODES: Mapping[type[Exception], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
}


# How a handler ends when its client has gone or the server stops.
ENDS = (asyncio.CancelledError, GeneratorExit)


def status_of(error: BaseException, method: str) -> tuple[grpc.StatusCode, str]:
    """The code and message for a client."""
    if (code := entry_of(CODES, error)) is not None:
        return code, shortened(str(error))
    return grpc.StatusCode.INTERNAL, opaque(error, method)


def entry_of(table: Mapping[type[Exception], T], error: BaseException) -> T | None:
    """The entry of the error's class, or of the nearest one that it inherits from."""
    return next((table[cls] for cls in type(error).__mro__ if cls in table), None)


def opaque(error: BaseException, method: str) -> str:
    """What a client is told about our bug; the log gets the trace."""
    name = uuid.uuid4().hex[:12]
    log.error("internal error %s in %s", name, method, exc_info=error)
    return f"internal error {name}: the server's log has the details under this id"


def shortened(message: str) -> str:
    """The message, or both ends of one that is too long for a header: clients and files send values of any length."""
    message = message.encode("utf-8", "backslashreplace").decode()  # a file's name may not be UTF-8
    if len(message) <= MESSAGE_BYTES and len(quote(message, safe=" ")) <= MESSAGE_BYTES:
        return message
    return f"{message[: MESSAGE_END - 1]}…{message[-MESSAGE_END:]}"


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler of `jlora.v1` (not health and reflection), so that an exception becomes a status.

    A call that finds the server full is refused before its message is read. A call ends whose message has not
    arrived in `stall_s` seconds, and a stream whose client reads nothing for so long.
    """

    def __init__(self, backend: Backend, stall_s: float):
        self._backend = backend
        self._stall_s = stall_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(PACKAGE):
            return handler
        try:
            self._check_room(method)
        except errors.ResourceExhausted as e:
            return _refusal(e, method)
        parse, write = _tolerant(handler.request_deserializer), handler.response_serializer
        enter = partial(self._backend.gate.call, counts=method not in QUEUED)
        # As handlers of streams both are called before there is a message, so that its arrival has a limit.
        if handler.response_streaming:
            call = _stream(handler.unary_stream, method, enter, self._stall_s)
            return grpc.stream_stream_rpc_method_handler(call, parse, write)
        call = _unary(handler.unary_unary, method, enter, self._stall_s)
        return grpc.stream_unary_rpc_method_handler(call, parse, write)

    def _check_room(self, method: str) -> None:
        if method not in QUEUED:
            self._backend.gate.check_calls()
        elif self._backend.replica is not None:  # otherwise the handler says that it loads
            self._backend.gate.check_completions(self._backend.room)


def _refusal(error: errors.ResourceExhausted, method: str) -> grpc.RpcMethodHandler:
    """Answers without the client's message: only a handler of streams is called before there is one."""

    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.abort(*status_of(error, method))

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Received(NamedTuple):
    """A client's message, and how many bytes it came in."""

    message: Any  # None: they are no message
    size: int

    def parsed(self) -> Any:
        if self.message is None:
            raise errors.InvalidArgument("request: is not a valid protobuf message of its type (strings are UTF-8)")
        return self.message


def _tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], _Received]:
    """A parser that raises nothing: gRPC would answer INTERNAL, the handler answers INVALID_ARGUMENT."""

    def read(data: bytes) -> _Received:
        try:
            return _Received(parse(data), len(data))
        except DecodeError:
            return _Received(None, len(data))

    return read


async def _receive(context: grpc.aio.ServicerContext, stall_s: float) -> _Received:
    try:
        async with asyncio.timeout(stall_s):
            received = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the message has not arrived in serve.stall_s = {stall_s:g} s") from None
    if not isinstance(received, _Received):
        raise errors.InvalidArgument("request: the call ended without a message")
    return received


def _unary(
    inner: Callable[..., Awaitable[Any]], method: str, enter: Enter, stall_s: float
) -> Callable[..., Awaitable[Any]]:
    async def call(_: AsyncIterator[_Received], context: grpc.aio.ServicerContext) -> Any:
        try:
            received = await _receive(context, stall_s)
            with enter(received.size):
                answer = inner(received.parsed(), context)
                del received  # a handler may drop its message, which can be far larger than what it reads
                return await answer
        except ENDS:
            raise
        except BaseException as e:  # a tokenizer's panic is no Exception, and SystemExit would end the loop
            await context.abort(*status_of(e, method))

    return call


def _stream(
    inner: Callable[..., AsyncGenerator[Any]], method: str, enter: Enter, stall_s: float
) -> Callable[..., Awaitable[None]]:
    async def call(_: AsyncIterator[_Received], context: grpc.aio.ServicerContext) -> None:
        begun = False
        try:
            received = await _receive(context, stall_s)
            with enter(received.size):
                responses = inner(received.parsed(), context)
                del received  # as above
                async with aclosing(responses):
                    async for response in responses:
                        if not begun:  # by itself: or gRPC could not end a stream that stalls in its first message
                            await context.send_initial_metadata(())
                            begun = True
                        await _write(response, context, stall_s)
        except ENDS:
            raise
        except BaseException as e:
            await context.abort(*status_of(e, method))

    return call


async def _write(response: Any, context: grpc.aio.ServicerContext, stall_s: float) -> None:
    """Sends a message once the client has read enough of those before it (HTTP/2's flow control)."""
    try:
        async with asyncio.timeout(stall_s):
            await context.write(response)
    except TimeoutError:
        raise errors.ResourceExhausted(f"the client has read nothing for serve.stall_s = {stall_s:g} s") from None
