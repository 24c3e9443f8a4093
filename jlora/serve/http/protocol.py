"""uvicorn's HTTP/1.1 connection with bounds of ours."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES = 64 << 10  # of a request's line and headers
HEAD_S = 30.0  # for a head to arrive
IDLE_S = 75  # between two requests: longer than load balancers and clients keep one, so that they close it
CONNECTIONS = 4096  # open at once: each holds a descriptor


class Connection(HttpToolsProtocol):
    """One connection: the server bounds their number, and the size and time of each request's head.

    A connection has one request at a time, and its handler can cut it off.

    A client that sends a request before it has the answer to the one before (pipelining) is cut off: uvicorn would
    not notice that it has gone while the first one runs.

    A request to go on in another protocol (`Upgrade`) is answered in this one, as RFC 9110 allows. Java's client asks
    for HTTP/2 so, with the body of its call behind the head.
    """

    _unfinished = 0  # bytes of a head so far
    _borders = 0  # ends of heads and of messages so far; an even number: a head is on its way

    _late: asyncio.TimerHandle | None = None  # cuts the connection if the head does not arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def data_received(self, data: bytes) -> None:
        before = self._borders
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        within = before == self._borders and before % 2 == 0
        self._unfinished = self._unfinished + len(data) if within else 0
        if within and (self.cycle is None or self.cycle.response_complete):
            self._expect()  # empty lines before a head begin no message, and uvicorn takes them for one
        if self._unfinished > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head passes {HEAD_BYTES} bytes.")

    def _parse(self, data: bytes) -> None:
        """Reads a head with `Upgrade` again without it: to the parser the message is over, and its body another one."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if self.transport.is_closing():
                return
            if method == b"CONNECT":
                self.send_400_response("CONNECT is not supported.")
                return
            lines = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
            head = [b"%s %s HTTP/%s" % (method, self.url, version), *lines, b"", b""]
            # A new parser: this one takes nothing more if the connection is to close.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self._parse(b"\r\n".join(head) + data[e.args[0] :])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect()
        self.scope["state"]["cut"] = self.transport.abort  # pyright: ignore[reportTypedDictNotRequiredAccess]

    def on_headers_complete(self) -> None:
        self._arrived()
        self._borders += 1
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        elif not self.parser.should_upgrade():
            if self.parser.get_http_version() == "1.0":
                self.app = partial(_unchunked, self.app)  # the connection's last call
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
        self._borders += 1


async def _unchunked(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Runs `app` for a client of HTTP/1.0: a body without a length ends with the connection.

    uvicorn would send it in chunks, and takes no more of a body without them than its length.
    """
    cycle: RequestResponseCycle = send.__self__

    async def plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            sized = any(name == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if sized else False
        else:
            cycle.expected_content_length = max(cycle.expected_content_length, len(message["body"]))
        await send(message)

    await app(scope, receive, plain)
