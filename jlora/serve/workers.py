"""Threads beside the event loop for work on texts: few, with a bounded backlog, within the memory that is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jlora import machine
from jlora.errors import Busy

T = TypeVar("T")

THREADS = 2
INLINE_CHARS = 1024  # a text of this length takes 0.2 ms
# Above, the memory is looked at first: the tokenizer's library ends the process when it gets none.
CHECKED_CHARS = 16 << 10
CHAR_BYTES = 1024  # of memory for a character while it is tokenized: 150 measured, 530 of Chinese, 900 at worst
WAITING_CHARS = 16 << 20  # of all texts on the threads and before them: some seconds of work


class Workers:
    """Runs work on texts. `run` is for the event loop's thread only."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="jlora-text")
        self._chars = 0  # of all that wait and run
        self._lock = threading.Lock()  # of the count: a thread gives its own back

    async def run(self, chars: int, work: Callable[[], T]) -> T:
        """Runs `work` over so many characters on a thread, or at once if they are few. Raises Busy."""
        if chars <= INLINE_CHARS:
            return work()
        if self._chars and self._chars + chars > WAITING_CHARS:
            raise Busy(
                f"the tokenizer is busy: {self._chars} characters wait for it, and {chars} more pass the limit of "
                f"{WAITING_CHARS}; ask again later"
            )
        if chars > CHECKED_CHARS and (self._chars + chars) * CHAR_BYTES > machine.spare_bytes():
            raise Busy(f"the server has too little memory for a text of {chars} characters now; ask again later")
        return await self._begin(chars, work)

    def _begin(self, chars: int, work: Callable[[], T]) -> asyncio.Future[T]:
        """The work counts until a thread is done with it: a call that is cancelled does not end what runs there."""
        self._count(chars)
        given = [work]
        try:
            working = self._pool.submit(lambda: given.pop()())
        except RuntimeError as e:  # of the machine: can't start new thread
            given.clear()  # the pool keeps what it has no thread for
            self._count(-chars)
            raise Busy("the machine starts no more threads for texts now; ask again later") from e
        working.add_done_callback(lambda _: self._count(-chars))
        return asyncio.wrap_future(working)

    def _count(self, chars: int) -> None:
        with self._lock:
            self._chars += chars
