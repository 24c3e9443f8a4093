"""Requests that ask to go on in another protocol: answered in HTTP/1.1, with every body where it belongs."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve._server import Served

# What Java's client sends by default if there is no TLS.
H2C = b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}).encode()


@pytest.fixture
def raw(served: Served) -> Iterator[socket.socket]:
    url = urlsplit(served.http)
    with socket.create_connection((url.hostname, url.port), timeout=60) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield made


def head(size: int | None, connection: bytes = b"Upgrade, HTTP2-Settings", version: bytes = b"1.1") -> bytes:
    """The head of a chat whose body has so many bytes (None: it comes in chunks)."""
    length = b"Transfer-Encoding: chunked" if size is None else b"Content-Length: %d" % size
    return (
        b"POST /v1/chat/completions HTTP/%s\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: %s\r\n%s%s\r\n\r\n" % (version, connection, H2C, length)
    )


def answer(raw: socket.socket) -> tuple[int, Any]:
    """The status and the JSON of the next answer."""
    response = HTTPResponse(raw)
    response.begin()
    content = response.read()
    return response.status, json.loads(content)


def closed(raw: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return raw.recv(1000) == b""
    return True


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("sent", ["at once", "body later", "in pieces"])
def test_a_chat_that_asks_for_http2_is_answered(served: Served, raw: socket.socket, chunked: bool, sent: str):
    first = head(None if chunked else len(CHAT))
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(CHAT), CHAT) if chunked else CHAT
    whole = first + body
    parts = {
        "at once": [whole],
        "body later": [first, body],
        "in pieces": [whole[at : at + 40] for at in range(0, len(whole), 40)],
    }[sent]
    texts = []
    for _ in range(2):  # the connection goes on
        for part in parts:
            raw.sendall(part)
            time.sleep(0.02)
        status, said = answer(raw)
        assert status == 200, said
        texts.append(said["choices"][0]["message"]["content"])
    raw.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer(raw)[1].keys() == {"version"}
    assert texts[0] == texts[1] != ""
    served.check_idle()


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_a_body_is_never_the_next_request(raw: socket.socket, pause_s: float):
    """A proxy in front would give its answer to the next client."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    raw.sendall(head(len(inner)))
    time.sleep(pause_s)
    raw.sendall(inner)
    status, said = answer(raw)
    assert status == 400 and "not valid JSON" in said["error"]["message"]
    raw.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer(raw)[1].keys() == {"version"}


@pytest.mark.parametrize(("connection", "version"), [(b"Upgrade, close", b"1.1"), (b"Upgrade", b"1.0")])
def test_a_connection_that_is_to_close_answers_first(raw: socket.socket, connection: bytes, version: bytes):
    raw.sendall(head(len(CHAT), connection, version) + CHAT)
    assert answer(raw)[0] == 200
    assert closed(raw)


def test_a_websocket_is_answered_as_the_request_it_is(raw: socket.socket):
    asks = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
    for path, status in ((b"/v1/realtime", 404), (b"/v1/chat/completions", 405), (b"/version", 200)):
        raw.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s" % (path, asks))
        assert answer(raw)[0] == status
    raw.sendall(b"\x81\x85\x00\x00\x00\x00Hello")  # a frame of a client that takes any answer for a yes
    assert raw.recv(1000).startswith(b"HTTP/1.1 400") and closed(raw)


def test_a_tunnel_is_refused(raw: socket.socket):
    raw.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\nGET /version HTTP/1.1\r\n\r\n")
    said = raw.recv(1000)
    assert said.startswith(b"HTTP/1.1 400") and said.endswith(b"CONNECT is not supported.")
    assert closed(raw)


def test_one_that_pipelines_is_cut_off_as_others_are(served: Served, raw: socket.socket):
    raw.sendall((head(len(CHAT)) + CHAT) * 3)
    assert closed(raw)
    served.check_idle()
