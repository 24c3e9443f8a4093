"""A request that ends early: what it held is free two steps after the engine knows, whoever else waits for what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora.engine.service import Service
from jlora.serve.backend import Backend
from jlora.serve.generation import Generation
from jlora.serve.proto import jlora_pb2 as pb
from tests.serve._server import Served, request, serving, wait_until

LONG = 3000  # tokens: never reached
BLOCKS = 40  # of the prompt of a request that ends early
PROMPT = [5] * (16 * BLOCKS)


class Turns:
    """Lets the engine take one step at a time, so that time is counted in steps, however slow a client's word travels.

    Attributes:
        known: `steps` of the engine's counters each time it learnt that a request ends early.
    """

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch):
        self.known: list[int] = []
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._step, self._engine = service._engine.step, service._engine
        monkeypatch.setattr(self._engine, "step", self._wait_and_step)
        self._note(self._engine, "abort", monkeypatch)
        self._note(self._engine._scheduler, "expire", monkeypatch)

    def take(self) -> None:
        """One step, which there must be something to do for."""
        self._go.release()
        assert self._done.acquire(timeout=60)

    def end(self) -> None:
        """From now on the engine goes at its own pace."""
        self._go.release(10**9)

    def _wait_and_step(self) -> Any:
        self._go.acquire()
        try:
            return self._step()
        finally:
            self._done.release()

    def _note(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = getattr(owner, name)

        def noted(*args: Any) -> Any:
            ended = inner(*args)
            if ended:
                self.known.append(self._engine.stats().steps)
            return ended

        monkeypatch.setattr(owner, name, noted)


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
        call = start(asked, timeout=1.5 if why == "deadline" else None)
        wait_until(lambda: served.service.stats().live_requests == 2)
        for _ in range(30):  # the prompt, and a few tokens
            turns.take()
        held = hbm()
        assert held.running_kv > BLOCKS and not turns.known
        if why == "deadline":
            assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # when it has passed
            while not turns.known:
                turns.take()
        else:
            call.cancel()
            wait_until(lambda: turns.known)
    while served.service.stats().steps < turns.known[0] + 2:
        turns.take()
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
