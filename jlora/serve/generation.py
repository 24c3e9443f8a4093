"""One request on its way through an asyncio front.

    async with Generation(backend, request, eager=True) as generation:   # submits
        async for deltas in generation.deltas():                         # until every completion has ended
            ...
                                                                         # leaving early aborts the request

The engine's thread puts events into an `Inbox`, and the event loop takes all that have arrived.
So a slow reader delays no other request, and its backlog goes out as one message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Self

from jlora.errors import Unavailable
from jlora.serve.backend import Backend
from jlora.serve.status import DeadlineExceeded
from jlora.serve.stream import Answer, joined
from jlora.types import Delta, Request, Timing, TokenEvent, Usage

log = logging.getLogger(__name__)


class Inbox:
    """Events of one request: the engine's thread puts, one event loop gets.

    Args:
        eager: wake the loop for every event. Otherwise only the end of a completion wakes it, which saves
            both threads time when nobody reads earlier.
    """

    def __init__(self, eager: bool):
        self._loop = asyncio.get_running_loop()
        self._eager = eager
        self._events: deque[TokenEvent] = deque()
        self._wake = asyncio.Event()
        self._woken = False  # a wake-up is under way; `get` clears it before it empties the deque

    def put(self, events: list[TokenEvent]) -> None:
        """Called on the engine's thread; quick, never raises while the loop lives."""
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


class Generation:
    """A submitted request; leaving the context aborts it unless it has ended."""

    def __init__(self, backend: Backend, request: Request, eager: bool):
        self._engine = backend.engine
        self._recent = backend.recent
        self._request = request
        self._inbox = Inbox(eager)
        self._answer = Answer(request, backend.tokenizer, self._engine.spec.eos_ids)
        self._handle: int | None = None
        self.totals: tuple[Usage, Timing] | None = None  # set before the last deltas are yielded

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
        if not self._answer.ended:
            self._abort()

    def _abort(self) -> None:
        """Aborts without waiting: the client that would is gone."""
        asyncio.get_running_loop().run_in_executor(None, self._abort_in_engine)

    def _abort_in_engine(self) -> None:
        try:
            self._engine.abort(self._request.id, self._handle)
        except Unavailable as e:  # the engine has stopped, and its requests with it
            log.info("abort of a request: %s", e)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New deltas, as soon as there are some.

        Raises:
            DeadlineExceeded: the engine ended the request because its deadline passed.
            Unavailable: the engine stopped before the request ended.
        """
        while not self._answer.ended:
            deltas, stops = self._answer.push(await self._inbox.get())
            for index, outputs in stops:
                self._engine.stop_completion(self._request.id, index, outputs, self._handle)
            if self._answer.ended:
                self._finish()
            if deltas:
                yield deltas

    async def whole(self) -> list[Delta]:
        """The whole answer: one delta per completion; errors as in `deltas`."""
        parts: list[list[Delta]] = [[] for _ in range(self._request.sampling.n)]
        async for deltas in self.deltas():
            for delta in deltas:
                parts[delta.index].append(delta)
        return [joined(part) for part in parts]

    def _finish(self) -> None:
        deadline = self._request.deadline
        if self._answer.aborted and deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed before the request ended")
        self.totals = usage, timing = self._answer.totals()
        if usage.completion_tokens:  # otherwise there was no first token
            self._recent.add(timing.ttft)
