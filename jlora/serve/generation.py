"""One request on its way through a front: token events in, response deltas out.

    async with Generation(backend, request) as generation:   # submitted here
        async for delta in generation.deltas():              # until every completion has ended
            ...
                                                             # left early: aborted here

The engine thread puts events into an `Inbox`; the event loop takes whatever has come since its
last look, so a slow reader delays nobody and its backlog (at most max_tokens events per
completion) goes out as one message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Self

from jlora.errors import Unavailable
from jlora.serve import convert
from jlora.serve.backend import Backend
from jlora.serve.output import TextStream
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.status import DeadlineExceeded
from jlora.types import Request, Timing, TokenEvent, Usage

log = logging.getLogger(__name__)


class Inbox:
    """Events of one request between the engine thread, which puts, and one event loop, which gets.

    Args:
        eager: wake the loop for every event. Otherwise only when a completion ends: a unary call
            without stop strings has nothing to do earlier, and waking costs both threads time.
    """

    def __init__(self, eager: bool):
        self._loop = asyncio.get_running_loop()
        self._eager = eager
        self._events: deque[TokenEvent] = deque()
        self._wake = asyncio.Event()
        self._woken = False  # a wake-up is on its way; the loop clears it before it empties the deque

    def put(self, events: list[TokenEvent]) -> None:
        """Called on the engine thread; quick, never raises while the loop lives."""
        self._events.extend(events)
        urgent = self._eager or any(e.finish_reason for e in events)
        if urgent and not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake.set)

    async def get(self) -> list[TokenEvent]:
        """Waits for a wake-up and returns every event so far, in order."""
        await self._wake.wait()
        self._wake.clear()
        self._woken = False
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken


@dataclass
class _Completion:
    """State of one of the request's n completions; `text` is None for a model without a tokenizer."""

    text: TextStream | None
    tokens: int = 0
    ended: bool = False
    usage: Usage | None = None
    timing: Timing | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found: tokens that the engine computed after it are not shown."""
        return self.text is not None and self.text.stopped


class Generation:
    """A submitted request; an async context manager that aborts what has not ended when it is left."""

    def __init__(self, backend: Backend, request: Request, eager: bool):
        self._engine = backend.engine
        self._recent = backend.recent
        self._request = request
        self._inbox = Inbox(eager)
        tokenizer, eos = backend.tokenizer, self._engine.spec.eos_ids
        self._completions = [
            _Completion(TextStream(tokenizer, request.sampling, eos) if tokenizer else None)
            for _ in range(request.sampling.n)
        ]
        self._aborted = False
        self._handle: int | None = None

    async def __aenter__(self) -> Self:
        """Submits; raises what `Service.submit` raises.

        On a thread, because the engine's lock may be taken for the Python part of a step. A call
        cancelled meanwhile is aborted when it has been submitted.
        """
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submit))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: None if done.exception() else self._abort())
            raise
        return self

    def _submit(self) -> None:
        self._handle = self._engine.submit(self._request, self._inbox.put)

    async def __aexit__(self, *_: object) -> None:
        if not self._ended:
            self._abort()

    def _abort(self) -> None:
        """Aborts without waiting: the client that would is gone."""
        asyncio.get_running_loop().run_in_executor(None, self._abort_in_engine)

    def _abort_in_engine(self) -> None:
        try:
            self._engine.abort(self._request.id, self._handle)
        except Unavailable as e:  # the engine has stopped, and its requests with it
            log.info("abort of a request: %s", e)

    @property
    def _ended(self) -> bool:
        return all(c.ended for c in self._completions)

    async def deltas(self) -> AsyncIterator[pb.GenerateResponse]:
        """What is new, each time there is something new; usage and timing on the last message.

        Raises:
            DeadlineExceeded: the engine ended the request because its deadline passed.
            Unavailable: the engine stopped before the request ended.
        """
        while not self._ended:
            yield self._respond(await self._inbox.get())

    def _respond(self, events: list[TokenEvent]) -> pb.GenerateResponse:
        response = pb.GenerateResponse(request_id=self._request.id)
        outputs: dict[int, pb.Output] = {}
        for event in events:
            if event.prompt_logprobs is not None:
                response.prompt_logprobs.extend(map(convert.token_logprob, event.prompt_logprobs))
            if event.index not in outputs:
                outputs[event.index] = response.outputs.add(index=event.index)
            self._add(event, outputs[event.index])
        if self._ended:
            self._finish(response)
        return response

    def _add(self, event: TokenEvent, out: pb.Output) -> None:
        """Adds one event to its completion's output."""
        c = self._completions[event.index]
        reason = event.finish_reason
        if event.token_id is not None and not c.stopped:
            c.tokens += 1
            out.token_ids.append(event.token_id)
            if event.logprob is not None:
                out.logprobs.append(convert.token_logprob(event.logprob))
        if c.text is not None:
            delta = c.text.push(event)
            out.text += delta.text
            reason = delta.finish_reason  # "stop" if a stop string matched, even in the last token allowed
            if delta.stopped:
                self._engine.stop_completion(self._request.id, event.index, c.tokens, self._handle)
        if reason:
            self._end(c, event, reason)
            out.finish_reason = reason

    def _end(self, c: _Completion, event: TokenEvent, reason: str) -> None:
        c.ended = True
        self._aborted |= reason == "abort"
        if event.usage is None or event.timing is None:
            raise Unavailable("the engine stopped before the request ended")
        # The engine may have been a step ahead of a stop string; the client counts what it sees.
        c.usage, c.timing = replace(event.usage, completion_tokens=c.tokens), event.timing

    def _finish(self, response: pb.GenerateResponse) -> None:
        deadline = self._request.deadline
        if self._aborted and deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed before the request ended")
        response.usage.CopyFrom(convert.total_usage([c.usage for c in self._completions if c.usage]))
        response.timing.CopyFrom(convert.joint_timing(c.timing for c in self._completions if c.timing))
        if response.usage.completion_tokens:  # else there was no first token
            self._recent.add(response.timing.ttft_s)


async def gather(deltas: AsyncIterator[pb.GenerateResponse], n: int) -> pb.GenerateResponse:
    """All deltas of a request with n completions as the one message of a unary call."""
    whole = pb.GenerateResponse(outputs=[pb.Output(index=i) for i in range(n)])
    texts: list[list[str]] = [[] for _ in range(n)]
    async for delta in deltas:
        whole.request_id = delta.request_id
        whole.prompt_logprobs.extend(delta.prompt_logprobs)
        for part in delta.outputs:
            out = whole.outputs[part.index]
            texts[part.index].append(part.text)
            out.token_ids.extend(part.token_ids)
            out.logprobs.extend(part.logprobs)
            out.finish_reason = part.finish_reason or out.finish_reason
        if delta.HasField("usage"):
            whole.usage.CopyFrom(delta.usage)
            whole.timing.CopyFrom(delta.timing)
    for out, parts in zip(whole.outputs, texts, strict=True):
        out.text = "".join(parts)
    return whole
