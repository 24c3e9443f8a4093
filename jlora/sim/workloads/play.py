"""Draws a trace from a workload and a load, and makes a closed loop of any trace.

Some sessions are running at time 0. Such a session's exchanges before time 0 are one turn, its
history. Arrivals, popularity and each session have their own random numbers, so a change of one
parameter changes nothing else: the same dialogs under another law of popularity, for example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.script import user_of
from jlora.sim.trace import FIRST_ID, Trace, Turn
from jlora.sim.workloads.arrivals import Span
from jlora.sim.workloads.load import DoesNotFit, Exchange, Load, Source

Random = np.random.Generator

# Streams of random numbers; that of a session or group also has its number.
ARRIVALS, POPULARITY, SESSION, PROMPT = 1, 2, 3, 4


def play(source: Source, load: Load) -> Trace:
    """Draws a trace with sessions of `source` at the rate of `load`. Requests that exceed `max_len` are left out.

    With fewer adapters than a group has roles, several roles share one. Raises DoesNotFit if more than
    half of the requests do, and ConfigError if there are none.
    """
    gap_s = source.gap_s if load.gap_s is None else load.gap_s
    past = 2 * source.turns * gap_s if source.turns > 1 else 0.0  # sessions that started before have ended
    arrivals, popularity = load.arrivals or source.arrivals, load.popularity or source.popularity
    groups = max(1, load.adapters // source.roles)
    rate = load.rate / source.turns
    starts = arrivals(rate, Span(-past, load.seconds), np.random.default_rng((load.seed, ARRIVALS)))
    chosen = popularity(groups, starts, np.random.default_rng((load.seed, POPULARITY)))
    turns: list[Turn] = []
    lost = 0
    for number, (start, group) in enumerate(zip(starts.times.tolist(), chosen.tolist(), strict=True)):
        session = _Session(source, load, gap_s, number, len(starts), group)
        turns += session.turns(start)
        lost += session.lost
    turns.sort(key=lambda turn: turn.at)
    kept = sum(turn.at >= 0 for turn in turns)
    if lost > kept:
        raise DoesNotFit(
            f"workload {source.name}: only {kept} of {kept + lost} requests within {load.seconds:g} s at "
            f"{load.rate:g}/s fit max_len {load.max_len} with --shrink {load.shrink}; raise --shrink"
        )
    if not kept:
        raise ConfigError(f"workload {source.name}: no request within {load.seconds:g} s at {load.rate:g}/s")
    return Trace(source.name, tuple(turns), tuple(f"a{i}" for i in range(load.adapters)), lost=lost)


def closed(trace: Trace, users: int) -> Trace:
    """The same sessions as a closed loop. Each of `users` users takes one session after the other.

    The gap between two turns becomes the time to think between answer and question. Raises ConfigError if some
    users have no session.
    """
    sessions: dict[object, list[Turn]] = {}
    for turn in trace.turns:
        sessions.setdefault(user_of(turn), []).append(turn)
    if len(sessions) < users:
        raise ConfigError(
            f"--users {users}: must be at most {len(sessions)}, the sessions of trace {trace.name}; a larger --seconds "
            "or --rate draws more of a named workload"
        )
    clocks, turns = [0.0] * users, []
    for number, session in enumerate(sessions.values()):
        user, before = number % users, math.inf
        for turn in session:
            if turn.at < 0:
                turns.append(replace(turn, user=user))
                continue
            think = turn.after if turn.after is not None else max(turn.at - before, 0.0)
            clocks[user] += think
            turns.append(replace(turn, at=clocks[user], after=think, user=user))
            before = turn.at
    turns.sort(key=lambda turn: turn.at)
    return replace(trace, name=f"{trace.name}, {users} users", turns=tuple(turns), users=users)


@dataclass(slots=True)
class _Context:
    """A context of a session while its turns are drawn; `said` is its history, `last` the history's time."""

    session: int
    said: list[int] = field(default_factory=list)
    last: float = -math.inf
    adapter: int | None = None
    length: int = 0
    turns: int = 0


@dataclass(slots=True)
class _Session:
    """One session of a group of adapters: its dialog with times, token ids and adapters."""

    source: Source
    load: Load
    gap_s: float
    number: int
    sessions: int
    group: int
    contexts: dict[int, _Context] = field(default_factory=dict)
    lost: int = 0  # requests after time 0 whose context exceeds the limit
    rng: Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng((self.load.seed, SESSION, self.number))

    def turns(self, start: float) -> list[Turn]:
        at, turns, full = start, [], False
        for index, exchange in enumerate(self.source.dialog(self.rng, self.group)):
            at += exchange.gap * self.gap_s
            if at >= self.load.seconds:
                break
            context = self._context(exchange.context)
            question, output = self._ids(exchange.asked), max(1, round(exchange.told / self.load.shrink))
            full = full or context.length + len(question) + output > self.load.max_len
            if full:
                self.lost += at >= 0
                continue
            context.length += 0 if exchange.aside else len(question) + output
            if at < 0:
                self._remember(context, exchange, question, at)
            else:
                think = exchange.gap * self.gap_s if self.source.thinks and index else None
                turns.append(replace(self._turn(context, exchange, question, at), output=output, after=think))
        latest = max((context.last for context in self.contexts.values()), default=-math.inf)
        if latest < -self.gap_s and not turns:
            return []
        history = [
            Turn(context.last, context.session, -1, tuple(context.said), 1, context.adapter, user=self.number)
            for context in self.contexts.values()
            if context.last > -math.inf
        ]
        return [*history, *turns]

    def _context(self, number: int) -> _Context:
        """A context by number. The first starts with the group's prompt, a sub-agent's is empty."""
        if number not in self.contexts:
            context = _Context(self.number + number * self.sessions)
            if number == 0:
                rng = np.random.default_rng((self.load.seed, PROMPT, self.group))
                context.said = self._ids(self.source.prompt, rng)
                context.length = len(context.said)
            self.contexts[number] = context
        return self.contexts[number]

    def _remember(self, context: _Context, exchange: Exchange, question: list[int], at: float) -> None:
        if not exchange.aside:
            context.said += [*question, *self._ids(exchange.told)]
            context.last, context.adapter = at, self._adapter(exchange.role)

    def _turn(self, context: _Context, exchange: Exchange, question: list[int], at: float) -> Turn:
        """A turn. The first turn of a context without history adds the context's prompt."""
        fresh = not context.turns and context.last == -math.inf
        adds = (*context.said, *question) if fresh else tuple(question)
        number, context.turns = context.turns, context.turns + 1
        adapter, user = self._adapter(exchange.role), self.number
        acts_from = len(adds) - len(question) if exchange.activated else None
        return Turn(at, context.session, number, adds, 1, adapter, user=user, aside=exchange.aside, acts_from=acts_from)

    def _adapter(self, role: int | None) -> int | None:
        return None if role is None else (self.group * self.source.roles + role) % self.load.adapters

    def _ids(self, tokens: float, rng: Random | None = None) -> list[int]:
        """Random token ids for `tokens` before shrinking; at least one, unless `tokens` is 0."""
        count = max(1, round(tokens / self.load.shrink)) if tokens else 0
        return (rng or self.rng).integers(FIRST_ID, self.load.vocab, count).tolist()
