"""Virtual time, and an asyncio event loop for each modelled process.

All loops share one `Time` and one thread. A loop runs asyncio's own tasks and timers in asyncio's order; which
process runs next is drawn. A process that is stopped keeps what comes to it; one that is killed loses it, and none
of its `finally` blocks run.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from itertools import count
from typing import Any

from jlora.sim.clock import START_S

MOST_TURNS = 200_000  # without time passing: more is a livelock


class Livelock(AssertionError):
    """Processes are busy for ever at one moment."""


class Time:
    """The clock and the order of everything. `draw` chooses among processes that could run."""

    def __init__(self, draw: random.Random):
        self.now = START_S
        self.events = 0  # turns of loops and timers, so far
        self._draw = draw
        self._order = count()
        self._heap: list[tuple[float, int, Loop | None, Any]] = []
        self._awake: dict[Loop, None] = {}

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, run: Callable[[], object]) -> None:
        """Runs something outside of every process: the network, the script."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), None, run))

    def after(self, seconds: float, run: Callable[[], object]) -> None:
        """The same, so many seconds from now."""
        self.at(self.now + seconds, run)

    def timer(self, loop: Loop, handle: asyncio.TimerHandle) -> None:
        """Puts a timer of a process in line."""
        heapq.heappush(self._heap, (handle.when(), next(self._order), loop, handle))

    def wake(self, loop: Loop) -> None:
        """The process has something to do."""
        self._awake[loop] = None

    def rest(self, loop: Loop) -> None:
        """It has nothing to do, or may not."""
        self._awake.pop(loop, None)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Plays to the time `until`, or to `done`, which is asked when time passes; whether it was done."""
        turns = 0
        while True:
            if self._awake:
                awake = list(self._awake)
                loop = awake[0] if len(awake) == 1 else self._draw.choice(awake)
                loop.turn()
                turns += 1
                self.events += 1
                if turns > MOST_TURNS:
                    raise Livelock(f"{loop.name} runs without end at {self.now:.6f} s")
                continue
            if done():
                return True
            if not self._heap or self._heap[0][0] > until:
                self.now = until
                return False
            when, _, loop, what = heapq.heappop(self._heap)
            if when > self.now:
                self.now, turns = when, 0
            self.events += 1
            if loop is None:
                what()
            elif not what.cancelled():
                loop.due(what)


class Loop(asyncio.AbstractEventLoop):
    """The event loop of one process.

    Attributes:
        stopped: the process does not run (SIGSTOP).
        dead: it was killed, or has ended.
        errors: what nobody caught.
        watched: what it does counts.
    """

    def __init__(self, name: str, time: Time):
        self.name = name
        self.stopped = self.dead = False
        self.errors: list[dict[str, Any]] = []
        self._time = time
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._running, self.watched = False, True

    def __repr__(self) -> str:
        return f"<loop of {self.name}>"

    # -- the process ----------------------------------------------------------------------------

    def turn(self) -> None:
        """Runs what is ready now, as one round of asyncio does."""
        asyncio._set_running_loop(self)
        self._running = True
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
                if self.dead or self.stopped:
                    break
        finally:
            self._running = False
            asyncio._set_running_loop(None)
        if not self._ready:
            self._time.rest(self)

    def due(self, handle: asyncio.Handle) -> None:
        """A timer has run out."""
        if not self.dead:
            self._ready.append(handle)
            self._wake()

    def stop_process(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self._time.rest(self)

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        if self._ready:
            self._wake()

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more."""
        self.dead = True
        self._time.rest(self)

    def bury(self) -> None:
        """Ends the tasks of a process that nobody watches any more: at the end of a world, whatever became of it."""
        self.dead = self.stopped = False
        self.watched = False
        for _ in range(4):
            for task in list(self._tasks):
                task.cancel()
            for _ in range(50):
                if self._ready:
                    self.turn()
        self.dead = True
        self._time.rest(self)

    def _wake(self) -> None:
        if not (self.stopped or self.dead):
            self._time.wake(self)

    # -- asyncio --------------------------------------------------------------------------------

    def time(self) -> float:
        return self._time.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._wake()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._time.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._time.timer(self, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio tells; `Time.run` passes cancelled timers over."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """On no thread: in a later turn of this loop."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as e:
                future.set_exception(e)

        self.call_soon(run)
        return future

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self.dead

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.watched and not self.dead:
            self.errors.append(context)
