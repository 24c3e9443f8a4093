"""Server-sent events on the wire, and requests whose client leaves."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from jlora.config import ServeConfig
from jlora.errors import QueueFull
from jlora.serve.gate import Room
from tests.serve._server import Served, serving, wait_until

LONG = {"prompt": "Hello", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}


def posted(body: dict[str, Any]) -> bytes:
    """A request as its bytes."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def asking(served: Served, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request; closing it is the client's way to leave."""
    url = urlsplit(served.http)
    raw = socket.create_connection((url.hostname, url.port), timeout=60)
    raw.sendall(posted(body))
    return raw


def test_events_on_the_wire(http: httpx.Client):
    body = {**LONG, "max_tokens": 6, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        lines = list(answer.iter_lines())
    events, blanks = lines[::2], lines[1::2]
    assert set(blanks) == {""} and all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    whole = [json.loads(line.removeprefix("data: ")) for line in events[:-1]]
    assert [e["choices"][0]["finish_reason"] for e in whole] == [None] * (len(whole) - 1) + ["length"]
    assert not any("usage" in e for e in whole)  # not asked for


def test_a_connection_that_is_used_again_answers_at_once(served: Served):
    """An answer goes out in parts; none may wait until the client acknowledges the one before, which takes 40 ms."""
    url = urlsplit(served.http)
    took: list[float] = []
    with socket.create_connection((url.hostname, url.port), timeout=60) as raw:
        for _ in range(12):
            began, told = time.monotonic(), b""
            raw.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not told.endswith(b"}"):
                told += raw.recv(4096)
            took.append(time.monotonic() - began)
    # A client's system acknowledges the first answers, and now and then another, without delay.
    assert sorted(took[4:])[len(took[4:]) // 2] < 0.03


def test_the_first_token_comes_at_once(served: Served, http: httpx.Client):
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert served.stats().running == 1  # far from its end
    served.check_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(served: Served, stream: bool):
    """Within two steps: the engine makes hardly more tokens than the client has seen."""
    before = served.stats().generated_tokens
    body = {**LONG, "n": 2, "stream": stream}
    with asking(served, body) as raw:
        wait_until(lambda: served.stats().live_requests == 1)
        if stream:
            raw.recv(1)
    served.check_idle()
    assert served.stats().generated_tokens - before < 3000


def test_a_client_that_leaves_while_it_waits_frees_its_place(served: Served):
    body = {**LONG, "stream": True}
    with httpx.Client(base_url=served.http, timeout=60) as client:
        running = [client.stream("POST", "/v1/completions", json=body) for _ in range(8)]
        lines = [stream.__enter__().iter_lines() for stream in running]
        for each in lines:
            next(each)
        with asking(served, LONG):
            wait_until(lambda: served.stats().live_requests == 9)
        wait_until(lambda: served.stats().live_requests == 8)
        for stream in running:
            stream.__exit__(None, None, None)
    served.check_idle()


def test_an_engine_that_ends_ends_the_stream_with_an_error(served: Served, http: httpx.Client):
    """The status has left already; the error is an event."""
    body = {**LONG, "stream": True, "request_id": "victim"}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert served.replica.abort_named("victim").result(20)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "abort"


def test_a_client_that_reads_nothing_is_cut(served: Served):
    with serving(served.backend, ServeConfig(heartbeat_s=60.0, stall_s=0.3)) as impatient:
        body = {**LONG, "n": 8, "logprobs": 20, "stream": True}  # more than the sockets hold
        with httpx.stream("POST", f"{impatient.http}/v1/completions", json=body, timeout=60) as answer:
            wait_until(lambda: served.stats().live_requests == 0, timeout_s=60)  # the head is sent by a live one
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):  # it does not end as an answer does
                for _ in answer.iter_raw():
                    pass
    served.check_idle()


def answered(served: Served) -> bool:
    """Whether no call holds a completion."""
    try:
        served.backend.gate.check_completions(Room(0, 1))
    except QueueFull:
        return False
    return True


def test_a_whole_answer_that_nobody_reads_is_cut(served: Served):
    config = ServeConfig(heartbeat_s=60.0, stall_s=0.3)
    body = {**LONG, "max_tokens": 1200, "n": 8, "logprobs": 20}  # more than the sockets hold
    with serving(served.backend, config) as impatient, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = urlsplit(impatient.http)
        raw.connect((url.hostname, url.port))
        raw.sendall(posted(body))
        raw.settimeout(60)
        wait_until(lambda: served.stats().live_requests == 1)
        wait_until(lambda: answered(served), timeout_s=60)  # its answer has left, or was given up
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.recv(1 << 20):
                answer += piece
    declared = re.search(rb"content-length: (\d+)", answer)
    assert declared is not None and len(answer) < int(declared[1])


def test_a_client_that_leaves_its_answers_unread_holds_no_place(served: Served):
    """The head of the next answer waits for what is unread of those before, on the same connection."""
    body, most = {**LONG, "max_tokens": 30, "n": 8, "logprobs": 20}, 100
    config = ServeConfig(heartbeat_s=60.0, stall_s=0.5)
    with serving(served.backend, config) as impatient, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = urlsplit(impatient.http)
        raw.connect((url.hostname, url.port))
        for _ in range(most):
            before = served.stats().generated_tokens
            raw.sendall(posted(body))
            wait_until(lambda before=before: cut(raw) or served.stats().generated_tokens == before + 240)
            wait_until(lambda: cut(raw) or answered(served), timeout_s=10)
            if cut(raw):
                break
        else:
            raise AssertionError(f"{most} unread answers fit the sockets")
        wait_until(lambda: answered(served), timeout_s=10)
    served.check_idle()


def cut(raw: socket.socket) -> bool:
    """Whether the server has reset the connection."""
    said = select.poll()
    said.register(raw, 0)  # POLLERR and POLLHUP need no asking
    return bool(said.poll(0))


def test_another_server_of_the_same_replica_that_stops_takes_nobodys_health(served: Served):
    with serving(served.backend, ServeConfig(heartbeat_s=60.0)):
        pass
    wait_until(lambda: httpx.get(f"{served.http}/health", timeout=20).status_code == 200)


def test_a_head_without_end_is_refused(served: Served):
    answers = (endless_head(served) for _ in range(10))  # a reset may take the answer with it
    answer = next(filter(None, answers))
    assert answer.startswith(b"HTTP/1.1 400") and b"head" in answer
    assert httpx.get(f"{served.http}/health", timeout=20).status_code == 200


def endless_head(served: Served) -> bytes:
    """Sends header lines until the server ends the connection; what could be read of its answer."""
    url, answer = urlsplit(served.http), b""
    with socket.create_connection((url.hostname, url.port), timeout=20) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        raw.settimeout(0.05)
        for i in range(1000):
            raw.sendall(b"X-%d: %s\r\n" % (i, b"y" * 1000))
            if i % 8 == 7:  # the server has read all of it, as a rule: it closes without a reset
                with contextlib.suppress(TimeoutError):
                    answer = raw.recv(1000)
                    break
        else:
            raise AssertionError("a head of 1 MB is still read")
    return answer


def test_bodies_of_every_size_pass(http: httpx.Client):
    """However they are cut into packets, and on one connection."""
    for size in (1, 60_000, 70_000, 250_000, 300_000, 1_000_000, 10):
        answer = http.post("/v1/completions", json={"prompt": "x" * size, "max_tokens": 1})
        assert answer.status_code == (200 if size < 1000 else 400) and answer.json()


def test_a_body_in_chunks_takes_the_room_that_it_needs(served: Served):
    """It has not said its length, so until it has arrived it takes that of the longest."""
    body = json.dumps({**LONG, "stream": True}).encode()
    sent: list[int] = []

    def chunks() -> Iterator[bytes]:
        yield body[:10]
        wait_until(lambda: served.backend.gate.held.bytes)
        sent.append(served.backend.gate.held.bytes)
        yield body[10:]

    url, kind = f"{served.http}/v1/completions", {"content-type": "application/json"}
    with httpx.stream("POST", url, content=chunks(), headers=kind, timeout=60) as answer:
        lines = answer.iter_lines()  # dropped, it would close the answer
        next(lines)
        assert sent == [4 << 20] and served.backend.gate.held.bytes == len(body)
    served.check_idle()
    wait_until(lambda: not any(served.backend.gate.held))


def test_a_client_that_pipelines_and_leaves_aborts_its_request(served: Served):
    url, content = urlsplit(served.http), posted({**LONG, "stream": True})
    with socket.create_connection((url.hostname, url.port), timeout=20) as raw:
        raw.sendall(content)
        raw.recv(1000)
        raw.sendall(content)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(1 << 16):
                pass
    served.check_idle()


def test_one_client_of_many_leaves_and_nobody_else_notices(served: Served, http: httpx.Client):
    body = {**LONG, "max_tokens": 60}
    want = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    texts: list[str] = []

    def ask() -> None:
        texts.append(httpx.post(f"{served.http}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with httpx.stream("POST", f"{served.http}/v1/completions", json={**LONG, "stream": True}, timeout=60) as leaver:
        for thread in threads:
            thread.start()
        lines = leaver.iter_lines()
        next(lines)
        time.sleep(0.05)
    for thread in threads:
        thread.join(60)
    assert texts == [want] * 4
    served.check_idle()
