"""How much each adapter will be asked for, and what a server can do of it.

LoRAServe (Algorithm 1, step 1) places by the tokens of the next time step, dLoRA (section 5.1) by the requests of a
long time. Both count a request when it is admitted, the first with the tokens of a mean answer: a server with too much
to do ends few requests, and would seem to need less.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jlora.cluster.placement import LEAST
from jlora.cluster.routing.costs import Costs
from jlora.step_model import FittedSteps, Objective

STEPS = 4  # time steps that a forecast looks back
GROWTH = 2.0  # times the last step's rate that a forecast may reach
HALF = 10  # time steps after which a request counts half in dLoRA's preload
MOST = 4096  # sequences of a batch that an operating point is looked for among
POINT = 1.5  # without an objective: an operating point's step, over a step of one sequence without an adapter


@dataclass(frozen=True, slots=True)
class Told:
    """What a router has to say of an adapter's requests.

    Attributes:
        requests: that were admitted; prompt: tokens of their prompts.
        ended: requests that have ended with an answer; output: tokens of these.
    """

    requests: int = 0
    prompt: int = 0
    ended: int = 0
    output: int = 0


class Demand(Protocol):
    """What adapters are asked for, by time step."""

    def asked(self, adapter: str, tokens: float, requests: int = 1) -> None:
        """Requests in the step under way, with the tokens of their prompts and, probably, answers."""
        ...

    def close(self, seconds: float) -> Mapping[str, float]:
        """Ends a time step of so many seconds; the rate of each adapter in the next one. Old ones have left."""
        ...


class Trend:
    """LoRAServe's: tokens per second, on the line through the last time steps."""

    def __init__(self, steps: int = STEPS):
        self._steps = steps
        self._now: defaultdict[str, float] = defaultdict(float)
        self._past: dict[str, deque[float]] = {}

    def asked(self, adapter: str, tokens: float, requests: int = 1) -> None:
        self._now[adapter] += tokens

    def close(self, seconds: float) -> dict[str, float]:
        for adapter in {*self._past, *self._now}:
            self._past.setdefault(adapter, deque(maxlen=self._steps)).append(self._now[adapter] / seconds)
        self._now.clear()
        self._past = {adapter: rates for adapter, rates in self._past.items() if any(rates)}
        return {adapter: extrapolate(rates) for adapter, rates in self._past.items()}


class Recent:
    """dLoRA's: requests per second, a mean in which older time steps count less: half after `HALF` steps."""

    def __init__(self, known: Mapping[str, float] | None = None):
        """`known`: requests per second of each adapter over a long time before."""
        self._now: Counter[str] = Counter()
        self._rates: dict[str, float] = dict(known or {})

    def asked(self, adapter: str, tokens: float, requests: int = 1) -> None:
        self._now[adapter] += requests

    def close(self, seconds: float) -> dict[str, float]:
        keep = 0.5 ** (1 / HALF)
        for adapter in {*self._rates, *self._now}:
            self._rates[adapter] = keep * self._rates.get(adapter, 0.0) + (1 - keep) * self._now[adapter] / seconds
        self._now.clear()
        self._rates = {adapter: rate for adapter, rate in self._rates.items() if rate > LEAST}
        return self._rates


@dataclass(slots=True)
class Load:
    """All requests so far with their tokens, and the demand of this time step. Any thread may add."""

    demand: Demand = field(default_factory=Trend)
    requests: int = 0
    prompt: int = 0
    ended: int = 0
    output: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def answer(self) -> float:
        """Tokens of a mean answer."""
        return self.output / self.ended if self.ended else 0.0

    def told(self, name: str, told: Told) -> None:
        """What has become of requests for an adapter."""
        with self.lock:
            self.ended += told.ended
            self.output += told.output
            self.requests += told.requests
            self.prompt += told.prompt
            if told.requests:
                self.demand.asked(name, told.prompt + told.requests * self.answer, told.requests)

    def close(self, seconds: float) -> Mapping[str, float]:
        """Ends a time step; the rates of the next one."""
        with self.lock:
            return self.demand.close(seconds)


def extrapolate(rates: Iterable[float]) -> float:
    """The next value on the line through the last ones by least squares, at least 0.

    At most `GROWTH` times the last one, or their mean if that is more.
    """
    known = list(rates)
    count = len(known)
    middle, mean = (count - 1) / 2, sum(known) / count
    spread = sum((i - middle) ** 2 for i in range(count))
    slope = sum((i - middle) * (rate - mean) for i, rate in enumerate(known)) / spread if spread else 0.0
    return min(max(0.0, mean + slope * (count - middle)), GROWTH * max(known[-1], mean))


def points_of(
    costs: Costs, ranks: Iterable[int], slo_s: float, context: int, prompts: float = 0.0
) -> Mapping[int, float]:
    """Operating points by rank: those that `jlora doctor fit` has written, else those of the traffic.

    Points of the file hold for its objective. With another `slo_s` (0: none), they are computed for that one.

    Args:
        context, prompts: of the traffic; see `Objective`.
    """
    points = costs.points if isinstance(costs, FittedSteps) else None
    if points is not None and (not slo_s or math.isclose(slo_s, points.of.slo_s)):
        return {**points.by_rank, **operating_points(costs, set(ranks) - points.by_rank.keys(), points.of)}
    return operating_points(costs, ranks, Objective(slo_s or lenient_s(costs), context, prompts, MOST))


def lenient_s(costs: Costs) -> float:
    """Seconds that a step may take where nobody has said it."""
    return POINT * costs.step_s({0: 1})


def operating_points(costs: Costs, ranks: Iterable[int], objective: Objective) -> dict[int, float]:
    """Tokens per second, prompts and answers, that a server serves of each rank alone.

        point(rank) = n * (1 + prompts) / step_s(n)     n: the most sequences, up to `batch`, with step_s(n) <= slo_s

    A step decodes n sequences, which read n * context tokens, and computes n * prompts prompt tokens. A server that is
    too slow for one sequence has the point of one sequence.
    """

    def step(rank: int, count: int) -> float:
        return costs.step_s({rank: count}, count * objective.context, round(count * objective.prompts))

    points = {}
    for rank in set(ranks):
        low, high = 1, objective.batch
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if step(rank, middle) <= objective.slo_s else (low, middle - 1)
        points[rank] = low * (1 + objective.prompts) / step(rank, low)
    return points
