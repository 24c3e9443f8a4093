"""Traces of the device and the host by `jax.profiler`, a few steps at a time, for TensorBoard or Perfetto."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from jlora.engine.futures import chained
from jlora.errors import FailedPrecondition, InvalidArgument, NotFound
from jlora.ports import Clock
from jlora.types import ProfileResult

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

    def trace(
        self, steps: int, replica: str, pool: Executor, done: Callable[[], int], when: When
    ) -> Future[ProfileResult]:
        """A trace of the next `steps`; errors as in `_start`.

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
            return pool.submit(lambda: ProfileResult(self._stop(), made))

        return chained(chained(pool.submit(self._start, steps, replica), started), ended)

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
            jax.profiler.start_trace(self._directory)
        except BaseException:
            self._running.release()
            raise

    def _stop(self) -> str:
        """Ends the trace and writes it; its name below the directory."""
        import jax

        try:
            jax.profiler.stop_trace()
        finally:
            self._running.release()
        made = max((Path(self._directory) / "plugins" / "profile").iterdir(), key=lambda run: run.stat().st_mtime)
        return made.name
