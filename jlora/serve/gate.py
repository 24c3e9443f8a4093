"""Counts what the server works on, so that what is too much is refused before it is read.

A refusal must cost next to nothing: with a full queue, thousands of clients may ask again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jlora.errors import QueueFull, ResourceExhausted

MOST_CALLS = 1024  # that want no completion, for example to list adapters or to tokenize


class Gate:
    """Completions, and calls that want none, from their start to their end. For the event loop's thread only."""

    def __init__(self) -> None:
        self._calls = 0
        self._completions = 0

    def check_calls(self) -> None:
        """Raises ResourceExhausted if the server has as many calls as it takes."""
        if self._calls >= MOST_CALLS:
            raise ResourceExhausted(f"the server is busy with {self._calls} calls, limit {MOST_CALLS}")

    def check_completions(self, room: int, count: int = 1) -> None:
        """Raises QueueFull if `count` completions do not fit into `room` now, though they do at another time."""
        if self._completions + count > room >= count:
            raise QueueFull(f"queue is full: {self._completions} completions run or wait, limit {room}")

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that wants no completion; errors as in `check_calls`."""
        self.check_calls()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    @contextmanager
    def completions(self, room: int, count: int) -> Iterator[None]:
        """The completions of one request; errors as in `check_completions`."""
        self.check_completions(room, count)
        self._completions += count
        try:
            yield
        finally:
            self._completions -= count
