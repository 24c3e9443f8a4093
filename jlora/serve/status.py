"""Errors as gRPC status codes, in one place: servicers just raise.

A `JloraError` becomes its code and its message. Any other error is our bug: the client gets INTERNAL
and an opaque id, and the log gets the same id with the trace.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError

from jlora import errors
from jlora.serve.access.caller import Caller, Need
from jlora.serve.backend import Backend
from jlora.serve.keyless import Keyless
from jlora.serve.observed import trace_of
from jlora.serve.proto.jlora_pb2 import DESCRIPTOR
from jlora.serve.unread import Unread
from jlora.serve.wire import check_fields

log = logging.getLogger(__name__)

T = TypeVar("T")

PACKAGE = "/jlora.v1."
KEYLESS = ("/grpc.health.", "/grpc.reflection.")
QUEUED = frozenset({f"{PACKAGE}Inference/Generate", f"{PACKAGE}Inference/GenerateStream"})
# What a client with any key may call; every other call needs an admin's key.
NEEDS: Mapping[str, Need] = {
    **dict.fromkeys(QUEUED, Need.KEY),
    f"{PACKAGE}Inference/Prefetch": Need.KEY,
    f"{PACKAGE}Inference/Tokenize": Need.KEY,
    f"{PACKAGE}Inference/Detokenize": Need.KEY,
    f"{PACKAGE}Adapters/ListAdapters": Need.KEY,
    f"{PACKAGE}Adapters/GetAdapter": Need.KEY,
    f"{PACKAGE}Control/GetServerInfo": Need.KEY,
    f"{PACKAGE}Control/GetCacheState": Need.SIGHT,
    f"{PACKAGE}Control/Abort": Need.END,  # of the tenant's own requests
}

# gRPC sends a message as one percent-encoded header, and peers take 8 KiB of headers.
MESSAGE_BYTES = 6000
# A message that does not fit keeps both ends, where the field and the limit are. A character takes at most 12 bytes.
MESSAGE_END = MESSAGE_BYTES // 24


# Counts a tenant's call until it ends, from before its message.
Begin = Callable[[], AbstractContextManager[None]]
# Counts a call with so many bytes until it ends.
Enter = Callable[[int], AbstractContextManager[object]]


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
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
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
    """Wraps each handler of `jlora.v1`, so that an exception becomes a status; health and reflection are bounded.

    Other services look after themselves.

    A call that finds the server full is refused before its message is read. A call ends whose message has not
    arrived in `stall_s` seconds, and a stream whose client reads nothing for so long; so does the connection of a
    client that leaves many ended calls unread.
    """

    def __init__(self, backend: Backend, stall_s: float):
        self._backend = backend
        self._stall_s = stall_s
        self._unread = Unread(stall_s)
        self._keyless = Keyless(self._unread)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return _unknown(self._unread)
        if not method.startswith(PACKAGE):
            return self._keyless.bounded(handler, method) if method.startswith(KEYLESS) else handler
        counts = method not in QUEUED
        try:
            sent = [v for k, v in handler_call_details.invocation_metadata or () if k == "authorization"]
            caller = self._backend.access.admit(NEEDS.get(method, Need.ADMIN), [str(v) for v in sent], method)
            self._check_room(counts, caller.tenant)
        except errors.JloraError as e:
            return _refusal(e, method, self._unread)
        parse, write = _tolerant(handler.request_deserializer, method), partial(_written, handler.response_serializer)
        begin = partial(self._backend.access.call, caller, completes=not counts)
        enter = partial(self._backend.gate.call, counts=counts, tenant=caller.tenant)
        call = _Call(method, caller, begin, enter, self._stall_s, self._unread)
        # As handlers of streams both are called before there is a message, so that its arrival has a limit.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(call.stream(handler.unary_stream), parse, write)
        return grpc.stream_unary_rpc_method_handler(call.unary(handler.unary_unary), parse, write)

    def _check_room(self, counts: bool, tenant: str | None) -> None:
        if counts:
            self._backend.gate.check_calls(tenant)
        elif self._backend.replica is not None:  # otherwise the handler says that it loads
            self._backend.gate.check_completions(self._backend.room, tenant=tenant)


def _unknown(unread: Unread) -> grpc.RpcMethodHandler:
    """As gRPC itself answers; but the end counts until the client takes it."""

    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        unread.ends(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    return grpc.stream_stream_rpc_method_handler(refuse)


def _refusal(error: errors.JloraError, method: str, unread: Unread) -> grpc.RpcMethodHandler:
    """Answers without the client's message: only a handler of streams is called before there is one."""

    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        unread.ends(context)
        await _abort(context, error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Received(NamedTuple):
    """A client's message, and how many bytes it came in."""

    message: Any  # or why it is none
    size: int

    def parsed(self) -> Any:
        if isinstance(self.message, errors.InvalidArgument):
            raise self.message
        return self.message


def _tolerant(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], _Received]:
    """A parser that raises nothing: gRPC would answer INTERNAL, the handler answers INVALID_ARGUMENT."""
    service, _, name = method.removeprefix(PACKAGE).partition("/")
    kind = DESCRIPTOR.services_by_name[service].methods_by_name[name].input_type

    def read(data: bytes) -> _Received:
        try:
            check_fields(data, kind)
            return _Received(parse(data), len(data))
        except errors.InvalidArgument as e:
            return _Received(e, len(data))
        except DecodeError:
            said = "request: is not a valid protobuf message of its type (strings are UTF-8)"
            return _Received(errors.InvalidArgument(said), len(data))

    return read


