"""How much each adapter will be asked for: LoRAServe, Algorithm 1, step 1; and what a server can do of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from jlora.cluster.routing.costs import Costs

STEPS = 4  # time steps that a forecast looks back
GROWTH = 2.0  # times the last step's rate that a forecast may reach
MOST = 4096  # sequences of a batch that an operating point is looked for among


class Demand:
    """Tokens per second of each adapter, by time step."""

    def __init__(self, steps: int = STEPS):
        self._steps = steps
        self._now: Counter[str] = Counter()
        self._past: dict[str, deque[float]] = {}

    def served(self, adapter: str, tokens: int) -> None:
        """Tokens of a request, prompt and answer, in the step under way."""
        self._now[adapter] += tokens

    def close(self, seconds: float) -> dict[str, float]:
        """Ends a time step of so many seconds; the forecast of the next one. Adapters unused for long have left."""
        for adapter in {*self._past, *self._now}:
            self._past.setdefault(adapter, deque(maxlen=self._steps)).append(self._now[adapter] / seconds)
        self._now.clear()
        self._past = {adapter: rates for adapter, rates in self._past.items() if any(rates)}
        return {adapter: extrapolate(rates) for adapter, rates in self._past.items()}


def extrapolate(rates: Iterable[float]) -> float:
    """The next value on the line through the last ones by least squares: at least 0, at most `GROWTH` x the last."""
    known = list(rates)
    count = len(known)
    middle, mean = (count - 1) / 2, sum(known) / count
    spread = sum((i - middle) ** 2 for i in range(count))
    slope = sum((i - middle) * (rate - mean) for i, rate in enumerate(known)) / spread if spread else 0.0
    return min(max(0.0, mean + slope * (count - middle)), GROWTH * max(known[-1], mean))


def operating_points(
    costs: Costs, ranks: Iterable[int], slo_s: float, context: int, prompts: float = 0.0
) -> dict[int, float]:
    """Tokens per second, prompts and answers, that a server serves of each rank alone, with steps of at most `slo_s`.

    A server that is too slow for one sequence has the point of one sequence.

    Args:
        context: tokens of a mean sequence.
        prompts: prompt tokens that are computed for each token of an answer.
    """

    def step(rank: int, count: int) -> float:
        return costs.step_s({rank: count}, count * context, round(count * prompts))

    points = {}
    for rank in set(ranks):
        low, high = 1, MOST
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if step(rank, middle) <= slo_s else (low, middle - 1)
        points[rank] = low * (1 + prompts) / step(rank, low)
    return points
