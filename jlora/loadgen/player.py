"""Plays a script of turns to a server in real time, open loop or closed.

A turn is sent when `Script` says that it is due. What a session asks next contains the answers that
the server gave. Times count from when a turn was *due*, so a client or a server that falls behind
cannot hide it. Nothing is retried: a request that fails keeps its status, and its session goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jlora.loadgen.server import Failed, GrpcTarget, Part
from jlora.sim.script import HISTORY, Script
from jlora.sim.trace import Trace, Turn
from jlora.types import Timing, Usage

HISTORY_AT_ONCE = 16  # turns of the history that are under way together
OK = "OK"
INCOMPLETE = "INCOMPLETE"  # the answer ended without an error, with another number of tokens than asked for


@dataclass(slots=True)
class Call:
    """One request as it went. Times are seconds from the start of the trace.

    Attributes:
        due: when the trace wanted it; sent: when the player sent it.
        first, last: its first and last token; NaN if there was none.
        status: `OK`, `INCOMPLETE` or the name of the gRPC status; detail: the server's words.
        usage, timing: as the server reports them.
    """

    turn: Turn
    model: str
    due: float
    sent: float
    first: float = math.nan
    last: float = math.nan
    ended: float = math.nan
    tokens: list[int] = field(default_factory=list)
    status: str = OK
    detail: str = ""
    usage: Usage = Usage(0, 0, 0)
    timing: Timing = Timing()

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token."""
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """Mean seconds between its later tokens; NaN if there is only one."""
        later = len(self.tokens) - 1
        return (self.last - self.first) / later if later > 0 else math.nan

    @property
    def latency(self) -> float:
        return self.ended - self.due


@dataclass(frozen=True, slots=True)
class Pace:
    """How a trace is played: each request for at most `timeout_s`."""

    timeout_s: float = 600.0


class Player:
    """One pass of a trace over one server, which calls `tick` after each request but the history's."""

    def __init__(
        self,
        target: GrpcTarget,
        trace: Trace,
        models: Sequence[str],
        pace: Pace,
        tick: Callable[[], object] = lambda: None,
    ):
        self._target = target
        self._models = models  # the server's name for each adapter of the trace
        self._pace = pace
        self._tick = tick
        self._script = Script(trace.turns)
        self._calls: list[Call] = []
        self._start = 0.0
        self._live = 0
        self._woken = asyncio.Event()  # an answer came: more may be due

    async def history(self) -> None:
        """Sends the turns before time 0 in their order, as fast as it goes. Raises RuntimeError if one fails."""
        while past := [turn for _, turn in self._script.take(HISTORY)]:
            for begin in range(0, len(past), HISTORY_AT_ONCE):
                calls = await asyncio.gather(*(self._ask(t, 0.0) for t in past[begin : begin + HISTORY_AT_ONCE]))
                for call in calls:
                    if not call.ok:
                        raise RuntimeError(f"the trace's history failed: {call.status}: {call.detail}")
                    self._script.answered(call.turn, call.tokens, 2 * HISTORY)

    async def play(self) -> list[Call]:
        """Plays the trace proper, after `history`; returns its calls in the order in which they ended."""
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while len(self._script) or self._live:
                self._woken.clear()
                for due, turn in self._script.take(self._now()):
                    self._live += 1
                    group.create_task(self._turn(due, turn))
                await self._until_due()
        return self._calls

    async def _until_due(self) -> None:
        due = self._script.next_due()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(due - self._now(), 0.0)):
                await self._woken.wait()

    async def _turn(self, due: float, turn: Turn) -> None:
        call = await self._ask(turn, due)
        self._calls.append(call)
        self._script.answered(turn, call.tokens, call.ended)
        self._tick()
        self._live -= 1
        self._woken.set()

    async def _ask(self, turn: Turn, due: float) -> Call:
        model = "" if turn.adapter is None else self._models[turn.adapter]
        call = Call(turn, model, due, self._now())
        try:
            async with asyncio.timeout(self._pace.timeout_s):
                async for part in self._target.ask(model, self._script.prompt(turn), turn):
                    self._take(call, part)
            if len(call.tokens) != turn.output:
                call.status, call.detail = INCOMPLETE, f"{len(call.tokens)} of {turn.output} tokens came"
        except TimeoutError:
            call.status, call.detail = "DEADLINE_EXCEEDED", f"no answer within {self._pace.timeout_s:g} s"
        except Failed as e:
            call.status, call.detail = e.status, e.detail.partition("\n")[0]
        call.ended = self._now()
        return call

    def _take(self, call: Call, part: Part) -> None:
        if part.tokens:
            now = self._now()
            call.first = now if math.isnan(call.first) else call.first
            call.last = now
            call.tokens += part.tokens
        call.usage, call.timing = part.usage or call.usage, part.timing or call.timing

    def _now(self) -> float:
        return time.perf_counter() - self._start


def answers(calls: Sequence[Call]) -> dict[str, int]:
    """A short digest of every whole answer, by session and turn."""
    return {
        f"{c.turn.session}.{c.turn.turn}": zlib.crc32(np.asarray(c.tokens, np.int32).tobytes()) for c in calls if c.ok
    }


def differing(found: Mapping[str, int], reference: Mapping[str, int]) -> int:
    """How many of the answers that both runs finished differ."""
    return sum(found[name] != reference[name] for name in found.keys() & reference.keys())
