"""One HTTP request: its body within bounds, and its answer as JSON or as server-sent events."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.types import Message, Receive, Scope, Send

from jlora.config import ServeConfig
from jlora.errors import InvalidArgument, PermissionDenied, ResourceExhausted
from jlora.serve.access.caller import ANYBODY, Need
from jlora.serve.backend import Backend
from jlora.serve.http import failures
from jlora.serve.http.encoding import PIECE, encode
from jlora.serve.status import DeadlineExceeded

JSON = "application/json"
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class _Gone(Exception):
    """The client has closed its connection."""


class Call:
    """What a handler sees of its request, and the ways to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServeConfig):
        self.body = b""
        self.caller = ANYBODY  # the endpoint says who
        self.names: Mapping[str, str] = {}  # what the client calls a field that the shared code calls otherwise
        self.leaves: Callable[[], bool] = lambda: False  # whether the client had better connect elsewhere
        self.matched: Mapping[str, str] = scope.get("path_params", {})  # what the route's pattern matched
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        self._receive = receive
        self._send = send
        self._config = config
        self._cut: Callable[[], None] = scope["state"]["cut"]
        self._started = False

    @property
    def size(self) -> int:
        """Bytes of the body that the client declares, or the most that it may send. Raises BodyTooLarge."""
        most = int(self._config.max_request_mib * 2**20)
        size = int(self.headers.get("content-length", most if "transfer-encoding" in self.headers else 0))
        self._check_size(size)
        return size

    def _check_size(self, size: int) -> None:
        if size > self._config.max_request_mib * 2**20:
            limit = self._config.max_request_mib
            raise failures.BodyTooLarge(f"the body has {size} bytes, limit serve.max_request_mib = {limit:g}")

    async def read(self) -> None:
        """Takes the body. Raises BodyTooLarge, and DeadlineExceeded for one that does not arrive."""
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._config.stall_s):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._check_size(size)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise DeadlineExceeded(f"the body has not arrived in serve.stall_s = {self._config.stall_s:g} s") from None
        self.body = b"".join(parts)

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer."""
        await self.whole(msgspec.json.encode(value), status, {"content-type": JSON, **(headers or {})})

    async def long(self, make: Callable[[], Any]) -> None:
        """The whole answer that `make` returns. Both are made on a thread: they take a second for a long one."""
        pieces = await asyncio.to_thread(lambda: encode(make()))
        await self._all(pieces, 200, {"content-type": JSON})

    async def whole(self, content: bytes, status: int, headers: Mapping[str, str]) -> None:
        """The whole answer as bytes."""
        pieces = [content[at : at + PIECE] for at in range(0, max(1, len(content)), PIECE)]
        await self._all(pieces, status, headers)

    async def _all(self, pieces: Sequence[bytes], status: int, headers: Mapping[str, str]) -> None:
        """Each piece once the client has read of those before."""
        await self._start(status, {"content-length": str(sum(map(len, pieces))), **headers})
        for i, piece in enumerate(pieces, 1):
            await self._body(piece, more=i < len(pieces))

    async def write(self, events: bytes, more: bool = True) -> None:
        """Server-sent events, once the client has read enough of those before. Raises ResourceExhausted if not."""
        if not self._started:
            await self._start(200, EVENTS)
        await self._body(events, more)

    async def fail(self, error: BaseException, where: str) -> None:
        """An error as the answer, or as the last event of a stream, if the client reads it."""
        status, value, headers = failures.answer(self.caller.told(error), where, self.names)
        with suppress(ResourceExhausted):  # it reads nothing, and has been cut off
            if not self._started:
                await self.json(value, status, headers)
            else:
                await self._body(event(value) + DONE, more=False)

    async def gone(self) -> None:
        """Returns when the client has closed its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        if self.leaves():
            headers = {**headers, "connection": "close"}
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, content: bytes, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": content, "more_body": more})

    async def _put(self, message: Message) -> None:
        """Sends a part of the answer, once the client has read enough of what came before it on the connection."""
        try:
            async with asyncio.timeout(self._config.stall_s):
                await self._send(message)
        except TimeoutError:
            self._cut()  # closing would wait for the client to read
            limit = f"serve.stall_s = {self._config.stall_s:g} s"
            raise ResourceExhausted(f"the client has read nothing for {limit}") from None


Handler = Callable[[Call], Awaitable[None]]


class Endpoint:
    """One route as an ASGI application: admission, the body, the handler, and errors as answers.

    `need` is what the caller must have. `queued` says that a call wants completions: with a full queue it is
    refused before its body is read.
    """

    def __init__(self, handler: Handler, backend: Backend, config: ServeConfig, need: Need, queued: bool = False):
        self._handler = handler
        self._backend = backend
        self._config = config
        self._need = need
        self._queued = queued
        self._named = not (config.keys or config.insecure)  # a foreign name in `host` is no client's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send, self._config)
        call.leaves = lambda: self._backend.draining
        try:
            if self._named and self._need is not Need.NOTHING:
                _check_host(call.headers.get("host", ""))
            call.caller = self._backend.access.admit(self._need, _authorization(scope), scope["path"])
            await self._answer(call, scope["method"] == "POST")
        except _Gone:
            pass  # nobody is left to answer
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as e:  # a tokenizer's panic is no Exception, and SystemExit would end the loop
            await call.fail(e, scope["path"])

    async def _answer(self, call: Call, posted: bool) -> None:
        gate = self._backend.gate
        if self._need is Need.NOTHING:  # a health check gets through however busy the server is
            await _while_here(call, self._handler(call))
            return
        if self._queued and self._backend.replica is not None:  # otherwise the handler says that it loads
            gate.check_completions(self._backend.room, tenant=call.caller.tenant)
        tenant = self._backend.access.call(call.caller, self._queued)
        with tenant, gate.call(call.size, not self._queued, call.caller.tenant) as has:
            if posted:
                _check_type(call.headers.get("content-type", ""))
                _check_coding(call.headers.get("content-encoding", ""))
                await call.read()
                has(len(call.body))  # one in chunks has not said how long it is
            await _while_here(call, self._handler(call))


def _authorization(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]


def _check_host(given: str) -> None:
    """A browser takes a web page whose name leads to this machine for one of ours, and sends that name as `Host`."""
    try:
        name = urlsplit(f"//{given}").hostname or "localhost"
        if name != "localhost":
            ipaddress.ip_address(name)
    except ValueError:
        said = "without keys the server answers to localhost and to IP addresses (see serve.insecure)"
        raise PermissionDenied(f"host = {given[:60]!r}: {said}") from None


def _check_type(given: str) -> None:
    """A browser asks before it sends JSON to a foreign host; other types could come from any page."""
    if given.partition(";")[0].strip().lower() != JSON:
        raise InvalidArgument(f"content-type = {given[:60]!r}: must be {JSON}")


def _check_coding(given: str) -> None:
    if given.strip().lower() not in ("", "identity"):
        raise failures.BodyEncoded(f"content-encoding = {given[:60]!r}: must be identity; send the body as it is")


async def _while_here(call: Call, work: Awaitable[None]) -> None:
    """Runs `work` until it ends or the client has gone."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(call.gone())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait((working, gone))
    try:
        if not working.cancelled():
            working.result()
    finally:
        del working  # it holds its error, whose traceback holds this frame: a cycle