def _written(write: Callable[[Any], bytes], answer: Any) -> bytes:
    """A message's bytes; a handler makes those of a long one itself, in many turns of the loop."""
    return answer if isinstance(answer, bytes) else write(answer)


async def _receive(context: grpc.aio.ServicerContext, stall_s: float) -> _Received:
    try:
        async with asyncio.timeout(stall_s):
            received = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the message has not arrived in serve.stall_s = {stall_s:g} s") from None
    if not isinstance(received, _Received):
        raise errors.InvalidArgument("request: the call ended without a message")
    return received


@dataclass(frozen=True, slots=True)
class Context:
    """A handler's view of its call: gRPC's context, and the caller."""

    grpc: grpc.aio.ServicerContext
    caller: Caller

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None without one."""
        return self.grpc.time_remaining()

    @property
    def trace(self) -> Mapping[str, str]:
        """The caller's trace context."""
        return trace_of(self.grpc.invocation_metadata() or ())


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, admitted before its message is read."""

    method: str
    caller: Caller
    begin: Begin
    enter: Enter
    stall_s: float
    unread: Unread

    def unary(self, inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(_: AsyncIterator[_Received], context: grpc.aio.ServicerContext) -> Any:
            try:
                with self.begin():
                    received = await _receive(context, self.stall_s)
                    with self.enter(received.size):
                        answering = inner(received.parsed(), Context(context, self.caller))
                        del received  # a handler may drop its message, which can be far larger than what it reads
                        answer = await answering
                self.unread.ends(context)
                return answer
            except ENDS:
                raise
            except BaseException as e:  # a tokenizer's panic is no Exception, and SystemExit would end the loop
                await self._fail(context, e)

        return call

    def stream(self, inner: Callable[..., AsyncGenerator[Any]]) -> Callable[..., Awaitable[None]]:
        async def call(_: AsyncIterator[_Received], context: grpc.aio.ServicerContext) -> None:
            head = _Head(context)
            try:
                with self.begin():
                    received = await _receive(context, self.stall_s)
                    with self.enter(received.size):
                        responses = inner(received.parsed(), Context(context, self.caller))
                        del received  # as above
                        await self._send(responses, context, head)
                self.unread.ends(context)
            except ENDS:
                raise
            except BaseException as e:
                await self._fail(context, e, head)

        return call

    async def _send(self, responses: AsyncGenerator[Any], context: grpc.aio.ServicerContext, head: _Head) -> None:
        async with aclosing(responses), _Patience(self.stall_s) as patience:
            async for response in responses:
                if not head.begun:
                    await patience.sent(head.send())
                await patience.sent(context.write(response))

    async def _fail(self, context: grpc.aio.ServicerContext, error: BaseException, head: _Head | None = None) -> None:
        self.unread.ends(context)  # the client may leave this unread, too
        if head is not None:
            await head.over()
        await _abort(context, self.caller.told(error), self.method)


class _Head:
    """A stream's head. It goes by itself: or gRPC could not end a stream that stalls in its first message.

    It waits for what the connection has not taken, also of other calls, and until it has gone gRPC cannot end the call.
    """

    def __init__(self, context: grpc.aio.ServicerContext):
        self._context = context
        self._sending: asyncio.Future[None] | None = None

    @property
    def begun(self) -> bool:
        return self._sending is not None

    async def send(self) -> None:
        """Sends it; it goes on if this is cancelled."""
        self._sending = asyncio.ensure_future(self._context.send_initial_metadata(()))
        self._sending.add_done_callback(lambda head: head.cancelled() or head.exception())  # or asyncio would log it
        await asyncio.shield(self._sending)

    async def over(self) -> None:
        """Waits until none is on its way."""
        if self._sending is not None:
            await asyncio.wait((self._sending,))


async def _abort(context: grpc.aio.ServicerContext, error: BaseException, method: str) -> None:
    """Ends the call; gRPC raises its own error once the handler has returned."""
    code, details = status_of(error, method)
    hint: tuple[tuple[str, str], ...] = ()
    if isinstance(error, errors.Busy):  # the second is what gRPC's own retries read
        wait_s = error.retry_s
        hint = (("retry-after", str(math.ceil(wait_s))), ("grpc-retry-pushback-ms", str(math.ceil(wait_s * 1e3))))
    try:
        await context.abort(code, details, hint)
    except grpc.aio.AbortError as aborted:
        # The context keeps it. The frames of the handler hold the context and the message: with them it is a cycle.
        aborted.__traceback__ = aborted.__context__ = None
    except grpc.aio.InternalError:  # the deadline has just passed, or the client left: nobody can be told
        raise asyncio.CancelledError from error


class _Patience:
    """Ends a call whose client reads nothing for `serve.stall_s` seconds, for the task that enters it.

    It has one timer for the whole call: one for each message would cost a tenth of the message.
    """

    def __init__(self, stall_s: float):
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when what is being sent began
        self._stalled = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._stall_s, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()

    async def sent(self, sending: Awaitable[None]) -> None:
        """Waits until it is sent: once the client has read enough of what came before (HTTP/2's flow control)."""
        self._since = self._loop.time()
        try:
            await sending
        except asyncio.CancelledError:
            if not self._stalled or self._task is None or self._task.uncancel():
                raise
            limit = f"serve.stall_s = {self._stall_s:g} s"
            raise errors.ResourceExhausted(f"the client has read nothing for {limit}") from None
        finally:
            self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since < self._stall_s:
            self._timer = self._loop.call_at(since + self._stall_s, self._look)
        elif self._task is not None:
            self._stalled = True
            self._task.cancel()
