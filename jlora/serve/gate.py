"""Counts the server's work, so that the excess is refused before it is read.

A refusal must cost next to nothing: with a full queue, thousands of clients may ask again and again. A request that
waits must cost little memory, too: a context manager for each count would take a kilobyte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from jlora.errors import Busy, LimitReached, QueueFull

BURST = 10_240  # calls that may come at once and are all answered, however short the queue is
MOST_CALLS = 1024  # that want no completion, for example to list adapters or to tokenize
MOST_BYTES = 512 << 20  # of the messages of all calls: gRPC keeps a message until its call has ended


class Room(NamedTuple):
    """Completions that the engine takes at once: those that run, and its queue."""

    slots: int
    queue: int

    @property
    def most(self) -> int:
        return self.slots + self.queue

    def within(self, most: int) -> Room:
        """The room, or as much of it as `most` completions take."""
        slots = min(self.slots, most)
        return Room(slots, min(self.queue, most - slots))


class _Places:
    """A resource that calls share. A tenant gets more of it only while at least as much stays free as the tenant holds.

    So some of it is always left for a tenant that holds none. With k tenants that take all they can, each gets one
    part in k + 1. Without keys, a client can name any tenant, and the rule is off.
    """

    def __init__(self, kind: str) -> None:
        self.used = 0
        self._kind = kind
        self._by: Counter[str] = Counter()

    def check_share(self, most: int, count: int, tenant: str | None, least: int = 0) -> None:
        """Raises LimitReached if `count` of `most` would be too many for the tenant, which always may have `least`."""
        mine = self._by[tenant] if tenant else 0
        if mine and mine + count > max(least, most - self.used):
            raise LimitReached(
                f"tenant {tenant!r} has {mine} {self._kind}, and those that are free of the server's {most} are kept "
                "for other tenants"
            )

    def take(self, count: int, tenant: str | None) -> None:
        self.used += count
        self._by[tenant or ""] += count

    def give(self, count: int, tenant: str | None) -> None:
        self.take(-count, tenant)


class Held(NamedTuple):
    """What the calls under way hold; `calls` are those that want no completion, `bytes` those of all messages."""

    calls: int
    completions: int
    bytes: int


class Gate:
    """Completions, calls that want none, and bytes, each from start to end. For the event loop's thread only.

    `tenant` is that of the caller's key.
    """

    def __init__(self) -> None:
        self._calls = _Places("calls under way")
        self._completions = _Places("completions that run or wait")
        self._bytes = _Places("bytes of requests")

    @property
    def held(self) -> Held:
        """Zeros when no call is under way."""
        return Held(self._calls.used, self._completions.used, self._bytes.used)

    def check_calls(self, tenant: str | None = None) -> None:
        """Raises Busy if the server, or the tenant, has as many calls as it takes."""
        if self._calls.used >= MOST_CALLS:
            raise Busy(f"the server is busy with {self._calls.used} calls, limit {MOST_CALLS}")
        self._calls.check_share(MOST_CALLS, 1, tenant)

    def check_completions(self, room: Room, count: int = 1, tenant: str | None = None) -> None:
        """Raises Busy if `count` completions do not fit into `room` now, though they do at another time."""
        if self._completions.used + count > room.most >= count:
            raise QueueFull(f"queue is full: {self._completions.used} completions run or wait, limit {room.most}")
        self._completions.check_share(room.most, count, tenant, room.slots)

    @contextmanager
    def call(self, size: int, counts: bool, tenant: str | None = None) -> Iterator[Callable[[int], None]]:
        """A call with a message of at most `size` bytes; `counts` says that it wants no completion.

        Yields what takes the message's size once it is known, to give the rest back.

        Raises Busy if there are too many of these calls, or too many bytes of all.
        """
        if counts:
            self.check_calls(tenant)
        held = self._bytes.used
        if held and held + size > MOST_BYTES:
            raise Busy(f"the server holds {held} bytes of requests, and {size} more pass the limit of {MOST_BYTES}")
        self._bytes.check_share(MOST_BYTES, size, tenant)
        self._calls.take(int(counts), tenant)
        self._bytes.take(size, tenant)

        def has(known: int) -> None:
            nonlocal size
            self._bytes.give(size - known, tenant)
            size = known

        try:
            yield has
        finally:
            self._calls.give(int(counts), tenant)
            self._bytes.give(size, tenant)

    @contextmanager
    def completions(self, room: Room, count: int, tenant: str | None = None) -> Iterator[None]:
        """The completions of one request; errors as in `check_completions`."""
        self.check_completions(room, count, tenant)
        self._completions.take(count, tenant)
        try:
            yield
        finally:
            self._completions.give(count, tenant)
