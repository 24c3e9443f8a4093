"""Plays a trace to an engine in real time, and counts what its cache did.

A turn is sent at its time, or when its session's turn before has been answered if that is later:
nobody asks on before the answer. Its prompt holds the answers really given, so what is reused was
computed by this engine. Turns before time 0 are history: they are computed first, as fast as it
goes and in their order, and what follows finds a cache as a running replica has it.

The engine is stepped here, from one thread, so that a run is the same work whatever the machine's
scheduler does: submit what is due, make a step, take the tokens.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jlora.cache import inspect
from jlora.cache.manager import CacheManager
from jlora.engine.engine import Engine
from jlora.sim import outcome
from jlora.sim.script import HISTORY, Script
from jlora.sim.trace import Trace, Turn
from jlora.types import Request, SamplingParams, TokenEvent, Usage

HISTORY_AT_ONCE = 16  # turns of the history under way together
LOOKS = 16  # how often invalid KV is counted in a run
GRACE, GRACE_S = 0.5, 10.0


@dataclass(slots=True)
class Ask:
    """One turn as it went. Times are seconds from the start of the run.

    Attributes:
        due: when it was to be sent; sent: when it was; late: how long its own session kept it.
        first, last: its first and last token; 0 if there was none.
    """

    turn: Turn
    due: float
    late: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    cold: dict[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether all of its answer came."""
        return self.usage is not None


class Replay:
    """One pass of a trace through an engine that nothing else uses.

    Args:
        manager: the engine's; its counters are read.
        speed: seconds of the trace per second.
        grace: the run is cut this share of its length, and `GRACE_S` at least, after the last turn was due.
    """

    def __init__(self, engine: Engine, manager: CacheManager, trace: Trace, speed: float, grace: float = GRACE):
        self._engine = engine
        self._manager = manager
        self._trace = trace
        self._speed = speed
        self._grace = grace
        self._script = Script(trace.turns, speed)
        self._live: dict[str, Ask] = {}
        self._asks: list[Ask] = []
        self._start = math.inf  # so that all of the history is before 0

    def run(self) -> dict[str, Any]:
        """Plays it; the sample. Raises AssertionError if the cache is inconsistent at the end."""
        self._history()
        before, asked = self._engine.cache_state(), self._engine.stats()
        seconds, invalid = self._play()
        after, told = self._engine.cache_state(), self._engine.stats()
        self._engine.check_integrity()
        tokens = sum(len(ask.tokens) for ask in self._asks)
        return {
            **requests(self._asks, seconds),
            **outcome.cache(before, after),
            "invalid_kv": invalid,
            "preemptions": told.preemptions - asked.preemptions,
            "steps": told.steps - asked.steps,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "answers": {f"{a.turn.session}.{a.turn.turn}": crc(a.tokens) for a in self._asks if a.ended},
        }

    # -- inside -----------------------------------------------------------------------------

    def _history(self) -> None:
        """Computes the turns before time 0, and waits for the copies that this leaves."""
        while past := self._script.take(HISTORY):
            for begin in range(0, len(past), HISTORY_AT_ONCE):
                for due, turn in past[begin : begin + HISTORY_AT_ONCE]:
                    self._send(turn, due)
                while self._live:
                    self._take(self._engine.step())
        while self._engine.busy or self._engine.copying:
            self._take(self._engine.step()) if self._engine.busy else self._idle(0.002)
        self._asks.clear()

    def _play(self) -> tuple[float, float]:
        """Real time, until all is answered or the run is cut; its seconds, and the mean share of invalid KV."""
        looks: list[float] = []
        end = self._trace.turns[-1].at / self._speed
        self._start = time.monotonic()
        while self._script or self._live:
            now = self._now()
            if now > end + max(self._grace * end, GRACE_S):
                break
            for due, turn in self._script.take(now):
                self._send(turn, due)
            if now >= len(looks) * end / LOOKS:
                looks.append(invalid_share(self._manager))
            if self._engine.busy:
                self._take(self._engine.step())
            else:
                due = self._script.next_due()
                self._idle(0.0 if due is None else due - now)
        seconds = self._now()
        self._cut(seconds)
        return seconds, statistics.fmean(looks)

    def _cut(self, now: float) -> None:
        """Aborts what is not done."""
        kept = [(turn, turn.at / self._speed) for turn in self._script.rest()]
        self._asks += [Ask(turn, at, late=now - at) for turn, at in kept if at <= now]
        for name in list(self._live):
            self._engine.abort(name)
        while self._engine.busy or self._engine.copying:
            self._engine.step() if self._engine.busy else self._idle(0.002)
        self._live.clear()

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _idle(self, seconds: float) -> None:
        self._engine.tend()
        if seconds > 0:
            time.sleep(min(seconds, 0.002) if self._engine.copying else min(seconds, 0.01))

    def _send(self, turn: Turn, due: float) -> None:
        ask = Ask(turn, due, due - turn.at / self._speed if turn.after is None else 0.0, self._now())
        name = f"{turn.session}.{turn.turn}"
        adapter = None if turn.adapter is None else self._trace.adapters[turn.adapter]
        sampling = SamplingParams(temperature=0.0, max_tokens=turn.output, ignore_eos=True)
        self._engine.submit(Request(name, self._script.prompt(turn), sampling, adapter, tenant=turn.tenant))
        self._live[name] = ask
        self._asks.append(ask)

    def _take(self, events: Sequence[TokenEvent]) -> None:
        now = self._now()
        for event in events:
            ask = self._live[event.request_id]
            if event.token_id is not None:
                ask.tokens.append(event.token_id)
                ask.first = ask.first or now
                ask.last = now
            if event.timing is not None:
                t = event.timing
                ask.usage = event.usage
                ask.cold = {"queue": t.queue, "adapter": t.adapter_cold_start, "kv": t.kv_cold_start}
                del self._live[event.request_id]
                self._script.answered(ask.turn, ask.tokens, now)


