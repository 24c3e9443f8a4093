"""Clients of HTTP/1.0, which know no chunks: the end of the connection ends the body."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve._server import Served


def answered(served: Served, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[bytes, bytes]:
    """Head and body of an answer, up to the end of the connection."""
    url, content = urlsplit(served.http), b"" if body is None else json.dumps(body).encode()
    kind = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if content else ""
    with socket.create_connection((url.hostname, url.port), timeout=60) as raw:
        raw.sendall(f"{method} {path} HTTP/1.0\r\nHost: localhost\r\n{kind}\r\n".encode() + content)
        said = b""
        while piece := raw.recv(1 << 16):
            said += piece
    head, _, rest = said.partition(b"\r\n\r\n")
    return head.lower(), rest


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_is_not_in_chunks(served: Served, path: str):
    prompt = {"prompt": "Hello"} if path == "completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    asked = {**prompt, "max_tokens": 9, "stream": True, "ignore_eos": True}
    head, body = answered(served, "POST", f"/v1/{path}", asked)
    assert head.startswith(b"http/1.1 200") and b"connection: close" in head
    assert b"transfer-encoding" not in head and b"content-length" not in head
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"


def test_other_answers_have_their_length(served: Served):
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("HEAD", "/v1/models", None),
        ("POST", "/tokenize", {"prompt": "Hello"}),
        ("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
        ("POST", "/v1/completions", {"prompt": ""}),
        ("GET", "/nothing", None),
    ):
        head, said = answered(served, method, path, body)
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        assert len(said) == (0 if method == "HEAD" else length) and b"transfer-encoding" not in head and length > 0
