"""What this process may still take of the memory of its machine and container."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jlora.machine import UNLIMITED, spare_bytes

KEPT_BYTES = 128 << 20  # that the host tier leaves at least to what comes and goes: steps, texts, answers
COMPILE_BYTES = 256 << 20  # without which no program is compiled beside the steps
WAIT_S = 10.0  # for others that were promised memory: a disk that hangs would hold it for ever


class Memory:
    """Bytes that are left, and those that were promised to work under way. For any thread.

    What is promised may be taken already, in part: `spare` lacks it then, and it counts twice. That errs on the safe
    side, for seconds.
    """

    def __init__(self, spare: Callable[[], int] = spare_bytes):
        """`spare`: bytes that machine and container can still give."""
        self._spare = spare
        self._promised = 0
        self._ended = threading.Condition()

    def beside(self, kept: int) -> int:
        """Bytes that may be taken for long, if `kept` bytes stay for what comes and goes."""
        return max(0, self._spare() - self._promised - kept)

    @contextmanager
    def promised(self, need: int, what: str, wait_s: float = WAIT_S) -> Iterator[None]:
        """Keeps `need` bytes for the work inside, and waits for such work of others first if it must.

        Raises MemoryError if they are not there when that has ended, or after `wait_s` seconds.
        """
        last = time.monotonic() + wait_s
        with self._ended:
            while need > (spare := self._spare() - self._promised):
                if not self._promised or not self._ended.wait(last - time.monotonic()):
                    raise MemoryError(f"{what} takes up to {need >> 20} MiB, and {max(0, spare) >> 20} are left")
            self._promised += need
        try:
            yield
        finally:
            with self._ended:
                self._promised -= need
                self._ended.notify_all()

    def check_compile(self) -> None:
        """Raises MemoryError if there is too little to compile a program."""
        if self._spare() < COMPILE_BYTES:
            raise MemoryError(f"less than {COMPILE_BYTES >> 20} MiB of memory are left")


def unlimited() -> Memory:
    """For work whose memory nobody counts."""
    return Memory(lambda: UNLIMITED)
