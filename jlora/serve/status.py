"""Errors as gRPC status codes, in one place: servicers just raise.

`StatusInterceptor` wraps every method of `jlora.v1`. A `JloraError` becomes its code with its
message. Anything else is our own bug: the client gets INTERNAL and an opaque id, the log gets the
same id with the trace. A request that is not valid protobuf is the client's mistake, too.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jlora import errors

log = logging.getLogger(__name__)

PACKAGE = "/jlora.v1."

# A message is one header, of which peers take 8 KiB, percent-encoded: a character may become 12 bytes.
# The field stands at a message's front, the limit at its end.
MESSAGE_HEAD, MESSAGE_TAIL = 400, 200


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


def status_of(error: Exception, method: str) -> tuple[grpc.StatusCode, str]:
    """The code and message for a client; an unexpected error is logged here under its id."""
    for cls in type(error).__mro__:
        if cls in CODES:
            return CODES[cls], shortened(str(error))
    opaque = uuid.uuid4().hex[:12]
    log.error("internal error %s in %s", opaque, method, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"internal error {opaque}: the server's log says more under this id"


def shortened(message: str) -> str:
    """The message as a header can carry it: what a client sent, or a file holds, may be of any length.

    File names that are not UTF-8 have characters here that no encoding takes; they show as escapes.
    """
    if len(message) > MESSAGE_HEAD + MESSAGE_TAIL:
        message = f"{message[: MESSAGE_HEAD - 1]}…{message[-MESSAGE_TAIL:]}"
    return message.encode("utf-8", "backslashreplace").decode()


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler of `jlora.v1` so that what it raises becomes a status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The same handler, wrapped; those of other packages (health, reflection) as they are."""
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(PACKAGE):
            return handler
        parse, write = _tolerant(handler.request_deserializer), handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, method), parse, write)
        return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, method), parse, write)


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that could not be read."""


def _tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC would answer INTERNAL if parsing raised; the handler answers better."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Malformed()

    return read


def _check(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise errors.InvalidArgument("request: is not a valid protobuf message of its type (strings are UTF-8)")


def _unary(inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            _check(request)
            return await inner(request, context)
        except Exception as e:  # a cancelled call raises CancelledError, which is no Exception
            await context.abort(*status_of(e, method))

    return call


def _stream(inner: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            _check(request)
            async for response in inner(request, context):
                yield response
        except Exception as e:
            await context.abort(*status_of(e, method))

    return call
