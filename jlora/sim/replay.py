"""Plays a trace to a replica in virtual time, and records the outcome of every request. No jax.

Turns before time 0 are history: they fill the cache, but no figure counts them. An open loop ends
some time after its last turn was due; an unanswered request counts with the time that it waited. A
closed loop ends when all turns are answered, or when no request makes progress.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jlora.errors import ResourceExhausted
from jlora.sim.clock import START_S
from jlora.sim.device import answer
from jlora.sim.observe import Observer
from jlora.sim.replica import Replica, request_for
from jlora.sim.script import Script
from jlora.sim.trace import Trace, Turn
from jlora.types import Request, SamplingParams, Timing, TokenEvent, Usage

GRACE, LEAST_GRACE_S = 0.5, 60.0  # from the last due turn to the end of a run: share of its length, and the least
STALLED_S = 600.0  # a closed loop ends after so long without progress


@dataclass(slots=True)
class Ask:
    """The outcome of one turn. Times are seconds of the trace.

    Attributes:
        sent: time at which its user sent it; first: time of its first token, infinity before that.
        usage, timing: of the whole answer; None until it is complete.
        refused: the replica can never hold the request.
        replica: of many, the one that told the first token; "" before that.
    """

    turn: Turn
    sent: float
    first: float = math.inf
    usage: Usage | None = None
    timing: Timing | None = None
    refused: bool = False
    replica: str = ""


def end_of(trace: Trace) -> float:
    """When a pass ends at the latest.

    A closed loop's times assume that answers take no time, so they do not tell when it ends.
    """
    last = max((turn.at for turn in trace.turns), default=0.0)
    return math.inf if trace.users else last + max(GRACE * last, LEAST_GRACE_S)


class Pass(ABC):
    """One pass of a trace, begun and ended alike whatever answers it. `asks` has every turn sent, history included."""

    def __init__(self, trace: Trace):
        self.asks: list[Ask] = []
        self._start = start_of(trace)
        self._end = end_of(trace)
        self._patience = STALLED_S if trace.users else math.inf
        self._script = Script(trace.turns)

    @property
    def counted(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.turn.at >= 0]

    @property
    def unsent(self) -> int:
        return len(self._script)

    def history(self) -> None:
        self.until(0.0)

    def run(self) -> None:
        """Plays until all turns are answered, or the run ends."""
        self.until(self._end)

    @abstractmethod
    def until(self, end: float) -> None:
        """Plays on to this time of the trace."""


class Replay(Pass):
    """One pass of a trace through a replica."""

    def __init__(self, replica: Replica, trace: Trace, observers: Sequence[Observer] = ()):
        super().__init__(trace)
        self._replica = replica
        self._observers = observers
        self._moved = 0.0  # time at which a request was last sent or got a token
        self._live: dict[str, Ask] = {}

    @property
    def now(self) -> float:
        return self._replica.clock.now - self._start

    def until(self, end: float) -> None:
        replica, stop = self._replica, self._start + end
        while replica.clock.now < stop and (self._live or self._script):
            if self._live and replica.clock.now - self._moved > self._patience:
                return
            wake = min(stop, self._send_due())
            if replica.busy:
                self._receive(replica.step(wake))
            else:
                replica.idle(wake)
            for observer in self._observers:
                observer(replica)

    def _send_due(self) -> float:
        """Sends the turns that are due. Returns the clock's time of the next one."""
        while (due := self._script.next_due()) is not None:
            at = self._start + due  # compared on the clock: `now` may be a rounding error short of `due`
            if at > self._replica.clock.now:
                return at
            for asked, turn in self._script.take(due):
                self._send(turn, asked)
        return math.inf

    def _send(self, turn: Turn, due: float) -> None:
        ask = Ask(turn, due)
        request = request_of(turn, self._script.prompt(turn))
        self.asks.append(ask)
        try:
            self._replica.submit(request, self._start + due)
        except ResourceExhausted:
            ask.refused = True
            self._answered(turn, (), due)
        else:
            self._live[request.id] = ask
            self._moved = self._replica.clock.now

    def _receive(self, events: Sequence[TokenEvent]) -> None:
        now = self.now
        self._moved = self._replica.clock.now if events else self._moved
        for event in events:
            ask = self._live[event.request_id]
            ask.first = min(ask.first, now)
            if event.usage is not None:
                ask.usage, ask.timing = event.usage, event.timing
                del self._live[event.request_id]
                told = answer(seed_of(ask.turn), event.usage.prompt_tokens, event.usage.completion_tokens)
                self._answered(ask.turn, told, now)

    def _answered(self, turn: Turn, tokens: Sequence[int], now: float) -> tuple[float, Turn] | None:
        return self._script.answered(turn, tokens, now)


class Hinted(Replay):
    """A replay whose clients send a hint (`Prefetch`) some time before each turn but a session's first.

    The hint names the adapter and the conversation so far, without the turn's own tokens.
    """

    def __init__(self, replica: Replica, trace: Trace, observers: Sequence[Observer] = (), ahead_s: float = 1.0):
        super().__init__(replica, trace, observers)
        self._ahead_s = ahead_s
        self._hints: list[tuple[float, int, Turn]] = []  # heap: time of the hint, session, next turn

    def _answered(self, turn: Turn, tokens: Sequence[int], now: float) -> tuple[float, Turn] | None:
        coming = super()._answered(turn, tokens, now)
        if coming is not None:
            due, following = coming
            heapq.heappush(self._hints, (self._start + max(now, due - self._ahead_s), following.session, following))
        return coming

    def _send_due(self) -> float:
        while self._hints and self._hints[0][0] <= self._replica.clock.now:
            turn = heapq.heappop(self._hints)[2]
            coming = self._script.prompt(turn)
            known = coming[: len(coming) - len(turn.adds)]
            self._replica.hint(_request(turn, known, len(coming), SamplingParams()))
        due = super()._send_due()
        return min(due, self._hints[0][0]) if self._hints else due


def request_of(turn: Turn, prompt: tuple[int, ...]) -> Request:
    """A turn as the request that its user sends."""
    sampling = SamplingParams(temperature=0.0, max_tokens=turn.output, ignore_eos=True, seed=seed_of(turn))
    return _request(turn, prompt, len(prompt), sampling)


def _request(turn: Turn, prompt: tuple[int, ...], whole: int, sampling: SamplingParams) -> Request:
    """A turn as a request. `whole`: tokens of its whole prompt, of which a hint has only a part."""
    name = f"{turn.session}.{turn.turn}"
    return request_for(name, prompt, turn.adapter, turn.activation(whole), sampling=sampling, tenant=turn.tenant)


def start_of(trace: Trace) -> float:
    """The replica's clock at the trace's time 0; the history lies between the clock's start and this time."""
    return START_S - min(0.0, min((turn.at for turn in trace.turns), default=0.0))


def seed_of(turn: Turn) -> int:
    """The seed of a turn's tokens, different for every turn of a trace."""
    return (turn.session << 12) + turn.turn + 1
