"""A request that ends early: what it held is free two steps after the engine knows, whoever else waits for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from jlora.engine.service import Service
from jlora.serve.backend import Backend
from jlora.serve.generation import Generation
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import Request, TokenEvent
from tests.serve._server import Served, request, serving, wait_until

LONG = 3000  # tokens: never reached
BLOCKS = 40  # of the prompt of a request that ends early
PROMPT = [5] * (16 * BLOCKS)


class Turns:
    """Lets the engine take one step at a time, so that time is counted in steps, however slow a client's word travels.

    Attributes:
        aborts: what the engine was told to end.
        deadlines: of the requests it was given, on the monotonic clock.
    """

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch):
        self.aborts: list[str] = []
        self.deadlines: list[float] = []
        self._over = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._service, self._step = service, service._engine.step
        self._abort, self._submit = service._engine.abort, service._engine.submit
        for name in ("step", "abort", "submit"):
            monkeypatch.setattr(service._engine, name, getattr(self, f"_on_{name}"))

    @property
    def steps(self) -> int:
        """Steps since the server started."""
        return self._service.stats().steps

    def take(self) -> None:
        """One step, which there must be something to do for."""
        self._go.release()
        assert self._done.acquire(timeout=60)

    def end(self) -> None:
        """From now on the engine goes at its own pace."""
        self._over = True
        self._go.release()

    def _on_step(self) -> list[TokenEvent]:
        if not self._over:
            self._go.acquire()
        try:
            return self._step()
        finally:
            self._done.release()

    def _on_abort(self, request_id: str, handle: int | None = None) -> bool:
        found = self._abort(request_id, handle)
        self.aborts.append(request_id)
        return found

    def _on_submit(self, asked: Request) -> int:
        self.deadlines += [] if asked.deadline is None else [asked.deadline]
        return self._submit(asked)


@pytest.fixture
def turns(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    made = Turns(served.service, monkeypatch)
    yield made
    made.end()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("why", ["cancelled", "deadline"])
def test_blocks_are_free_two_steps_after_the_engine_knows(
    served: Served, turns: Turns, monkeypatch: pytest.MonkeyPatch, method: str, why: str
):
    def hbm() -> pb.TierState:
        return served.control.GetCacheState(pb.GetCacheStateRequest()).hbm

    neighbour = served.inference.Generate.future(request("Hello", LONG))  # there is a next step to take
    asked = request(PROMPT, LONG, bypass_prefix_cache=True)
    start = served.inference.Generate.future if method == "Generate" else served.inference.GenerateStream
    with monkeypatch.context() as patch:
        if why == "deadline":  # the front would end it too: here the engine is alone with its own clock
            patch.setattr(Generation, "_abort", lambda self: None)
        call = start(asked, timeout=6.0 if why == "deadline" else None)
        wait_until(lambda: served.service.stats().live_requests == 2)
        for _ in range(30):  # the prompt, and a few tokens
            turns.take()
        held = hbm()
        assert held.running_kv > BLOCKS and not turns.aborts
        if why == "deadline":
            assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # the client's clock says it first
            wait_until(lambda: time.monotonic() > max(turns.deadlines))
        else:
            call.cancel()
            wait_until(lambda: turns.aborts)
        known = turns.steps
        while turns.steps < known + 2:
            turns.take()
        assert len(turns.aborts) == (why == "cancelled")
    assert hbm().running_kv < BLOCKS and hbm().free >= held.free + BLOCKS - 1  # the neighbour may have one more
    turns.end()
    neighbour.cancel()
    served.check_idle()
    served.service.check_integrity()


def test_unloads_that_wait_hold_up_no_request(served: Served, text_model: Path):
    """More of them than there are threads: all begin, and requests come, run and are cancelled beside them."""
    names, path = [f"leaving{i}" for i in range(6)], str(text_model.parent / "adapters" / "upper")
    with serving(Backend(service=served.service, tokenizer=served.backend.tokenizer), threads=2) as narrow:
        for name in names:
            narrow.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path))
        streams = [narrow.inference.GenerateStream(request("Hello", LONG, model=name)) for name in names]
        for stream in streams:
            next(stream)
        unloads = [narrow.adapters.UnloadAdapter.future(pb.UnloadAdapterRequest(name=name)) for name in names]
        wait_until(lambda: not {info.name for info in served.service.adapters()} & set(names))
        assert narrow.generate(request("Hello")).usage.completion_tokens == 8
        assert not any(unload.done() for unload in unloads)
        for stream, unload, name in zip(streams, unloads, names, strict=True):
            stream.cancel()
            assert unload.result(timeout=20).name == name
    served.check_idle()
