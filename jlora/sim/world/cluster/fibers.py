"""The threads of a modelled process, for code that waits: a fiber runs until it waits, and time brings it back."""

from __future__ import annotations

import threading
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
        """Nothing of a controller waits for one."""
        return threading.Event()

    def condition(self) -> Condition:
        """Nor for one of these."""
        return threading.Condition()

    def watch(self, failed: Callable[[str, BaseException], None]) -> None:
        """Fibers that fail raise in the world."""

    def wait(self, done: list[Callable[[], None]], seconds: float) -> None:
        """The fiber that calls waits, until somebody calls what is put into `done`, or for so long."""
        fiber, over = getcurrent(), []

        def wake() -> None:
            if not over:
                over.append(True)
                self._go_on(fiber)

        done.append(lambda: self._time.after(0.0, wake))
        self._time.after(seconds, wake)
        self._hub.switch()

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


class Inline(Executor):
    """Runs a call where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        settle(future, lambda: fn(*args, **kwargs))
        return future
