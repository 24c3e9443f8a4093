"""Counts what the server works on, so that what is too much is refused before it is read.

A refusal must cost next to nothing: with a full queue, thousands of clients may ask again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jlora.errors import Busy, QueueFull

MOST_CALLS = 1024  # that want no completion, for example to list adapters or to tokenize
MOST_BYTES = 512 << 20  # of the messages of all calls: gRPC keeps a message until its call has ended


class Gate:
    """Completions, calls that want none, and bytes, each from start to end. For the event loop's thread only."""

    def __init__(self) -> None:
        self._calls = 0
        self._completions = 0
        self._bytes = 0

    def check_calls(self) -> None:
        """Raises Busy if the server has as many calls as it takes."""
        if self._calls >= MOST_CALLS:
            raise Busy(f"the server is busy with {self._calls} calls, limit {MOST_CALLS}")

    def check_completions(self, room: int, count: int = 1) -> None:
        """Raises QueueFull if `count` completions do not fit into `room` now, though they do at another time."""
        if self._completions + count > room >= count:
            raise QueueFull(f"queue is full: {self._completions} completions run or wait, limit {room}")

    @contextmanager
    def call(self, size: int, counts: bool) -> Iterator[None]:
        """A call with a message of `size` bytes; `counts` says that it wants no completion.

        Raises Busy if there are too many of these calls, or too many bytes of all.
        """
        if counts:
            self.check_calls()
        if self._bytes and self._bytes + size > MOST_BYTES:
            raise Busy(
                f"the server holds {self._bytes} bytes of requests, and {size} more pass the limit of {MOST_BYTES}"
            )
        self._calls += counts
        self._bytes += size
        try:
            yield
        finally:
            self._calls -= counts
            self._bytes -= size

    @contextmanager
    def completions(self, room: int, count: int) -> Iterator[None]:
        """The completions of one request; errors as in `check_completions`."""
        self.check_completions(room, count)
        self._completions += count
        try:
            yield
        finally:
            self._completions -= count
