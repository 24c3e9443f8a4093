"""No turn of the event loop reads or converts more than a bounded part of an answer, however long it is."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from jlora.errors import ResourceExhausted
from jlora.replica import Sink
from jlora.serve import convert, generation
from jlora.serve.backend import Backend
from jlora.serve.generation import BACKLOG, SLICE, Generation, Inbox
from jlora.serve.pauses import Pauses
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import Delta, Request, SamplingParams, Timing, TokenEvent, TokenLogprob, Usage
from jlora.validation import MAX_COMPLETIONS, MAX_ENTRIES
from tests.serve._server import Served, refused, request

ENTRY = TokenLogprob(5, -1.0, ((5, -1.0), (6, -2.0)))
END: dict[str, Any] = {"finish_reason": "length", "usage": Usage(1, 0, 1), "timing": Timing()}


class AtOnce:
    """A replica that answers a request with all its events at once."""

    info = SimpleNamespace(model="base", eos_ids=frozenset())

    def __init__(self, events: list[TokenEvent]):
        self._events = events

    def submit(self, asked: Request, sink: Sink) -> Future[int]:
        sink(self._events)
        done: Future[int] = Future()
        done.set_result(1)
        return done


class Turns:
    """Counts work by the turn of the loop that does it."""

    def __init__(self) -> None:
        self.most = self._now = 0

    def add(self, count: int) -> None:
        self._now += count
        self.most = max(self.most, self._now)

    async def watch(self) -> None:
        while True:
            self._now = 0
            await asyncio.sleep(0)


async def watched(turns: Turns, work: Any) -> Any:
    watch = asyncio.create_task(turns.watch())
    await asyncio.sleep(0)
    try:
        return await work
    finally:
        watch.cancel()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("logprobs", [None, 20])
def test_a_turn_reads_a_bounded_part_of_what_has_arrived(
    eager: bool, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
):
    n, tokens, turns = 4, 1000, Turns()
    events = [TokenEvent("r", i, 5) for _ in range(tokens) for i in range(n)]
    events += [TokenEvent("r", i, 5, **END) for i in range(n)]
    push = generation.Answer.push

    def noted(self: Any, events: list[TokenEvent]) -> Any:
        turns.add(len(events) * (1 + (logprobs or 0)))
        return push(self, events)

    monkeypatch.setattr(generation.Answer, "push", noted)

    async def whole() -> list[Delta]:
        backend: Any = Backend(AtOnce(events))  # pyright: ignore[reportArgumentType]
        async with Generation(backend, Request("r", (1,), SamplingParams(n=n, logprobs=logprobs)), eager) as made:
            return await made.whole()

    answer = asyncio.run(watched(turns, whole()))
    assert [len(delta.token_ids) for delta in answer] == [tokens + 1] * n
    assert 0 < turns.most <= 2 * SLICE


def test_a_backlog_wakes_a_reader_that_waits_for_the_end():
    async def first() -> int:
        inbox = Inbox(eager=False)
        inbox.put([TokenEvent("r", 0, 5)] * (BACKLOG - 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.get(SLICE), 0.05)
        inbox.put([TokenEvent("r", 0, 5)])
        return len(await asyncio.wait_for(inbox.get(SLICE), 20))

    assert asyncio.run(first()) == BACKLOG


def test_a_reader_that_has_taken_all_takes_no_extra_turn(monkeypatch: pytest.MonkeyPatch):
    turns, sleep, own = list[float](), asyncio.sleep, threading.get_ident()

    async def noted(delay: float) -> None:
        if threading.get_ident() == own:  # servers of other tests run in this process
            turns.append(delay)
        await sleep(delay)

    monkeypatch.setattr(generation.asyncio, "sleep", noted)

    async def sizes() -> list[int]:
        inbox, token = Inbox(eager=True), TokenEvent("r", 0, 5)
        waits = asyncio.create_task(inbox.get(2))
        await sleep(0)
        inbox.put([token] * 2)
        taken = [await waits]
        assert not turns, "it has waited for them"
        inbox.put([token] * 3)
        taken += [await inbox.get(2), await inbox.get(2)]
        return list(map(len, taken))

    assert asyncio.run(sizes()) == [2, 2, 1]
    assert turns == [0, 0], "before those that came while it wrote, and before the last one"


def test_what_comes_while_others_have_their_turn_goes_out_with_what_has_waited():
    async def size() -> int:
        inbox, token = Inbox(eager=True), TokenEvent("r", 0, 5)
        inbox.put([token])
        asyncio.get_running_loop().call_soon(inbox.put, [token])  # of the next step, which a busy loop reads late
        return len(await inbox.get(SLICE))

    assert asyncio.run(size()) == 2


def test_after_events_were_taken_a_pause_collects_the_next_ones_and_an_end_cuts_it_short():
    async def sizes() -> list[int]:
        inbox, token = Inbox(eager=True, pauses=Pauses(3600)), TokenEvent("r", 0, 5)
        inbox.put([token])
        first = await asyncio.wait_for(inbox.get(SLICE), 20)
        for _ in range(3):
            inbox.put([token])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.get(SLICE), 0.05)
        inbox.put([TokenEvent("r", 0, 5, finish_reason="length")])
        return [len(first), len(await asyncio.wait_for(inbox.get(SLICE), 20))]

    assert asyncio.run(sizes()) == [1, 4]


def test_a_pause_ends_by_itself():
    async def size() -> int:
        inbox, token = Inbox(eager=True, pauses=Pauses(0.01)), TokenEvent("r", 0, 5)
        inbox.put([token])
        await inbox.get(SLICE)
        inbox.put([token, token])
        return len(await asyncio.wait_for(inbox.get(SLICE), 20))

    assert asyncio.run(size()) == 2


def behind(gap_s: float, came: list[int]) -> int:
    """The events that a reader had left when it was told to be too slow; it comes every `gap_s` seconds."""

    async def read() -> int:
        loop, now = asyncio.get_running_loop(), [0.0]
        loop.time = lambda: now[0]
        inbox, left = Inbox(eager=True), 0
        for count in came:
            inbox.put([TokenEvent("r", 0, 5)] * count)
            left += count
            try:
                inbox.check_reader(60.0)
            except ResourceExhausted as e:
                assert "serve.stall_s = 60 s" in str(e)
                return left
            left -= len(await inbox.get(SLICE))
            now[0] += gap_s
        return 0

    return asyncio.run(read())


def test_a_reader_that_falls_behind_is_told_before_its_backlog_is_long():
    """It is never silent for as long as a client may be."""
    assert 0 < behind(59.0, [2 * SLICE] * 100) < 8 * SLICE
    assert 0 < behind(1.0, [SLICE + 50] * 10_000) < 200 * SLICE


def test_a_reader_that_keeps_up_is_never_told():
    assert not behind(59.0, [SLICE - 10] * 1000)
    assert not behind(3600.0, [10] * 100), "what it waits for itself is not late"
    burst, nothing = [50 * SLICE], [1] * 60
    assert not behind(1.0, (burst + nothing) * 20), "a burst, read in 50 s"


def test_a_turn_converts_a_bounded_part_of_an_answer(monkeypatch: pytest.MonkeyPatch):
    turns, convert_one = Turns(), convert.token_logprob

    def noted(entry: TokenLogprob | None) -> Any:
        turns.add(1)
        return convert_one(entry)

    monkeypatch.setattr(convert, "token_logprob", noted)
    deltas = [Delta(i, token_ids=(5,) * 500, logprobs=(ENTRY,) * 500) for i in range(8)]
    deltas[0] = Delta(0, logprobs=(ENTRY,) * 500, prompt_logprobs=(None, *[ENTRY] * 999))
    answer = asyncio.run(watched(turns, convert.response("r", deltas)))
    assert isinstance(answer, bytes)
    message = pb.GenerateResponse.FromString(answer)
    assert [len(output.logprobs) for output in message.outputs] == [500] * 8 and len(message.prompt_logprobs) == 1000
    assert 0 < turns.most <= convert.PER_TURN * 2


def test_an_answer_too_large_for_a_message_is_refused_by_its_numbers(served: Served):
    most = MAX_ENTRIES // (MAX_COMPLETIONS * 21)
    with refused(
        grpc.StatusCode.INVALID_ARGUMENT, "n * max_tokens * (logprobs + 1)", f"64 * {most + 1} * 21", str(MAX_ENTRIES)
    ):
        served.generate(request("Hello", most + 1, n=MAX_COMPLETIONS, logprobs=20))
