"""Health and reflection need no key. Their open calls are bounded, so they take no room from callers with a key."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from jlora.serve.unread import Unread

MOST = 256  # open calls of each method, of all clients


class Keyless:
    """Bounds the calls of foreign handlers. One too many ends the oldest, so a health check always gets through."""

    def __init__(self, unread: Unread) -> None:
        self._unread = unread
        self._open: dict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)

    def bounded(self, handler: Any, method: str) -> grpc.RpcMethodHandler:
        """The handler, called before there is a message, so that a call without one can be ended."""

        async def call(_: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            calls = self._open[method]
            try:
                async with asyncio.timeout(None) as room:
                    if len(calls) >= MOST:
                        oldest = next(iter(calls))
                        del calls[oldest]
                        oldest.reschedule(0.0)
                    calls[room] = None
                    try:
                        answer = await self._answer(handler, context)
                    finally:
                        calls.pop(room, None)
            except TimeoutError:
                code, said = grpc.StatusCode.RESOURCE_EXHAUSTED, f"{method}: {MOST} calls have begun since"
                return await self._abort(context, code, said)
            self._unread.ends(context)
            return answer

        wrap = grpc.stream_stream_rpc_method_handler
        if not handler.response_streaming:
            wrap = grpc.stream_unary_rpc_method_handler
        return wrap(call, handler.request_deserializer, handler.response_serializer)

    async def _answer(self, handler: Any, context: grpc.aio.ServicerContext) -> Any:
        if handler.request_streaming:
            async with aclosing(handler.stream_stream(_messages(context), context)) as responses:
                async for response in responses:
                    await context.write(response)
            return None
        async for message in _messages(context):
            return await (handler.unary_stream or handler.unary_unary)(message, context)
        await self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, "request: the call ended without a message")

    async def _abort(self, context: grpc.aio.ServicerContext, code: grpc.StatusCode, details: str) -> None:
        self._unread.ends(context)  # the client may leave this unread, too
        await context.abort(code, details)


async def _messages(context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
    end = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
    while (message := await context.read()) is not end:
        yield message
