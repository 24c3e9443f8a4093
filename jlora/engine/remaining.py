"""The programs that a start has left: they compile while the replica serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jlora.engine.built import Built
from jlora.engine.futures import BetweenSteps
from jlora.errors import Unavailable
from jlora.ports import System

if TYPE_CHECKING:  # it imports jax
    from jlora.engine.runner import Left

log = logging.getLogger(__name__)


class Remaining:
    """Compiles one program after the other on a thread of its own.

    It submits a call only when the last one has ended: a process waits at its end for all that were submitted.

    Attributes:
        finished: nothing is left, and what comes after the last program is done, too.
    """

    def __init__(self, built: Built, system: System, between_steps: BetweenSteps):
        self.finished = not built.runner.left
        self._built = built
        self._memory = system.memory
        self._between_steps = between_steps
        self._thread = system.threads.pool("jlora-compile", 1)

    def begin(self) -> None:
        if not self.finished:
            self._submit(lambda: self._go_on(iter(self._built.runner.left)))

    def close(self) -> None:
        """Begins no more; the one under way ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, call: Callable[[], None]) -> None:
        try:
            self._thread.submit(call)
        except RuntimeError:  # the replica has been closed, or the process ends
            log.info("the programs that are left do not compile any more")

    def _go_on(self, rest: Iterator[Left]) -> None:
        if (left := next(rest, None)) is None:
            self._finish()
        else:
            self._compile(left)
            self._submit(lambda: self._go_on(rest))

    def _compile(self, left: Left) -> None:
        """Runs beside the steps."""
        runner, take = self._built.runner, self._built.runner.drop
        try:
            self._memory.check_compile()
            runner.compile(left)
            take = runner.admit
        except BaseException as e:  # also SystemExit: the form would be left for ever
            known = isinstance(e, MemoryError)
            log.error("%s does not compile; a larger form stands in for it: %s", left, e, exc_info=not known)
        self._between_steps(lambda: take(left))

    def _finish(self) -> None:
        """All programs are there: steps need not wait for whole copies from now on."""
        try:
            self._built.finish(lambda call: self._between_steps(call).result())
        except Unavailable as e:  # it stops
            log.info("steps wait for whole copies: %s", e)
        except BaseException:  # also SystemExit: the replica would never count as warm
            log.exception("steps go on waiting for whole copies")
        self._between_steps(lambda: setattr(self, "finished", True))
