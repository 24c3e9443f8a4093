"""Traces of the device and the host by `jax.profiler`, a few steps at a time, for TensorBoard or Perfetto."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from jlora.engine.futures import chained, failed
from jlora.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from jlora.ports import Clock
from jlora.types import ProfileResult

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_STEPS = 1000  # a trace grows with every step
LONGEST_S = 60.0  # a trace of an idle engine ends after so long
KEY = "serve.profile_dir"

When = Callable[[Callable[[], int | None]], Future[int]]


class Profiler:
    """One trace at a time into a directory that the operator allows; "" allows none."""

    def __init__(self, directory: str, clock: Clock):
        self._directory = directory
        self._clock = clock
        self._running = threading.Lock()
        self._stuck = False  # the last trace could not be written

    def trace(
        self, steps: int, replica: str, pool: Executor, done: Callable[[], int], when: When
    ) -> Future[ProfileResult]:
        """A trace of the next `steps`; errors as in `_start` and `_stop`, and Unavailable once the pool is shut down.

        Args:
            replica: as a client has named it: there is no other here.
            pool: starts and ends the trace, which takes long.
            done: the steps since the engine's start, on its thread.
            when: answers with the first value that is not None, looked for on the engine's thread.
        """

        def began(first: int) -> Future[int]:
            until = self._clock() + LONGEST_S
            return when(lambda: made if (made := done() - first) >= steps or self._clock() > until else None)

        def started(_: None) -> Future[int]:
            return chained(when(done), began)

        def ended(made: int) -> Future[ProfileResult]:
            return _submitted(pool, lambda: ProfileResult(self._stop(), made))

        return chained(chained(_submitted(pool, lambda: self._start(steps, replica)), started), ended)

    def _start(self, steps: int, replica: str) -> None:
        """Begins a trace.

        Raises:
            FailedPrecondition: no directory is allowed, or a trace is being made.
            InvalidArgument: too many steps.
            NotFound: a replica is named.
        """
        if replica:
            raise NotFound(f"replica = {replica[:60]!r}: this server is one replica, and no router")
        if not self._directory:
            raise FailedPrecondition(f"profiles are off: start the server with {KEY}, a directory for them")
        if not 1 <= steps <= MOST_STEPS:
            raise InvalidArgument(f"steps = {steps}: must be in [1, {MOST_STEPS}]")
        if not self._running.acquire(blocking=False):
            raise FailedPrecondition("a profile is being made; ask again when it has ended")
        import jax  # a replica in a simulation has no device to trace

        try:
            if self._stuck:  # jax 0.10 keeps a trace that it could not write until another attempt
                with suppress(RuntimeError, OSError):
                    jax.profiler.stop_trace()
            self._stuck = False
            jax.profiler.start_trace(self._directory)
        except BaseException:
            self._running.release()
            raise

    def _stop(self) -> str:
        """Ends the trace and writes it; its name below the directory.

        Raises ResourceExhausted if it cannot be written.
        """
        import jax

        try:
            jax.profiler.stop_trace()
            made = max((Path(self._directory) / "plugins" / "profile").iterdir(), key=lambda run: run.stat().st_mtime)
        except (OSError, jax.errors.JaxRuntimeError) as e:  # the second, too, is of the file: its text says which
            self._stuck = True
            log.warning("%s = %s: the trace cannot be written: %s", KEY, self._directory, e)
            raise ResourceExhausted(
                f"the trace cannot be written into {KEY}: is the disk full? The server's log says why"
            ) from e
        finally:
            self._running.release()
        return made.name


def _submitted(pool: Executor, work: Callable[[], T]) -> Future[T]:
    try:
        return pool.submit(work)
    except RuntimeError:  # the pool is shut down
        return failed(Unavailable("the server has stopped"))
