"""A client that leaves: its request ends within two steps of the engine, counted from the close of its connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import grpc
import pytest

from jlora.serve.proto import jlora_pb2_grpc as rpc
from tests import port
from tests.serve._server import SMALL, Served, request, wait_until
from tests.serve.http.test_streams import LONG, asking

SLOTS = SMALL["engine.max_seqs"]


class Paced:
    """The engine's steps: those of a held engine wait until it goes on."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch):
        engine = port.engine(served.replica)
        self.live: list[int] = []  # requests at the begin of every step
        self.aborts = 0
        self._go, self._held = threading.Event(), threading.Event()
        self._go.set()
        step, abort = engine.step, served.replica.abort

        def paced() -> object:
            if not self._go.is_set():
                self._held.set()
                assert self._go.wait(60)
                self._held.clear()
            self.live.append(engine.stats().live_requests)
            return step()

        def noted(handle: int) -> Future[bool]:
            self.aborts += 1
            return abort(handle)

        monkeypatch.setattr(engine, "step", paced)
        monkeypatch.setattr(served.replica, "abort", noted)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step begins inside, so no token leaves: the server has no reason to write."""
        self._go.clear()
        try:
            assert self._held.wait(20)
            yield
        finally:
            self._go.set()


@pytest.fixture
def paced(served: Served, monkeypatch: pytest.MonkeyPatch) -> Paced:
    served.check_idle()
    return Paced(served, monkeypatch)


def streaming(served: Served) -> Callable[[], None]:
    raw = asking(served, {**LONG, "stream": True, "n": 2})
    assert raw.recv(1)
    return raw.close


def whole(served: Served) -> Callable[[], None]:
    raw = asking(served, {**LONG, "n": 2})
    wait_until(lambda: served.stats().running == 2)
    return raw.close


def several(served: Served) -> Callable[[], None]:
    raw = asking(served, {**LONG, "prompt": ["Hello", "Good day"], "stream": True})
    wait_until(lambda: served.stats().running == 2)
    return raw.close


def over_grpc(served: Served) -> Callable[[], None]:
    channel = grpc.insecure_channel(served.address)
    next(rpc.InferenceStub(channel).GenerateStream(request("Hello", 3000)))
    return channel.close


@pytest.mark.parametrize("ask", [streaming, whole, several, over_grpc])
def test_a_request_ends_within_two_steps_of_the_close(served: Served, paced: Paced, ask: Callable[..., Callable]):
    leave, asked = ask(served), 2 if ask is several else 1
    with paced.held():
        before = len(paced.live)
        leave()
        wait_until(lambda: paced.aborts == asked)  # while nothing is written
    served.check_idle()
    assert sum(live > 0 for live in paced.live[before:]) <= 2


def test_a_queued_request_ends_within_two_steps_of_the_close(served: Served, paced: Paced):
    others = served.inference.GenerateStream(request("Hello", 3500, n=SLOTS))
    next(others)
    raw = asking(served, {**LONG, "stream": True})
    wait_until(lambda: served.stats().waiting == 1)
    with paced.held():
        before = len(paced.live)
        raw.close()
        wait_until(lambda: paced.aborts == 1)
    wait_until(lambda: served.stats().live_requests == 1)
    assert sum(live > 1 for live in paced.live[before:]) <= 2
    next(others)  # goes on
    others.cancel()
    served.check_idle()


def test_a_request_that_the_engine_has_not_seen_is_never_run(served: Served, paced: Paced):
    others = served.inference.GenerateStream(request("Hello", 3500))
    next(others)
    gate = served.backend.gate
    with paced.held():
        before = len(paced.live)
        with asking(served, {**LONG, "stream": True}):
            wait_until(lambda: gate.held.completions == 2)
        wait_until(lambda: gate.held.completions == 1)
    wait_until(lambda: len(paced.live) > before + 4)
    assert max(paced.live[before:]) == 1
    others.cancel()
    served.check_idle()
