"""A request that ends early: its blocks are free two steps after the engine knows."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from jlora.engine.local import LocalReplica
from jlora.errors import Unavailable
from jlora.replica import Replica, ReplicaState, Sink
from jlora.serve.backend import Backend
from jlora.serve.generation import Generation, Inbox
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import Request, TokenEvent
from tests.serve._server import Served, refused, request, serving, wait_until

LONG = 3000  # tokens: never reached
BLOCKS = 40  # of the prompt of a request that ends early
PROMPT = [5] * (16 * BLOCKS)


class Noted:
    """A replica that notes what its front asks for; with `deaf` no abort reaches the engine."""

    def __init__(self, replica: Replica, deaf: bool = False):
        self._replica, self._deaf = replica, deaf
        self.deadlines: list[float] = []
        self.aborted: list[float] = []  # when the engine had done it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def submit(self, asked: Request, sink: Sink) -> Future[int]:
        self.deadlines += [] if asked.deadline is None else [asked.deadline]
        return self._replica.submit(asked, sink)

    def abort(self, handle: int, moved: bool = False) -> Future[bool]:
        if self._deaf:
            return Future()
        done = self._replica.abort(handle)
        done.add_done_callback(lambda _: self.aborted.append(time.monotonic()))
        return done


def looking(replica: LocalReplica) -> tuple[list[tuple[float, ReplicaState]], threading.Event]:
    """What the engine's thread sees between two steps from now on; the event: a request's blocks are free."""
    looks, free = [], threading.Event()

    def look() -> None:
        replica.state().add_done_callback(note)

    def note(state: Future[ReplicaState]) -> None:
        looks.append((time.monotonic(), state.result()))
        held = [state.cache.hbm.running_kv for _, state in looks]
        if held[-1] < max(held) - BLOCKS // 2:  # the neighbour has some, too, and gets more
            free.set()
        else:
            replica.between_steps(look)

    replica.between_steps(look)
    return looks, free


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("why", ["cancelled", "deadline"])
def test_blocks_are_free_two_steps_after_the_engine_knows(served: Served, method: str, why: str):
    noted = Noted(served.replica, deaf=why == "deadline")  # a deadline is the engine's own affair
    with serving(Backend(noted, served.backend.tokenizer)) as front:
        neighbour = front.inference.Generate.future(request("Hello", LONG))  # keeps the steps coming
        asked = request(PROMPT, LONG, bypass_prefix_cache=True)
        start = front.inference.Generate.future if method == "Generate" else front.inference.GenerateStream
        call = start(asked, timeout=2.0 if why == "deadline" else None)
        wait_until(lambda: served.cache().hbm.running_kv > BLOCKS)
        looks, free = looking(served.replica)
        wait_until(lambda: looks)
        if why == "cancelled":
            call.cancel()
        assert free.wait(20)
        wait_until(lambda: noted.aborted or why == "deadline")
        known = max(noted.deadlines) if why == "deadline" else noted.aborted[0]
        steps = [state.stats.steps for at, state in looks if at > known]
        assert not steps or steps[-1] - steps[0] <= 2 + 2  # the first and the last look may each be a step old
        assert why == "cancelled" or call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        neighbour.cancel()
    served.check_idle()


def test_a_request_that_fails_leaves_nothing_behind(served: Served):
    class Failing(Noted):
        def submit(self, asked: Request, sink: Sink) -> Future[int]:
            last = TokenEvent(asked.id, 0, None, finish_reason="abort", error=Unavailable("planted"))
            return self._replica.submit(asked, lambda _: sink([last]))

    with serving(Backend(Failing(served.replica), served.backend.tokenizer)) as front:
        for call in (front.generate, front.streamed):
            with refused(grpc.StatusCode.UNAVAILABLE, "planted"):
                call(request("Hello", LONG))
        wait_until(lambda: [bar.failed and bar.whole > 0 for bar in front.backend.strip.bars()] == [True, True])
        assert not front.backend.leaving
        assert front.backend.observed.ends == {"error": 2}, "no client has left"
    served.check_idle()


def test_events_are_not_lost_when_their_reader_is_cancelled():
    async def read() -> list[int]:
        inbox, got = Inbox(eager=True), []
        inbox.put([TokenEvent("r", 0, token) for token in range(6)])
        await asyncio.sleep(0)
        for _ in range(4):
            cancelled = asyncio.ensure_future(inbox.get(2))
            await asyncio.sleep(0)
            if not cancelled.cancel():
                got += [event.token_id for event in cancelled.result()]
            got += [event.token_id for event in await inbox.get(1)]
        return got

    assert asyncio.run(asyncio.wait_for(read(), 20))[:4] == list(range(4))


@pytest.mark.parametrize("stream", [True, False])
def test_an_http_client_that_leaves_is_noticed_at_once(served: Served, stream: bool):
    noted = Noted(served.replica)
    with serving(Backend(noted, served.backend.tokenizer)) as front:
        neighbour = front.inference.Generate.future(request("Hello", LONG))  # keeps the steps coming
        fields = {"max_tokens": LONG, "ignore_eos": True, "bypass_prefix_cache": True, "stream": stream}
        body = json.dumps({"prompt": PROMPT, **fields}).encode()
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((urlsplit(front.http).hostname, urlsplit(front.http).port), timeout=20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
            wait_until(lambda: served.cache().hbm.running_kv > BLOCKS)
            looks, free = looking(served.replica)
            wait_until(lambda: looks)
        assert free.wait(20)
        wait_until(lambda: noted.aborted)
        steps = [state.stats.steps for at, state in looks if at > noted.aborted[0]]
        assert not steps or steps[-1] - steps[0] <= 2 + 2  # the first and the last look may each be a step old
        neighbour.cancel()
    served.check_idle()


def test_a_call_that_is_cancelled_while_it_is_submitted_is_aborted_then():
    submitted: Future[int] = Future()
    submitted.set_running_or_notify_cancel()  # the engine's thread has taken the command
    aborts: list[int] = []
    replica: Any = SimpleNamespace(
        info=SimpleNamespace(eos_ids=()),
        submit=lambda asked, sink: submitted,
        abort=aborts.append,
    )

    async def enter() -> None:
        async with Generation(Backend(replica), Request("r", (1,)), eager=True):
            raise AssertionError("not reached")

    async def cancelled() -> None:
        call = asyncio.create_task(enter())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not aborts
        submitted.set_result(7)
        assert aborts == [7]

    asyncio.run(cancelled())


def test_unloads_that_wait_hold_up_no_request(served: Served, text_model: Path):
    """Requests come, run and are cancelled beside them."""
    names, path = [f"leaving{i}" for i in range(6)], str(text_model.parent / "adapters" / "upper")
    for name in names:
        served.adapters.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path))
    streams = [served.inference.GenerateStream(request("Hello", LONG, model=name)) for name in names]
    for stream in streams:
        next(stream)
    unloads = [served.adapters.UnloadAdapter.future(pb.UnloadAdapterRequest(name=name)) for name in names]
    wait_until(lambda: not {info.name for info in served.replica.adapters().result()} & set(names))
    assert served.generate(request("Hello")).usage.completion_tokens == 8
    with refused(grpc.StatusCode.NOT_FOUND, names[0]):
        served.generate(request(model=names[0]))
    assert not any(unload.done() for unload in unloads)
    for stream, unload, name in zip(streams, unloads, names, strict=True):
        stream.cancel()
        assert unload.result(timeout=20).name == name
    served.check_idle()
