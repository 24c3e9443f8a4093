"""One request on its way through an asyncio front.

    async with Generation(backend, request, eager=True) as generation:   # submits
        async for deltas in generation.deltas():                         # until every completion has ended
            ...
                                                                         # leaving early aborts the request

The engine's thread puts events into an `Inbox`, and the event loop takes what has arrived, a bounded part in
each turn. So a slow reader delays no other request, and its backlog goes out in few messages. One that falls behind by
more than `serve.stall_s` ends: nothing else bounds what waits for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from jlora.errors import ResourceExhausted
from jlora.serve.backend import Backend
from jlora.serve.observed import Ended
from jlora.serve.pauses import Pauses
from jlora.serve.status import DeadlineExceeded
from jlora.serve.stream import Answer, joined
from jlora.serve.strip import Bar
from jlora.types import Delta, Request, Timing, TokenEvent, Usage
from jlora.validation import entries_of

BACKLOG = 256  # events that wake the loop also if it is not eager
SLICE = 512  # token ids and log-probabilities that one turn of the loop reads


class Inbox:
    """Events of one request: the engine's thread puts, one event loop gets.

    Unless `eager`, only the end of a completion or a backlog wakes the loop, which saves both threads time.
    With `pauses`, one begins with each `get`; events that come during it wait, too, and go out together.
    """

    def __init__(self, eager: bool, pauses: Pauses | None = None):
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._eager = eager
        self._pauses = pauses
        self._pausing = False
        self._events: list[TokenEvent] = []  # both threads only ever put at its end and cut its beginning at once
        self._wake = asyncio.Event()
        self._woken = False  # a wake-up is under way; `get` clears it before it takes events
        self._more = False  # the last `get` did not take all there was
        self._taken = 0  # events
        self._due = 0, self._loop.time()  # events that the reader has to take before it is looked at again, since when
        self.begun = False  # there have been events

    def put(self, events: list[TokenEvent]) -> None:
        self._events.extend(events)
        self.begun = True
        if self._woken:
            return
        if (self._eager and not self._pausing) or len(self._events) >= BACKLOG or any(e.finish_reason for e in events):
            self._rouse()

    def _rouse(self) -> None:
        if threading.get_ident() == self._thread:  # a router's; the way round through the loop costs as much as a token
            self._woken = True
            self._wake.set()
        elif not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake.set)

    def check_reader(self, most_s: float) -> None:
        """Raises ResourceExhausted for a reader that has not taken in `most_s` seconds what had come before them.

        Called before each `get`: only time in which the reader takes nothing while there is something counts. Unless
        `eager`, what has come waits for the end, and no client can delay that.
        """
        if not self._eager:
            return
        now, (due, since) = self._loop.time(), self._due
        if self._taken >= due:
            self._due = self._taken + len(self._events), now
        elif now - since > most_s:
            limit = f"serve.stall_s = {most_s:g} s"
            raise ResourceExhausted(f"the client reads too slowly: what came before the last {limit} still waits")

    async def get(self, most: int) -> list[TokenEvent]:
        """The next events, at most so many. If it is cancelled, none is lost."""
        if self._more or (self._events and not self._pausing):  # the reader is behind: other tasks have a turn first,
            await asyncio.sleep(0)  # and what comes meanwhile goes out in the same message
        await self._wake.wait()
        self._wake.clear()
        self._woken = False
        taken = self._events[:most]
        del self._events[: len(taken)]
        self._taken += len(taken)
        self._more = bool(self._events)
        if taken and self._pauses is not None and not self._pausing:
            self._pausing = True
            self._pauses.begin(self._go_on)
        if self._more:
            self._wake.set()
        return taken

    def _go_on(self) -> None:
        self._pausing = False
        if self._events:  # those that come from now on wake the loop themselves
            self._wake.set()


class Generation:
    """A submitted request; leaving the context aborts it unless it has ended."""

    def __init__(self, backend: Backend, request: Request, eager: bool, trace: Mapping[str, str] | None = None):
        self._replica = backend.loaded
        self._backend = backend
        self._began = time.monotonic()
        self._bar: Bar | None = None  # on the dashboard, once it is submitted
        self._ended: Ended | None = None
        self._failure = ""  # why the answer has failed; no more of it will come
        self._request = request
        self._trace = trace or {}  # the caller's
        self._inbox = Inbox(eager, backend.pauses)
        self._counted = False  # among the tenant's queued tokens
        self._queued = backend.access.tenants.queued(request.tenant, len(request.prompt), lambda: self._inbox.begun)
        self._slice = max(1, SLICE // entries_of(request.sampling))
        self._answer = Answer(request, backend.tokenizer, self._replica.info.eos_ids)
        self._handle = -1  # the replica's, once it is submitted
        self.totals: tuple[Usage, Timing] | None = None  # set before the last deltas are yielded

    async def __aenter__(self) -> Self:
        self._queued.__enter__()
        self._counted = True
        try:
            self._handle = await self._submit()
        except BaseException:
            self._uncount()
            raise
        self._bar = self._backend.strip.begin(self._model)
        return self

    async def _submit(self) -> int:
        submitted = self._replica.submit(self._request, self._inbox.put)
        try:
            with self._backend.telling():
                return await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            # The command may run by now: then it ends in an abort.
            submitted.add_done_callback(self._abort_submitted)
            raise
        finally:
            del submitted  # it holds its error, whose traceback holds this frame: a cycle

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self._queued.__exit__(None, None, None)

    async def __aexit__(self, *_: object) -> None:
        self._uncount()
        if self._handle >= 0 and not self._answer.ended:
            self._replica.abort(self._handle)  # nothing to wait for: the client has gone, or the answer has failed
            self._backend.observed.ends["error" if self._failure else "abort"] += self._answer.running
        if self._bar is None:
            return
        if self._ended is not None:
            self._backend.strip.leave(self._bar, self._ended)
        elif self._failure:
            self._leave(self._bar, self._broken(self._bar.first))
        else:
            leaving = asyncio.ensure_future(self._abandon(self._bar))
            self._backend.leaving.add(leaving)
            leaving.add_done_callback(self._backend.leaving.discard)

    async def _abandon(self, bar: Bar) -> None:
        """Nobody waits for the answer; the engine's last events still say where its time went."""
        try:
            while not self._answer.ended:
                self._answer.push(await self._inbox.get(self._slice))
        except Exception as e:  # of the engine, or of the request itself: its own front has told it
            self._failure = _why(e)
            self._leave(bar, self._broken(bar.first))
            return
        self._leave(bar, replace(self._told(), aborted=True))

    def _leave(self, bar: Bar, ended: Ended) -> None:
        """Ends an answer that nobody has whole."""
        self._backend.strip.leave(bar, ended)
        self._backend.left(ended)

    def _abort_submitted(self, submitted: Future[int]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self._replica.abort(submitted.result())

    async def deltas(self, to_client: bool = True) -> AsyncIterator[list[Delta]]:
        """New deltas, as soon as there are some. `to_client`: each waits until the client has read those before.

        Raises DeadlineExceeded if the deadline ended the request, and ResourceExhausted if they are read too slowly.
        """
        while not self._answer.ended:
            if to_client:
                self._inbox.check_reader(self._backend.stall_s)
            events = await self._inbox.get(self._slice)
            try:
                deltas, stops = self._answer.push(events)
            except BaseException as e:
                self._failure = _why(e)
                raise
            for index, outputs in stops:
                self._replica.stop(self._handle, index, outputs)
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._backend.observed.ends[delta.finish_reason] += 1
            if deltas and self._bar is not None and not self._bar.first:
                self._bar.first = time.time()
            if self._answer.ended:
                self._finish()
            if deltas:
                yield deltas

    @property
    def _model(self) -> str:
        return self._request.adapter or self._replica.info.model

    async def whole(self) -> list[Delta]:
        """One delta per completion; errors as in `deltas`."""
        wholes = []
        for whole in joined([delta async for deltas in self.deltas(to_client=False) for delta in deltas]):
            wholes.append(whole)
            await asyncio.sleep(0)
        return wholes

    def _finish(self) -> None:
        deadline = self._request.deadline
        if self._answer.aborted and deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed before the request ended")
        self.totals = self._answer.totals()
        self._ended = self._told()
        self._backend.ended(self._ended)

    def _told(self) -> Ended:
        usage, timing = self._answer.totals()
        return self._record(usage, timing, self._answer.aborted)

    def _broken(self, first: float) -> Ended:
        """Of an answer that has failed, whose engine tells no times. `first`: when its first token came; 0 if none."""
        ended = self._record(Usage(len(self._request.prompt), 0, self._answer.tokens), Timing(), False)
        ttft = first - ended.began if first else 0.0
        timing = Timing(prefill=ttft, ttft=ttft) if first else Timing(queue=ended.whole_s)
        return replace(ended, timing=timing, error=self._failure)

    def _record(self, usage: Usage, timing: Timing, aborted: bool) -> Ended:
        whole_s, answer = time.monotonic() - self._began, self._answer
        began = time.time() - whole_s
        return Ended(self._request, self._model, usage, timing, answer.longest, began, whole_s, self._trace, aborted)


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@asynccontextmanager
async def together(generations: Sequence[Generation]) -> AsyncIterator[None]:
    """Submits all at once; if one is refused, none runs. Leaving the context aborts those that have not ended."""
    try:
        # All answers are awaited, or an error would leave the others on their way.
        entered = await asyncio.gather(*(g.__aenter__() for g in generations), return_exceptions=True)
        failed = [error for error in entered if isinstance(error, BaseException)]
        del entered
        if failed:
            raise failed.pop(0)  # not kept here: its traceback holds this frame, a cycle
        yield
    finally:
        for generation in generations:
            await generation.__aexit__()


async def merged(generations: Sequence[Generation]) -> AsyncIterator[list[tuple[int, Delta]]]:
    """The deltas of all, each with its generation's place, as soon as there are some."""
    streams = [generation.deltas() for generation in generations]
    if len(streams) == 1:  # without a task for every delta
        async for deltas in streams[0]:
            yield [(0, delta) for delta in deltas]
        return
    came: list[tuple[int, asyncio.Task[list[Delta] | None]]] = []
    waiting: set[asyncio.Task[list[Delta] | None]] = set()
    wake = asyncio.Event()

    def go_on(place: int) -> None:
        """Waits for a stream's next deltas. Not `asyncio.wait`, whose time grows with the streams that have none."""

        def arrived(task: asyncio.Task[list[Delta] | None]) -> None:
            came.append((place, task))
            wake.set()

        task = asyncio.ensure_future(anext(streams[place], None))
        waiting.add(task)
        task.add_done_callback(arrived)

    for place in range(len(streams)):
        go_on(place)
    try:
        while waiting:
            await wake.wait()
            wake.clear()
            pairs: list[tuple[int, Delta]] = []
            done, came[:] = came[:], []
            for place, task in done:
                waiting.remove(task)
                if (deltas := task.result()) is not None:
                    pairs += [(place, delta) for delta in deltas]
                    go_on(place)
            if pairs:
                yield pairs
    finally:
        for task in waiting:
            task.cancel()
