"""What is counted where an answer ends: its times, its tokens, and why it ended.

prometheus_client's own histograms count one observation at a time and take a lock for it. These take a weight, so
that the gaps between a request's tokens count in one step; `serve/http/metrics.py` hands them to prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jlora.types import Timing, Usage

# Upper bounds in seconds, as vLLM has them: a board that reads both sees the same steps.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 80.0)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 960.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Histogram:
    """Observations by their upper bounds. Not thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, weight: int = 1) -> None:
        """`weight` observations of one value."""
        self.sum += value * weight
        self._counts[bisect_left(self._bounds, value)] += weight

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with the number of observations up to it, as Prometheus has them."""
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


def _histogram(bounds: Sequence[float]) -> Histogram:
    return field(default_factory=lambda: Histogram(bounds))


@dataclass
class Observed:
    """Answers since the start, of every front. For the event loop's thread only.

    Attributes:
        first_token, queue, prefill: as `Timing` has them.
        gap: between two tokens of a completion; the request's mean counts for each of its gaps.
        decode: from the first token to the end; whole: from the request's arrival to the end.
        ends: completions by finish reason; those whose client has gone count as "abort".
    """

    first_token: Histogram = _histogram(FIRST)
    gap: Histogram = _histogram(GAP)
    queue: Histogram = _histogram(WHOLE)
    prefill: Histogram = _histogram(WHOLE)
    decode: Histogram = _histogram(WHOLE)
    whole: Histogram = _histogram(WHOLE)
    prompt_tokens: Histogram = _histogram(TOKENS)
    output_tokens: Histogram = _histogram(TOKENS)
    ends: Counter[str] = field(default_factory=Counter)

    def answered(self, usage: Usage, timing: Timing, completions: int, whole_s: float) -> None:
        """A request has ended `whole_s` seconds after it was submitted; without a first token it has no times."""
        self.whole.add(whole_s)
        self.prompt_tokens.add(usage.prompt_tokens)
        self.output_tokens.add(usage.completion_tokens)
        if not usage.completion_tokens:
            return
        self.first_token.add(timing.ttft)
        self.queue.add(timing.queue)
        self.prefill.add(timing.prefill)
        self.decode.add(max(0.0, whole_s - timing.ttft))
        self.gap.add(timing.tpot, max(0, usage.completion_tokens - completions))
