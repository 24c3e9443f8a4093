"""How a request with a missing adapter starts soonest: predictions from measured costs. Plain Python, no jax.

wait      the copy lands, then the device computes the prompt
stream    the device computes each group of layers when the group has arrived
cpu       the same, but the host computes the adapter's part of groups that have not arrived
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jlora.cache.transfer import Meter
from jlora.cache.tree import ADAPTER, AdapterNode
from jlora.model.spec import PROJECTIONS
from jlora.step_model import FittedSteps

FEW, MANY = 1, 9  # blocks per projection of rehearsals
ROUNDS = 3  # interleaved: a neighbour on the machine then disturbs no case in all of them


class Line(NamedTuple):
    """Seconds by tokens."""

    fixed: float
    each: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.each * tokens

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """The line through the first and the last point, without negative parts; one point gives no fixed part."""
        (x, y), (x1, y1) = points[0], points[-1]
        each = (y1 - y) / (x1 - x) if x1 > x else y / x
        each = min(max(each, 0.0), max(y1, 0.0) / x1)
        return cls(max(0.0, y - each * x), each)


class Prompts(NamedTuple):
    """Seconds by tokens of a prompt, as fitted."""

    steps: FittedSteps

    def at(self, tokens: float) -> float:
        return self.steps.prefill_s({0: 1}, math.ceil(tokens))


class Costs(NamedTuple):
    """Seconds of a prompt's forward, over all layers.

    Attributes:
        device: the base's part.
        place: of the exchanges between device and host, at one of the four places of a layer.
        block: of reading a block of the adapter and its products on the host.
    """

    device: Line | Prompts
    place: Line
    block: Line

    @classmethod
    def fitted(cls, steps: FittedSteps) -> Costs:
        """Costs of a file of `jlora doctor fit`."""
        return cls(Prompts(steps), Line(*steps.help.place), Line(*steps.help.block))


@dataclass(frozen=True, slots=True)
class Cold:
    """A request whose adapter is not on the device.

    Attributes:
        tokens: of the prompt, to compute.
        blocks: of the adapter.
        places: of a layer at which the adapter acts, 1 to 4.
        left_s, copy_s: seconds until the adapter's copy has landed, and of the copy alone.
        groups: of layers that the copy comes in.
    """

    tokens: int
    blocks: int
    places: int
    left_s: float
    copy_s: float
    groups: int


def predict(cold: Cold, costs: Costs) -> dict[str, float]:
    """Seconds to the first token by the way of starting."""
    device_s = costs.device.at(cold.tokens)
    added_s = cold.places * costs.place.at(cold.tokens) + cold.blocks * costs.block.at(cold.tokens)
    streamed = helped = 0.0
    for group in range(1, cold.groups + 1):
        arrives = cold.left_s - cold.copy_s * (1 - group / cold.groups)
        streamed = max(streamed, arrives) + device_s / cold.groups
        helped += (device_s + added_s * (arrives > helped)) / cold.groups
    return {"wait": cold.left_s + device_s, "stream": streamed, "cpu": helped}


def measure(rehearse: Callable[[int, int], float], sizes: Sequence[int]) -> Costs:
    """Costs from rehearsals of forwards: `rehearse(tokens, blocks per projection)` gives seconds."""
    cases = [(tokens, blocks) for tokens in sizes for blocks in (0, FEW, MANY)]
    taken = [{case: rehearse(*case) for case in cases} for _ in range(ROUNDS)]
    best = {case: min(times[case] for times in taken) for case in cases}
    device, place, block = [], [], []
    for tokens in sizes:
        bare, few, many = (best[tokens, blocks] for blocks in (0, FEW, MANY))
        each = max(0.0, (many - few) / (MANY - FEW) / len(PROJECTIONS))
        device.append((tokens, bare))
        place.append((tokens, max(0.0, few - bare - FEW * len(PROJECTIONS) * each) / 4))
        block.append((tokens, each))
    return Costs(*(Line.through(points) for points in (device, place, block)))


class Chooser:
    """Decides where the host helps: where that brings the first token soonest.

    Args:
        shape: uid of an adapter -> the places of a layer at which it acts.
    """

    def __init__(self, costs: Costs, meter: Meter, groups: int, places: Callable[[int], int]):
        self.costs = costs
        self._meter = meter
        self._groups = groups
        self._places = places

    def __call__(self, adapter: AdapterNode, left_s: float, tokens: int) -> bool:
        """See `jlora.cache.readiness.Helps`."""
        found = predict(self.cold(adapter, left_s, tokens), self.costs)
        return found["cpu"] < min(found["wait"], found["stream"])

    def cold(self, adapter: AdapterNode, left_s: float, tokens: int) -> Cold:
        """What is known of a request for the adapter."""
        copy_s = min(left_s, self._meter.load_s(ADAPTER, adapter.size))
        return Cold(tokens, adapter.size, self._places(adapter.uid), left_s, copy_s, self._groups)
