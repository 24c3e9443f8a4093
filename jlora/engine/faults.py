"""What an error within a step costs. Plain Python, no jax.

If one request is at fault, it ends and all others continue. If memory runs out, the youngest running
sequence is preempted. Every other error ends the engine, and so does one that leaves the cache or the
scheduler inconsistent.
"""

from __future__ import annotations

import logging

from jlora.cache import inspect
from jlora.cache.transfer import Copy, Lost
from jlora.engine.plan import Drawn, Sequence, StepPlan
from jlora.engine.ports import Parts, Pending, Undone
from jlora.types import TokenEvent

log = logging.getLogger(__name__)

TRIES = 4  # shortages in a row, with nobody left to give way, before a request ends for them
MOST = 16  # before the engine does, since no request is to blame


class Faults:
    """The parts of a step that may fail, each behind what is left to do then."""

    def __init__(self, parts: Parts):
        self._scheduler = parts.scheduler
        self._manager = parts.scheduler.manager
        self._runner = parts.runner
        self._swapper = parts.swapper
        self._clock = parts.clock
        self._copies: list[tuple[Copy, Exception]] = []  # failed, and their blocks not taken back yet
        self._helpless = 0
        self.ended: list[TokenEvent] = []  # final events of the requests that have failed

    def plan(self, now: float) -> StepPlan:
        """The next step; an empty one if planning failed, and then its copies go out with a later one."""
        try:
            plan = self._scheduler.plan(now)
        except Exception as error:
            self._settle(error, self._scheduler.suspect)
            return StepPlan((), (), ())
        if not plan.work:
            self._helpless = 0
        return plan

    def tend(self, now: float) -> tuple[Copy, ...]:
        """The copies to start while nothing runs; none if that failed."""
        try:
            copies = self._scheduler.tend(now)
        except Exception as error:
            self._settle(error, None)
            return ()
        self._helpless = 0
        return copies

    def run(self, plan: StepPlan) -> Pending | None:
        """Dispatches a step; None if nothing of it was."""
        try:
            pending = self._runner.run(plan, self._swapper)
        except Undone as undone:
            self._scheduler.undo(undone.works)
            cause = undone.__cause__
            if not isinstance(cause, Lost):  # else `copies` hears of it
                self._settle(cause if isinstance(cause, Exception) else undone, undone.sequence)
            return undone.pending
        self._helpless = 0
        return pending

    def commit(self, plan: StepPlan, drawn: list[Drawn], now: float) -> list[TokenEvent]:
        """Takes in the results of a step."""
        events = self._scheduler.commit(plan, drawn, now)
        error = next((event.error for event in events if event.error is not None), None)
        if error is not None:  # the scheduler has logged it
            self._check(error)
        return events

    def survive(self, error: Exception) -> None:
        """The engine goes on after an error of which nobody else may hear. Raises AssertionError if it cannot."""
        log.error("the engine goes on after an error", exc_info=error)
        self._check(error)

    def copies(self) -> None:
        """Ends the requests that wait for copies that have failed, and takes back those copies' blocks."""
        failed = self._swapper.failed()
        if not failed and not self._copies:
            return
        for copy, error in failed:
            log.error("a copy of %d blocks has failed (%s)", len(copy.source), copy.direction, exc_info=error)
            copy.streams = False  # it may stay for a while: no step is to follow it
            self._copies.append((copy, error))
        left = []
        for copy, error in self._copies:
            if copy.direction == "in":
                self.ended += self._scheduler.fail_copy(copy, error, self._clock())
            if not self._manager.lost(copy):
                left.append((copy, error))
        self._copies = left

    def _check(self, error: Exception) -> None:
        """Raises AssertionError if the error has left something half done."""
        try:
            inspect.check_integrity(self._manager)
            self._scheduler.check_integrity()
        except MemoryError:
            log.warning("memory is too short to check the cache after: %s", error)

    def _settle(self, error: Exception, guilty: Sequence | None) -> None:
        self._check(error)
        if isinstance(error, MemoryError):
            log.warning("memory is short: %s", error, exc_info=error)
            if self._retract():
                return
            self._helpless += 1
            if self._helpless < (MOST if guilty is None else TRIES):
                return
            self._helpless = 0
        if guilty is None or guilty.finished is not None:
            raise error
        self.ended += self._scheduler.fail(guilty.handle, error, self._clock())

    def _retract(self) -> bool:
        try:
            return self._scheduler.retract()
        except MemoryError as again:  # even for that: nobody gives way
            self.survive(again)
            return False
