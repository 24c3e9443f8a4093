"""The threads of a modelled process, for code that waits: a fiber runs until it waits, and time brings it back."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from jlora.engine.futures import settle
from jlora.ports import Condition, Event, Threads
from jlora.sim.world.cluster.loop import Loop, Time

LATE_S = 0.001  # before a call that is submitted begins
AGAIN_S = 0.02  # before a process that stands still is looked at again


class Fibers(Threads):
    """Of one process: what waits in it stands still with it, and is gone with it."""

    def __init__(self, time: Time, loop: Loop):
        self._time, self._loop = time, loop
        self._hub = getcurrent()
        self._live: dict[greenlet, None] = {}
        self._vanished: list[greenlet] = []

    @property
    def name(self) -> str:
        """Of the process."""
        return self._loop.name

    @property
    def runs(self) -> bool:
        """Whether the process does."""
        return not (self._loop.dead or self._loop.stopped)

    def start(self, name: str, run: Callable[[], object]) -> Any:
        """Runs `run`, soon."""
        fiber = greenlet(run, self._hub)
        self._live[fiber] = None
        self._time.after(LATE_S, lambda: self._go_on(fiber))

    def pool(self, name: str, size: int) -> Executor:
        """One that waits for nothing runs at once: its caller waits for it under a lock."""
        return Inline() if name == "jlora-catalogue" else Pool(self, name)

    def event(self) -> Event:
        """One that fibers wait for."""
        return FiberEvent(self)

    def condition(self) -> Condition:
        """Likewise."""
        return FiberCondition(self)

    def watch(self, failed: Callable[[str, BaseException], None]) -> None:
        """Fibers that fail raise in the world."""

    def wait(self, done: list[Callable[[], None]], seconds: float) -> None:
        """The fiber that calls waits, until somebody calls what is put into `done`, or for so long."""
        fiber, over = getcurrent(), []

        def wake() -> None:
            if not over:
                over.append(True)
                self._go_on(fiber)

        def soon() -> None:
            self._time.after(0.0, wake)

        done.append(soon)
        if seconds < math.inf:
            self._time.after(seconds, wake)
        self._hub.switch()
        done.remove(soon)

    def vanish(self) -> None:
        """The process is gone: the fiber that calls never goes on."""
        self._vanished.append(getcurrent())
        self._hub.switch()

    def bury(self) -> None:
        """Ends the fibers that still wait: first those that may hold a lock that others end with."""
        for fiber in (*self._vanished, *list(self._live)):
            if not fiber.dead:
                fiber.throw(GreenletExit)

    def _go_on(self, fiber: greenlet) -> None:
        if self._loop.dead:
            return
        if self._loop.stopped:
            self._time.after(AGAIN_S, lambda: self._go_on(fiber))
            return
        fiber.switch()
        if fiber.dead:
            self._live.pop(fiber, None)


class Pool(Executor):
    """Each call is a fiber of its own."""

    def __init__(self, fibers: Fibers, name: str):
        self._fibers, self._name, self._shut = fibers, name, False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._fibers.start(self._name, lambda: settle(future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shut = True


class FiberEvent:
    """As `threading.Event`."""

    def __init__(self, fibers: Fibers):
        self._fibers, self._set = fibers, False
        self._waiting: list[Callable[[], None]] = []

    def set(self) -> None:
        self._set = True
        for wake in self._waiting:
            wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set and timeout != 0:
            self._fibers.wait(self._waiting, math.inf if timeout is None else timeout)
        return self._set


class FiberCondition:
    """As `threading.Condition`, without a lock: a fiber gives its turn away only where it waits."""

    def __init__(self, fibers: Fibers):
        self._fibers = fibers
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> FiberCondition:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is held."""

    def wait(self, timeout: float | None = None) -> bool:
        self._fibers.wait(self._waiting, math.inf if timeout is None else timeout)
        return True

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """As often as it is woken, unless it waits for some time only."""
        while not (met := predicate()) and self.wait(timeout) and timeout is None:
            pass
        return met or predicate()

    def notify(self) -> None:
        for wake in self._waiting:
            wake()

    notify_all = notify


class Inline(Executor):
    """Runs a call where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        settle(future, lambda: fn(*args, **kwargs))
        return future
