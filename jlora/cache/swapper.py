"""Carries out the manager's copies, off the engine's thread.

Two lanes, one per direction of the link, each with a thread. On the way in, a lane reads the host
tier and transfers to the device while a step runs; the engine's thread enqueues the scatter
between two steps (`landed`). On the way out, the engine's thread enqueues a snapshot of the blocks
(`start`), and the lane waits for it and writes the host tier. Demand overtakes prefetch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import numpy as np

from jlora.cache.pool import DevicePool, HostPool, Staged
from jlora.cache.transfer import Copy


@dataclass(slots=True)
class _Job:
    copy: Copy
    snapshot: list[jax.Array]  # on the way out
    staged: Staged  # on the way in


class Swapper:
    """Copies between the tiers.

    Args:
        gbps: slows each direction down to so many gigabytes per second; 0 leaves the link as it is.
    """

    def __init__(self, pool: DevicePool, host: HostPool, gbps: float = 0.0):
        self._pool = pool
        self._host = host
        self._arrived = threading.Condition()
        self._done: list[_Job] = []
        self._error: BaseException | None = None
        block_s = pool.layout.block_bytes / (gbps * 1e9) if gbps else 0.0
        self._lanes = {
            "in": _Lane("in", self._carry_in, self._finish, block_s),
            "out": _Lane("out", self._carry_out, self._finish, block_s),
        }

    def fill(self, blocks: tuple[int, ...], data: np.ndarray) -> None:
        """Writes an adapter's master copy into the host tier."""
        self._host.write(blocks, data)

    def start(self, copies: Iterable[Copy]) -> None:
        """Begins copies; those on their way out see the pool as it is after what was dispatched so far."""
        for copy in copies:
            snapshot = self._pool.gather(copy.source) if copy.direction == "out" else []
            self._lanes[copy.direction].put(_Job(copy, snapshot, []))

    def landed(self) -> list[Copy]:
        """The copies that are complete since the last call; a step dispatched from now on sees them.

        Raises:
            Exception: whatever ended a lane.
        """
        with self._arrived:
            done, self._done = self._done, []
            if self._error is not None:
                raise self._error
        for job in done:
            self._pool.place(job.staged)
        return [job.copy for job in done]

    def wait(self, seconds: float) -> None:
        """Sleeps until a copy is complete, at most so long."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._done or self._error is not None, seconds)

    def close(self) -> None:
        """Ends the lanes; copies that have not begun are forgotten."""
        for lane in self._lanes.values():
            lane.close()

    def _carry_in(self, job: _Job) -> None:
        job.staged = self._pool.stage(job.copy.target, self._host.read(job.copy.source))

    def _carry_out(self, job: _Job) -> None:
        at = 0
        for array in job.snapshot:
            data = np.asarray(array)
            self._host.write(job.copy.target[at : at + len(data)], data)
            at += len(data)

    def _finish(self, job: _Job | None, error: BaseException | None) -> None:
        with self._arrived:
            if job is not None:
                self._done.append(job)
            self._error = self._error or error
            self._arrived.notify_all()


class _Lane:
    """One direction of the link: a thread that carries one copy at a time, demand first."""

    def __init__(
        self,
        name: str,
        carry: Callable[[_Job], None],
        finish: Callable[[_Job | None, BaseException | None], None],
        block_s: float,
    ):
        self._carry = carry
        self._finish = finish
        self._block_s = block_s
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"jlora-copies-{name}", daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                began = time.perf_counter()
                self._carry(job)
                self._slow_down(began, len(job.copy.source))
                job.copy.seconds = time.perf_counter() - began
                self._finish(job, None)
        except Exception as error:  # handed to the engine's thread, which ends with it
            self._finish(None, error)

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            first = next((i for i, job in enumerate(self._jobs) if job.copy.demand), 0)
            return self._jobs.pop(first)

    def _slow_down(self, began: float, blocks: int) -> None:
        """Makes a copy last as long as the link that is emulated would take."""
        end = began + blocks * self._block_s
        with self._changed:
            while not self._closed and (left := end - time.perf_counter()) > 0:
                self._changed.wait(left)
