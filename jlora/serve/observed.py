"""Counts at the end of each answer: its times, its tokens, and its finish reason.

prometheus_client's own histograms count one observation at a time and take a lock for it. These take a weight, so
that the gaps between a request's tokens count in one step; `serve/http/metrics.py` hands them to prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jlora.serve.tally import Tally
from jlora.types import Request, Timing, Usage

# Upper bounds in seconds: vLLM's, so that a board that reads both sees the same steps, and some below them.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
FIRST += (160.0, 640.0, 2560.0)
GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
GAP += (20.0, 40.0, 80.0)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
WHOLE += (480.0, 960.0, 1920.0, 7680.0)
COLD = ("wait", "stream", "cpu")  # kinds of an adapter's cold start
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


def trace_of(headers: Iterable[tuple[str, str | bytes]]) -> Mapping[str, str]:
    """A caller's trace context, out of HTTP's headers or gRPC's metadata."""
    return {name: str(value) for name, value in headers if name in ("traceparent", "tracestate")}


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer that has ended, for all that watch: metrics, traces, the dashboard.

    Attributes:
        model: the base's name, or the adapter's.
        longest: output tokens of the longest completion.
        began: `time.time()` of the request's arrival; whole_s: seconds from there to the end.
        aborted: the client, a deadline or `Abort` ended it early.
        error: why the answer has failed; "" if it has not.
        trace: the caller's `traceparent` and `tracestate`, as far as it sent them.
    """

    request: Request
    model: str
    usage: Usage
    timing: Timing
    longest: int
    began: float
    whole_s: float
    trace: Mapping[str, str] = field(default_factory=dict)
    aborted: bool = False
    error: str = ""


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
        per_token: the request's mean gap, once for each request.
        adapter_cold, kv_cold: cold starts, those of adapters by how they were met (`Timing.cold_start`).
        ends: completions by finish reason; those whose client has gone count as "abort", those that failed as "error".
    """

    first_token: Histogram = _histogram(FIRST)
    gap: Histogram = _histogram(GAP)
    queue: Histogram = _histogram(WHOLE)
    prefill: Histogram = _histogram(WHOLE)
    decode: Histogram = _histogram(WHOLE)
    whole: Histogram = _histogram(WHOLE)
    per_token: Histogram = _histogram(GAP)
    adapter_cold: dict[str, Histogram] = field(default_factory=lambda: {kind: Histogram(FIRST) for kind in COLD})
    kv_cold: Histogram = _histogram(FIRST)
    prompt_tokens: Histogram = _histogram(TOKENS)
    output_tokens: Histogram = _histogram(TOKENS)
    longest: Histogram = _histogram(TOKENS)
    completions: Histogram = _histogram(TOKENS)
    by_adapter: Tally = field(default_factory=Tally)
    ends: Counter[str] = field(default_factory=Counter)

    def answered(self, ended: Ended) -> None:
        """Counts an answer; without a first token it has no times."""
        usage, timing = ended.usage, ended.timing
        completions = ended.request.sampling.n
        self.by_adapter.add(ended.model, usage)
        self.whole.add(ended.whole_s)
        self.prompt_tokens.add(usage.prompt_tokens)
        self.output_tokens.add(usage.completion_tokens)
        self.longest.add(ended.longest)
        self.completions.add(completions)
        if timing.cold_start:
            self.adapter_cold[timing.cold_start].add(timing.adapter_cold_start)
        if timing.kv_cold_start:
            self.kv_cold.add(timing.kv_cold_start)
        if not usage.completion_tokens:
            return
        self.first_token.add(timing.ttft)
        self.queue.add(timing.queue)
        self.prefill.add(timing.prefill)
        self.decode.add(max(0.0, ended.whole_s - timing.ttft))
        self.gap.add(timing.tpot, max(0, usage.completion_tokens - completions))
        self.per_token.add(timing.tpot, timing.tpot > 0)
