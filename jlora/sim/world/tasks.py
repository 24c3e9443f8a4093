"""The product's threads as tasks: `jlora.ports.Threads` in one thread, under a virtual clock.

A task runs until it waits, or until the seed takes its turn away: at any reading of the clock, as an
operating system might. Then the seed draws the task that goes on. When none can, the clock moves to the first
moment that a task waits for.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from greenlet import getcurrent, greenlet

from jlora.ports import Threads
from jlora.sim.clock import VirtualClock

PREEMPT = 0.02  # chance that a reading of the clock ends a task's turn
LATE_S = 0.002  # a wait for a moment ends up to so much later


class Task:
    """One thread. `join` as of `jlora.ports.Thread`."""

    def __init__(self, tasks: Tasks, name: str, run: Callable[[], object]):
        self.name = name
        self.ended = False
        self.ticket = 0  # of its present wait
        self.woken = False  # by somebody, not by time
        self.holds = 0  # conditions: it is not preempted meanwhile
        self._tasks = tasks
        self._run = run
        self._joining: list[Wait] = []
        self.fiber = greenlet(self._live, tasks.hub)

    def join(self) -> None:
        while not self.ended:
            self._tasks.park(self._joining)

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._tasks.failed(self, error)
        self.ended = True
        self._tasks.left(self)
        self._tasks.wake(self._joining)


Wait = tuple[Task, int]  # and its ticket


class Tasks(Threads):
    """All tasks of a world. `dies`: asked whenever a task goes on: whether its thread ends here, by SystemExit."""

    def __init__(self, draw: random.Random, clock: VirtualClock, dies: Callable[[Task], bool] = lambda task: False):
        self.hub = getcurrent()
        self.live: dict[Task, None] = {}
        self.turns = 0
        self.draw = draw
        self.clock = clock
        self._dies = dies
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._order = itertools.count()
        self._watchers: list[Callable[[str, BaseException], None]] = []
        self.now: Task | None = None

    # -- for the world --------------------------------------------------------------------------

    def turn(self) -> bool:
        """One task goes on; False if none ever would."""
        while not self._ready:
            if not self._timers:
                return False
            at, _, task, ticket = heapq.heappop(self._timers)
            if ticket == task.ticket and not task.ended:
                self.clock.advance(at)
                self._rouse(task, False)
        self.turns += 1
        last = len(self._ready) - 1
        chosen = int(self.draw.random() * (last + 1))
        self._ready[chosen], self._ready[last] = self._ready[last], self._ready[chosen]
        self.now = task = self._ready.pop()
        task.fiber.switch()
        self.now = None
        return True

    def reading(self) -> float:
        """The clock as the product sees it. A task may lose its turn over it."""
        task = self.now
        if task is not None and not task.holds and self.draw.random() < PREEMPT:
            self._ready.append(task)
            self._switch(task)
        return self.clock.now

    def sleep(self, seconds: float) -> None:
        """The present task waits for the time to pass."""
        self.park([], seconds)

    # -- for the product --------------------------------------------------------------------------

    def start(self, name: str, run: Callable[[], object]) -> Task:
        task = Task(self, name, run)
        self.live[task] = None
        self._ready.append(task)
        return task

    def pool(self, name: str, size: int) -> Pool:
        return Pool(self, name, size)

    def watch(self, failed: Callable[[str, BaseException], None]) -> None:
        self._watchers.append(failed)

    def event(self) -> Event:
        return Event(self)

    def condition(self) -> Condition:
        return Condition(self)

    def wait(self, future: Future, seconds: float | None = None) -> None:
        waits: list[Wait] = []
        until = None if seconds is None else self.clock.now + seconds
        future.add_done_callback(lambda _: self.wake(waits))
        while not future.done() and (until is None or self.clock.now < until):
            self.park(waits, None if until is None else until - self.clock.now)

    # -- inside -----------------------------------------------------------------------------------

    def park(self, waits: list[Wait], seconds: float | None = None) -> bool:
        """The present task waits for `wake`, or for so many seconds; whether it was woken."""
        task = self.now
        assert task is not None, "only a task may wait"
        task.woken = False
        waits.append((task, task.ticket))
        if seconds is not None:
            at = self.clock.now + max(0.0, seconds) + self.draw.random() * LATE_S
            heapq.heappush(self._timers, (at, next(self._order), task, task.ticket))
        holds, task.holds = task.holds, 0
        self._switch(task)
        task.holds = holds
        return task.woken

    def wake(self, waits: list[Wait], most: int | None = None) -> None:
        """Wakes those who wait there."""
        woken = 0
        while waits and woken != most:
            task, ticket = waits.pop(0)
            if ticket == task.ticket and not task.ended:
                self._rouse(task, True)
                woken += 1

    def left(self, task: Task) -> None:
        """The task has ended."""
        del self.live[task]

    def failed(self, task: Task, error: BaseException) -> None:
        """An error has ended the task."""
        for watcher in self._watchers:
            watcher(task.name, error)

    def _rouse(self, task: Task, woken: bool) -> None:
        task.ticket += 1
        task.woken = woken
        self._ready.append(task)

    def _switch(self, task: Task) -> None:
        self.hub.switch()
        if self._dies(task):
            raise SystemExit(f"{task.name} dies")


class Event:
    """See `jlora.ports.Event`."""

    def __init__(self, tasks: Tasks):
        self._tasks = tasks
        self._set = False
        self._waits: list[Wait] = []

    def set(self) -> None:
        self._set = True
        self._tasks.wake(self._waits)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._tasks.park(self._waits, timeout)
        return self._set


class Condition:
    """See `jlora.ports.Condition`. Its lock is always free: a task that has it is not preempted."""

    def __init__(self, tasks: Tasks):
        self._tasks = tasks
        self._waits: list[Wait] = []

    def __enter__(self) -> Condition:
        if (task := self._tasks.now) is not None:
            task.holds += 1
        return self

    def __exit__(self, *_: object) -> None:
        if (task := self._tasks.now) is not None:
            task.holds -= 1

    def wait(self, timeout: float | None = None) -> bool:
        return self._tasks.park(self._waits, timeout)

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        now = self._tasks.clock
        until = None if timeout is None else now() + timeout
        while not (found := predicate()) and (until is None or now() < until):
            self.wait(None if until is None else until - now())
        return found

    def notify(self) -> None:
        self._tasks.wake(self._waits, 1)

    def notify_all(self) -> None:
        self._tasks.wake(self._waits)


class Pool(Executor):
    """An executor of `size` tasks; one lives as long as there is something to do."""

    def __init__(self, tasks: Tasks, name: str, size: int):
        self._tasks = tasks
        self._name = name
        self._size = size
        self._calls: list[tuple[Future, Callable[[], Any]]] = []
        self._workers: list[Task] = []
        self._shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._calls.append((future, lambda: fn(*args, **kwargs)))
        self._workers = [worker for worker in self._workers if not worker.ended]
        if len(self._workers) < self._size:
            self._workers.append(self._tasks.start(self._name, self._work))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shut = True
        if cancel_futures:
            calls, self._calls = self._calls, []
            for future, _ in calls:
                future.cancel()
        for worker in self._workers if wait else ():
            worker.join()

    def _work(self) -> None:
        while self._calls:
            future, call = self._calls.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
