"""The link between host and device under a virtual clock. Plain Python, no jax.

Implements `jlora.engine.ports.Swapper`. Each direction is a lane, and a lane carries one copy at a time:

    seconds = latency + bytes / bandwidth          (+ fixed seconds for an adapter on its way in)

A free lane takes the oldest copy that a request waits for, else the oldest copy. A copy in progress
is never interrupted. A copy out reads a snapshot, which the device takes after the steps that are
already dispatched. The copy holds its lane from its start until it has read the snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jlora.cache.transfer import Copy
from jlora.cache.tree import ADAPTER
from jlora.sim.clock import VirtualClock

LATENCY_S = 20e-6  # launch of a transfer


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Cost of a transfer.

    Attributes:
        block_s: seconds of one block, each way.
        latency_s: of every transfer. A streamed copy is one transfer per group of layers.
        adapter_s: additional seconds of an adapter on its way in, for a software path or a remote tier.
        groups: groups of layers of a streamed copy.
    """

    block_s: float
    latency_s: float = LATENCY_S
    adapter_s: float = 0.0
    groups: int = 1

    def seconds(self, copy: Copy) -> float:
        inward = copy.direction == "in"
        transfers = self.groups if copy.streams else 1
        fixed = self.adapter_s if inward and copy.kind == ADAPTER else 0.0
        return fixed + transfers * self.latency_s + len(copy.source) * self.block_s


class Link:
    """Both lanes. `drained` gives the time at which the device finishes all dispatched steps."""

    def __init__(self, spec: LinkSpec, clock: VirtualClock, drained: Callable[[], float]):
        self.spec = spec
        self._clock = clock
        self._drained = drained
        self._lanes = {"in": _Lane(spec), "out": _Lane(spec)}
        self._done: list[Copy] = []

    def start(self, copies: Iterable[Copy]) -> None:
        now = self._clock.now
        for copy in copies:
            lane = self._lanes[copy.direction]
            self._done += lane.advance(now)
            lane.put(copy, now, self._drained() if copy.direction == "out" else now)

    def landed(self) -> list[Copy]:
        now = self._clock.now
        for lane in self._lanes.values():
            self._done += lane.advance(now)
        done, self._done = self._done, []
        return done

    def failed(self) -> list[tuple[Copy, Exception]]:
        return []

    def next_landing(self) -> float:
        """Time at which the next copy completes; infinity if none is in progress."""
        return min(lane.ends for lane in self._lanes.values())

    def place(self, copy: Copy, group: int) -> float:
        began, lane = self._clock.now, self._lanes["in"]
        while not copy.started:  # others come first
            self._clock.advance(lane.ends)
            self._done += lane.advance(lane.ends)
        self._clock.advance(self.arrival(copy, group))
        return self._clock.now - began

    def arrived(self, copy: Copy, group: int) -> bool:
        return copy.streams and self.arrival(copy, group) <= self._clock.now

    def wait(self, seconds: float) -> None:
        clock = self._clock
        clock.advance(min(clock.horizon, clock.now + seconds, self.next_landing()))

    def fill(self, blocks: tuple[int, ...], data: object) -> None:
        """A modelled host tier holds no data."""

    def read(self, blocks: Sequence[int], layers: slice = slice(None)) -> None:
        """Nor is there any to read."""

    def close(self) -> None:
        """Holds no resources."""

    def arrival(self, copy: Copy, group: int) -> float:
        """Time at which this group of layers of a started, streamed copy is on the device."""
        if not copy.started or copy.seconds:  # not started: no wait is allowed; landed: available
            return 0.0 if copy.seconds else math.inf
        return copy.started + (group + 1) / self.spec.groups * self.spec.seconds(copy)

    def busy_s(self, direction: str) -> float:
        return self._lanes[direction].busy_s


class Blocking(Link):
    """A link whose copies to the device stop the engine: loads on demand as in the systems before CaraServe."""

    def start(self, copies: Iterable[Copy]) -> None:
        super().start(copies)
        lane = self._lanes["in"]
        while lane.ends < math.inf:
            self._clock.advance(lane.ends)
            self._done += lane.advance(self._clock.now)


class _Lane:
    """One direction."""

    def __init__(self, spec: LinkSpec):
        self._spec = spec
        self._queue: list[tuple[Copy, float]] = []  # with the time from which its data can be read
        self._current: Copy | None = None
        self.ends = math.inf  # of the current copy
        self.busy_s = 0.0

    def put(self, copy: Copy, now: float, ready: float) -> None:
        self._queue.append((copy, ready))
        if self._current is None:
            self._take(now)

    def advance(self, now: float) -> list[Copy]:
        done = []
        while self._current is not None and self.ends <= now:
            self._current.seconds = self.ends - self._current.started
            done.append(self._current)
            self._current = None
            if self._queue:
                self._take(self.ends)
            else:
                self.ends = math.inf
        return done

    def _take(self, at: float) -> None:
        first = next((i for i, (copy, _) in enumerate(self._queue) if copy.demand), 0)
        copy, ready = self._queue.pop(first)
        carried = self._spec.seconds(copy)
        self.busy_s += carried
        self._current, copy.started, self.ends = copy, at, max(at, ready) + carried
