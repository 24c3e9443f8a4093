"""Carries out the manager's copies, off the engine's thread.

Two lanes, one per direction of the link, each with a thread. On the way in, a lane reads the host
tier and transfers to the device while a step runs; the engine's thread enqueues the scatter
between two steps (`landed`). On the way out, the engine's thread enqueues a snapshot of the blocks
(`start`), and the lane waits for it and writes the host tier. Demand overtakes prefetch.

A long copy that a request waits for comes in groups of layers, lower layers first: the step that
reads it may be dispatched before the last group has arrived (`place`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jlora.cache.transfer import Copy, Lost
from jlora.ports import System

if TYPE_CHECKING:  # they import jax; a simulation has others
    from jlora.cache.pool import DevicePool, HostPool, Staged


@dataclass(slots=True)
class _Job:
    copy: Copy
    snapshot: list[Any] = field(default_factory=list)  # on the way out
    staged: list[Staged] = field(default_factory=list)  # on the way in: the whole, or group after group
    placed: int = 0  # how many of these the device has been told to take in
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """Blocks of the host tier, read piece by piece: nobody writes them before the copy has landed."""

    host: HostPool
    blocks: tuple[int, ...]
    layers: slice = field(default_factory=lambda: slice(None))

    def __getitem__(self, part: slice, /) -> np.ndarray:
        return self.host.read(self.blocks[part], self.layers)


_Finish = Callable[["_Job | None", BaseException | None], None]


class Swapper:
    """Copies between the tiers, as `jlora.engine.ports.Swapper` describes.

    Args:
        gbps: slows each direction down to so many gigabytes per second; 0 leaves the link as it is.
    """

    def __init__(self, pool: DevicePool, host: HostPool, gbps: float = 0.0, system: System | None = None):
        system = system or System()
        self._clock = system.clock
        self._pool = pool
        self.host = host
        self._arrived = system.threads.condition()
        self._done: list[_Job] = []
        self._failed: list[_Job] = []
        self._streams: dict[Copy, _Job] = {}  # under way, in groups
        self._error: BaseException | None = None
        self._block_s = pool.layout.block_bytes / (gbps * 1e9) if gbps else 0.0
        self._lanes = {
            "in": _Lane("in", self._carry_in, self._finish, system),
            "out": _Lane("out", self._carry_out, self._finish, system),
        }

    def fill(self, blocks: tuple[int, ...], data: np.ndarray) -> None:
        self.host.write(blocks, data)

    def read(self, blocks: Sequence[int], layers: slice = slice(None)) -> np.ndarray:
        return self.host.read(blocks, layers)

    def start(self, copies: Iterable[Copy]) -> None:
        """Begins copies; those on their way out see the pool as it is after what was dispatched so far."""
        for copy in copies:
            job = _Job(copy)
            if copy.direction == "out":
                try:
                    job.snapshot = self._pool.gather(copy.source)
                except Exception as error:
                    self._finish(job, error)
                    continue
            elif copy.streams:
                self._streams[copy] = job
            self._lanes[copy.direction].put(job)

    def landed(self) -> list[Copy]:
        with self._arrived:
            done, self._done = self._done, []
            if self._error is not None:
                raise self._error
        return [job.copy for job in done if self._placed(job)]

    def failed(self) -> list[tuple[Copy, Exception]]:
        with self._arrived:
            failed, self._failed = self._failed, []
        for job in failed:
            self._streams.pop(job.copy, None)
        return [(job.copy, job.error) for job in failed if job.error is not None]

    def _placed(self, job: _Job) -> bool:
        """Makes a complete copy visible; False if that fails and the pool is as it was."""
        try:
            if self._streams.pop(job.copy, None) is None:
                for staged in job.staged:
                    self._pool.place(staged)
            else:
                self._place_groups(job, len(job.staged))
        except Exception as error:
            if self._pool.lost:
                raise
            self._finish(job, error)
            return False
        return True

    def arrived(self, copy: Copy, group: int) -> bool:
        job = self._streams.get(copy)
        return job is not None and len(job.staged) > group

    def place(self, copy: Copy, group: int) -> float:
        job = self._streams.get(copy)
        if job is None:  # it has landed as a whole
            return 0.0
        began = self._clock()
        with self._arrived:
            self._arrived.wait_for(lambda: len(job.staged) > group or job.error or self._error is not None)
            if self._error is not None:
                raise self._error
        if job.error is not None:
            raise Lost from job.error
        waited = self._clock() - began
        self._place_groups(job, min(group + 1, len(job.staged)))
        return waited

    def _place_groups(self, job: _Job, count: int) -> None:
        for group in range(job.placed, count):
            self._pool.place_group(job.staged[group], group)
        job.placed = max(job.placed, count)

    def wait(self, seconds: float) -> None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._done or self._failed or self._error is not None, seconds)

    def close(self) -> None:
        """Ends the lanes; copies that have not begun are forgotten."""
        for lane in self._lanes.values():
            lane.close()

    def _carry_in(self, job: _Job) -> None:
        copy, blocks = job.copy, len(job.copy.source)
        if not copy.streams:
            staged = self._pool.stage(copy.target, _Source(self.host, copy.source))
            self._lanes["in"].slow_down(blocks * self._block_s)
            job.staged = [staged]
            return
        size, groups = self._pool.group_layers, self._pool.groups
        for group in range(groups):
            part = _Source(self.host, copy.source, slice(group * size, (group + 1) * size))
            staged = self._pool.stage(copy.target, part)
            self._lanes["in"].slow_down((group + 1) / groups * blocks * self._block_s)
            with self._arrived:
                job.staged.append(staged)
                self._arrived.notify_all()

    def _carry_out(self, job: _Job) -> None:
        at = 0
        for array in job.snapshot:
            data = np.asarray(array)
            self.host.write(job.copy.target[at : at + len(data)], data)
            at += len(data)
        self._lanes["out"].slow_down(at * self._block_s)

    def _finish(self, job: _Job | None, error: BaseException | None) -> None:
        """A job has ended, or, without one, a lane."""
        with self._arrived:
            if job is None:
                self._error = self._error or error
            elif isinstance(error, Exception):
                job.error = self._pool.cause(error)
                self._failed.append(job)
            else:
                self._done.append(job)
            self._arrived.notify_all()


class _Lane:
    """One direction of the link: a thread that carries one copy at a time, demand first."""

    def __init__(self, name: str, carry: Callable[[_Job], None], finish: _Finish, system: System):
        self._clock = system.clock
        self._carry = carry
        self._finish = finish
        self._began = 0.0
        self._jobs: list[_Job] = []
        self._changed = system.threads.condition()
        self._closed = False
        self._thread = system.threads.start(f"jlora-copies-{name}", self._run)

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
                job.copy.started = self._began = self._clock()
                try:
                    self._carry(job)
                except Exception as error:  # of this copy: the next one may do
                    self._finish(job, error)
                    continue
                job.copy.seconds = self._clock() - self._began
                self._finish(job, None)
        except BaseException as error:  # the engine's thread ends with it, too
            self._finish(None, error)
            raise

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            first = next((i for i, job in enumerate(self._jobs) if job.copy.demand), 0)
            return self._jobs.pop(first)

    def slow_down(self, seconds: float) -> None:
        """Sleeps until the copy has lasted as long as on the link that is emulated."""
        with self._changed:
            while not self._closed and (left := self._began + seconds - self._clock()) > 0:
                self._changed.wait(left)
