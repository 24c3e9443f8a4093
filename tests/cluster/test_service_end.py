"""`jlora cluster` at SIGTERM, with answers under way: the first one waits for them, the second one does not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.cluster import _processes
from tests.cluster._processes import STOP_S, Service, Stream, service
from tests.cluster._wait import until
from tests.serve import _server

pytestmark = pytest.mark.slow

TOKENS = 700
SIGTERMED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("end") / "model"
    _make.make_model(directory, max_len=1024)
    return directory


@pytest.fixture(scope="module")
def asked() -> list[pb.GenerateRequest]:
    """A greedy and a sampled one."""
    return _processes.requests((), TOKENS)[:2]


@pytest.fixture
def running(model: Path) -> Iterator[Service]:
    with service(model, {}, "--replicas", "2", "--http-port", "0", "--set", f"serve.drain_s={STOP_S}") as made:
        until(lambda: made.up() == {"r0", "r1"}, "both replicas are up")
        yield made


def begun(running: Service, asked: list[pb.GenerateRequest]) -> list[Stream]:
    """Streams that are under way at both replicas, of a service that has got SIGTERM and takes no more."""
    streams = [Stream(running.inference, one) for one in asked]
    until(lambda: all(stream.has(5) for stream in streams), "both have begun")
    assert [replica.sent for replica in running.replicas().values()] == [1, 1]
    running.process.send_signal(signal.SIGTERM)
    until(lambda: refuses(running), "new requests are refused")
    assert not any(stream.has(TOKENS) for stream in streams), "they still run"
    return streams


def refuses(running: Service) -> bool:
    """Whether it answers a new request with UNAVAILABLE."""
    try:
        running.inference.Generate(_server.request(range(5, 9), 1), timeout=STOP_S)
    except grpc.RpcError as e:
        assert e.code() is grpc.StatusCode.UNAVAILABLE and "drain" in e.details()  # pyright: ignore
        return True
    return False


def test_at_sigterm_answers_end_whole_new_requests_are_refused_and_the_exit_code_is_0(
    model: Path, asked: list[pb.GenerateRequest], running: Service
):
    streams = begun(running, asked)
    got = [stream.result() for stream in streams]
    assert running.process.wait(STOP_S) == 0
    assert got == _processes.undisturbed(model, {}, asked)


def test_a_second_sigterm_ends_the_service_at_once(asked: list[pb.GenerateRequest], running: Service):
    streams = begun(running, asked)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(STOP_S) == SIGTERMED
    for stream in streams:
        with _server.refused(grpc.StatusCode.UNAVAILABLE):
            stream.result()
        assert not stream.has(TOKENS)