def requests(asks: Sequence[Ask], seconds: float) -> dict[str, Any]:
    """What users saw: means and quantiles in seconds over the turns that were due.

    A turn without a first token when the run was cut counts with the time it had waited.
    """
    sent = [ask for ask in asks if ask.sent]
    ttft = [(ask.first or seconds) - ask.due for ask in sent]
    ended = [ask for ask in sent if ask.ended]
    tpot = [(ask.last - ask.first) / (len(ask.tokens) - 1) for ask in ended if len(ask.tokens) > 1]
    cold = {name: [ask.cold[name] for ask in ended] for name in ("queue", "adapter", "kv")}
    swap = [max(ask.cold["adapter"], ask.cold["kv"]) for ask in ended]
    queue = [ask.sent - ask.due + ask.cold["queue"] for ask in ended]
    return {
        "requests": len(asks),
        "unfinished": len(asks) - len(ended),
        "late": sum(ask.late > 0 for ask in asks),
        "ttft_s": _mean(ttft),
        "ttft_p50_s": _quantile(ttft, 50),
        "ttft_p99_s": _quantile(ttft, 99),
        "tpot_s": _mean(tpot),
        "queue_s": _mean(queue),
        "adapter_s": _mean(cold["adapter"]),
        "kv_s": _mean(cold["kv"]),
        "swap_s": _mean(swap),
        "prompt_tokens": sum(ask.usage.prompt_tokens for ask in ended if ask.usage),
        "cached_tokens": sum(ask.usage.cached_tokens for ask in ended if ask.usage),
    }


def invalid_share(manager: CacheManager) -> float:
    """Share of the device's KV blocks that cannot be used as they are."""
    held = manager.device.history_kv + manager.device.running_kv
    bound = manager.policy.binds(manager.base)  # then there is none, and nothing to count
    return inspect.invalid_kv(manager) / held if held and not bound else 0.0


def crc(tokens: Sequence[int]) -> int:
    """A short name of an answer."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())


def differing(answers: Mapping[str, int], reference: Mapping[str, int]) -> int:
    """How many of the answers that both runs finished are not the same."""
    return sum(answers[name] != reference[name] for name in answers.keys() & reference.keys())


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0
