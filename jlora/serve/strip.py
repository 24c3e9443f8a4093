"""The latest requests as bars: queue, cold start, prefill, decode. What the dashboard draws. No prompts, no ids."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass

from jlora.serve.observed import Ended

KEPT = 256  # ended requests
LIVE = 256  # live ones in a picture


@dataclass(slots=True)
class Bar:
    """One request. `began` and `first` are `time.time()`, the others seconds; 0 while it runs."""

    number: int
    model: str
    began: float
    first: float = 0.0  # when its first token came
    queue: float = 0.0
    adapter_cold_start: float = 0.0
    kv_cold_start: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0
    whole: float = 0.0
    tokens: int = 0
    aborted: bool = False
    failed: bool = False


class Strip:
    """Live requests and the last ended ones. For the event loop's thread only."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._live: dict[int, Bar] = {}
        self._ended: deque[Bar] = deque(maxlen=KEPT)

    def begin(self, model: str) -> Bar:
        """A request has been submitted."""
        bar = Bar(next(self._numbers), model, time.time())
        self._live[bar.number] = bar
        return bar

    def leave(self, bar: Bar, ended: Ended) -> None:
        """Marks a request as ended."""
        self._live.pop(bar.number, None)
        timing = ended.timing
        bar.queue, bar.prefill, bar.ttft, bar.tpot = timing.queue, timing.prefill, timing.ttft, timing.tpot
        bar.adapter_cold_start, bar.kv_cold_start = timing.adapter_cold_start, timing.kv_cold_start
        bar.whole, bar.tokens, bar.aborted = ended.whole_s, ended.usage.completion_tokens, ended.aborted
        bar.failed = bool(ended.error)
        self._ended.append(bar)

    def bars(self) -> list[Bar]:
        """The ended ones in order of their ends, then the oldest live ones."""
        return [*self._ended, *itertools.islice(self._live.values(), LIVE)]
