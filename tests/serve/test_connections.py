"""Connections of the gRPC port: those that say nothing, and those that ask nothing, give their places to others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from benchmarks.micro.abuse import HEADERS, HELLO, PATH, begun_and_reset
from jlora.config import ServeConfig
from jlora.errors import InvalidArgument
from jlora.serve import server, unread
from jlora.serve.backend import Backend
from tests.serve._server import Served, refused, request, serving, wait_until

GOAWAY = 7
CODE = grpc.StatusCode


def connect(front: Served) -> socket.socket:
    host, port = front.address.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def frames(said: bytes) -> list[int]:
    """The types of the frames that the server has sent."""
    found, at = [], 0
    while at + 9 <= len(said):
        found.append(said[at + 3])
        at += 9 + int.from_bytes(said[at : at + 3])
    return found


def until_closed(raw: socket.socket) -> bytes:
    """What the server sends until it closes the connection; the socket's timeout fails the test."""
    said = b""
    try:
        while piece := raw.recv(4096):
            said += piece
    except ConnectionResetError:
        pass
    return said


@pytest.fixture(scope="module")
def front(served: Served) -> Iterator[Served]:
    """The shared engine behind a server that waits for nothing long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "HELLO_S", 0.5)
        patch.setattr(server, "IDLE_S", 1.0)
        with serving(served.backend) as running:
            yield running


@pytest.mark.parametrize("sent", [b"", HELLO[:10], b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "part", "http"])
def test_a_connection_that_does_not_speak_http2_is_closed(front: Served, sent: bytes):
    with connect(front) as raw:
        raw.sendall(sent)
        until_closed(raw)
    assert front.generate(request()).usage.completion_tokens == 8


def test_a_connection_without_a_call_is_closed_in_good_order(front: Served):
    with connect(front) as raw:
        raw.sendall(HELLO)
        assert GOAWAY in frames(until_closed(raw))


def test_calls_that_are_reset_at_once_leave_nothing(front: Served):
    """CVE-2023-44487: thousands of calls on one connection, each reset before it can be served."""
    began = front.stats().generated_tokens
    with connect(front) as raw:
        raw.sendall(HELLO)
        for call in range(1, 6001, 2):
            raw.sendall(begun_and_reset(call))
        assert front.generate(request()).usage.completion_tokens == 8
    gate = front.backend.gate
    wait_until(lambda: not any(gate.held))
    front.check_idle()
    assert front.stats().generated_tokens == began + 8


def test_a_call_that_no_handler_takes_in_time_ends(served: Served):
    """Behind a flood of calls that are reset, it would wait for the end of the flood."""
    stands, go_on = threading.Event(), threading.Event()

    def stopped(*_: object) -> None:
        stands.set()
        assert go_on.wait(30)
        raise InvalidArgument("model: was stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "PENDING_S", 1)
        patch.setattr(Backend, "adapter_of", stopped)
        with serving(served.backend) as front:
            calls = [front.inference.Generate.future(request(), timeout=60)]
            assert stands.wait(20)
            calls += [front.inference.Generate.future(request(), timeout=60) for _ in range(8)]
            time.sleep(2.5)  # their age counts
            go_on.set()
            codes = Counter(call.code() for call in calls)
            assert codes[CODE.CANCELLED] >= 7 and codes.keys() == {CODE.INVALID_ARGUMENT, CODE.CANCELLED}
            with refused(CODE.INVALID_ARGUMENT, "was stopped"):
                front.generate(request())


# HTTP/2 by hand: settings that let no byte of a message through, and a health check.
NO_WINDOW = HELLO[:24] + b"\0\0\6\4\0\0\0\0\0" + b"\0\4\0\0\0\0" + HELLO[-9:]
CHECK = b"/grpc.health.v1.Health/Check"
CHECK_HEADERS = HEADERS.replace(bytes([len(PATH)]) + PATH, bytes([len(CHECK)]) + CHECK)


def checked(call: int) -> bytes:
    """A whole health check by its number, which is odd."""
    head = len(CHECK_HEADERS).to_bytes(3) + b"\1\4" + call.to_bytes(4) + CHECK_HEADERS
    return head + b"\0\0\5\0\1" + call.to_bytes(4) + b"\0\0\0\0\0"


def test_a_client_that_takes_no_answer_blocks_nobody_and_loses_its_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    """It has as many calls as one connection may, and needs no key for them."""
    monkeypatch.setattr(server, "MOST_CALLS", 2)
    monkeypatch.setattr(unread, "MOST", 10)
    backend = Backend(served.replica, served.backend.tokenizer, most=20)
    with serving(backend, ServeConfig(stall_s=1.0)) as front, connect(front) as raw:
        wait_until(lambda: front.status() == "SERVING")
        raw.sendall(NO_WINDOW)
        for call in range(1, 49, 2):  # not all at once: only so many may wait for their handlers
            raw.sendall(checked(call))
            time.sleep(0.01)
        for _ in range(10):
            assert front.status() == "SERVING"
            time.sleep(0.02)
        until_closed(raw)
        assert front.generate(request()).usage.completion_tokens == 8


def test_a_few_ends_that_nobody_takes_close_no_connection(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unread, "MOST", 10)
    with serving(served.backend, ServeConfig(stall_s=0.1)) as front, connect(front) as raw:
        raw.sendall(NO_WINDOW + b"".join(map(checked, range(1, 21, 2))))
        raw.settimeout(1.0)
        with pytest.raises(TimeoutError):
            while raw.recv(4096):
                pass


# The same with all windows open: only the socket holds an answer back.
OPEN = HELLO[:24] + b"\0\0\6\4\0\0\0\0\0" + b"\0\4\x7f\xff\xff\xff" + HELLO[-9:]
OPEN += b"\0\0\4\10\0\0\0\0\0" + b"\x7f\0\0\0"


def called(call: int, path: bytes, message: bytes) -> bytes:
    """A whole call by its number, which is odd."""
    headers = HEADERS.replace(bytes([len(PATH)]) + PATH, bytes([len(path)]) + path)
    body = b"\0" + len(message).to_bytes(4) + message
    head = len(headers).to_bytes(3) + b"\1\4" + call.to_bytes(4) + headers
    return head + len(body).to_bytes(3) + b"\0\1" + call.to_bytes(4) + body


@pytest.mark.slow  # the answers that fill the sockets have 40,000 tokens
def test_a_stream_on_a_connection_that_takes_nothing_holds_no_place(served: Served):
    """Its head waits behind the answers of calls that have ended here."""
    large = request(max_tokens=500, n=8, logprobs=20).SerializeToString()  # ten are more than the sockets hold
    with serving(served.backend, ServeConfig(heartbeat_s=60.0, stall_s=2.0)) as front, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = front.address.split(":")
        raw.connect((host, int(port)))
        raw.sendall(OPEN)

        def ask(call: int, path: bytes, message: bytes, tokens: int) -> None:
            before = served.stats().generated_tokens
            raw.sendall(called(call, path, message))
            wait_until(lambda: served.stats().generated_tokens == before + tokens, timeout_s=60)
            wait_until(lambda: not any(front.backend.gate.held), timeout_s=10)

        for call in range(1, 21, 2):
            ask(call, PATH, large, 8 * 500)
        ask(21, PATH + b"Stream", request(max_tokens=1).SerializeToString(), 1)
        raw.settimeout(60.0)
        said = b""
        while b"serve.stall_s = 2 s" not in said:  # the connection is as good as before
            piece = raw.recv(1 << 20)
            assert piece, said
            said = said[-1000:] + piece
    served.check_idle()


@pytest.mark.parametrize("ours", ["127.0.0.1", "::ffff:127.0.0.1", "::1"])
def test_the_connection_of_a_peer_is_closed_and_no_other(ours: str):
    six = ":" in ours
    family = socket.AF_INET6 if six else socket.AF_INET
    with socket.create_server(("::" if six else ours, 0), family=family, dualstack_ipv6=six) as listener:
        there = (ours.removeprefix("::ffff:"), listener.getsockname()[1])
        with socket.create_connection(there, 5) as one, socket.create_connection(there, 5) as other:
            accepted = [listener.accept()[0] for _ in range(2)]
            host, port = one.getsockname()[:2]
            unread.close(f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}")
            assert one.recv(1) == b""
            accepted[1].sendall(b"x")
            assert other.recv(1) == b"x"
            for connection in accepted:
                connection.close()


def test_a_client_that_was_idle_calls_on(front: Served):
    """Its library opens another connection, and a call under way is no idleness."""
    with grpc.insecure_channel(front.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        generate = channel.unary_unary("/jlora.v1.Inference/Generate")
        message = request("Hello", 4).SerializeToString()
        generate(message, timeout=60)
        wait_until(lambda: grpc.ChannelConnectivity.IDLE in states[states.index(grpc.ChannelConnectivity.READY) :])
        generate(message, timeout=60)


WATCH = CHECK.replace(b"Check", b"Watch")


def test_a_watcher_of_health_that_reads_nothing_keeps_no_change_from_others(served: Served):
    backend = Backend()
    with serving(backend) as front:
        with connect(front) as raw:
            raw.sendall(NO_WINDOW + called(1, WATCH, b"") + called(3, WATCH, b"\n\4live"))
            watch = front.health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            backend.replica = served.replica
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            assert front.status() == "SERVING"
            backend.draining = True
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    # The server has stopped, though the first watcher never read.


def test_a_client_that_pings_keeps_its_connection(served: Served, monkeypatch: pytest.MonkeyPatch):
    """As those of Go, Java and Node do behind a load balancer; gRPC's own limit is a ping in five minutes."""
    monkeypatch.setattr(server, "PING_S", 0.05)
    with serving(served.backend) as front, connect(front) as raw:
        raw.sendall(HELLO + called(1, WATCH, b""))
        raw.settimeout(0.1)
        said, pongs = b"", 0
        for _ in range(6):
            raw.sendall(b"\0\0\x08\6\0\0\0\0\0" + bytes(8))
            with contextlib.suppress(TimeoutError):
                while piece := raw.recv(4096):
                    said += piece
            pongs = frames(said).count(6)
        assert pongs >= 6 and GOAWAY not in frames(said)


def test_metadata_below_the_limit_is_never_refused_by_chance(served: Served):
    def asked(kib: int) -> health_pb2.HealthCheckResponse:
        return served.health.Check(
            health_pb2.HealthCheckRequest(), metadata=[("x-token", "a" * (kib << 10))], timeout=9
        )

    for _ in range(20):
        assert asked(14).status
    with refused(CODE.RESOURCE_EXHAUSTED):
        asked(17)
