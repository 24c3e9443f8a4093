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
from jlora.step_model import FittedSteps, StepLoad

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
    """Seconds by tokens of a prompt, as fitted; with an adapter of so many blocks, or the base's."""

    steps: FittedSteps

    def at(self, tokens: float, blocks: int = 0) -> float:
        count = math.ceil(tokens)
        pairs, rows = count * (count + 1) / 2, -(-count // self.steps.row_tokens)
        return self.steps.seconds(StepLoad(count, 0, count, pairs, blocks, blocks * count, rows))


class Costs(NamedTuple):
    """Seconds of a prompt's forward, over all layers.

    Attributes:
        device: the base's part.
        place: of the exchanges between device and host, at one of the four places of a layer.
        block: of reading a block of the adapter and its products on the host.
        parts: of what the base takes longer in parts, between which the exchanges are.
    """

    device: Line | Prompts
    place: Line
    block: Line
    parts: Line = Line(0.0, 0.0)

    @classmethod
    def fitted(cls, steps: FittedSteps) -> Costs:
        """Costs of a file of `jlora doctor fit`."""
        return cls(Prompts(steps), *(Line(*line) for line in (steps.help.place, steps.help.block, steps.help.parts)))

    def adapted(self, tokens: int, blocks: int) -> float:
        """Seconds on the device with an adapter; a rehearsal does not know what the adapter adds to the base."""
        return self.device.at(tokens, blocks) if isinstance(self.device, Prompts) else self.device.at(tokens)


@dataclass(frozen=True, slots=True)
class Cold:
    """A request whose adapter is not on the device.

    Attributes:
        tokens: of the prompt, to compute.
        blocks: of the adapter.
        places: of a layer at which the adapter acts, 1 to 4.
        left_s, copy_s: seconds until a step could use the adapter's copy, and of the copy alone.
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
    device_s = costs.adapted(cold.tokens, cold.blocks)
    host_s = costs.device.at(cold.tokens) + costs.parts.at(cold.tokens)
    host_s += cold.places * costs.place.at(cold.tokens) + cold.blocks * costs.block.at(cold.tokens)
    streamed = helped = 0.0
    for group in range(1, cold.groups + 1):
        arrives = cold.left_s - cold.copy_s * (1 - group / cold.groups)
        streamed = max(streamed, arrives) + device_s / cold.groups
        helped += (host_s if arrives > helped else device_s) / cold.groups
    return {"wait": cold.left_s + device_s, "stream": streamed, "cpu": helped}


def measure(rehearse: Callable[[int, int | None], float], sizes: Sequence[int]) -> Costs:
    """Costs from rehearsals of forwards: `rehearse(tokens, blocks per projection)` gives seconds; None: as a whole."""
    cases = [(tokens, blocks) for tokens in sizes for blocks in (None, 0, FEW, MANY)]
    taken = [{case: rehearse(*case) for case in cases} for _ in range(ROUNDS)]
    best = {case: min(times[case] for times in taken) for case in cases}
    device, place, block, parts = [], [], [], []
    for tokens in sizes:
        whole, bare, few, many = (best[tokens, blocks] for blocks in (None, 0, FEW, MANY))
        each = max(0.0, (many - few) / (MANY - FEW) / len(PROJECTIONS))
        device.append((tokens, whole))
        place.append((tokens, max(0.0, few - bare - FEW * len(PROJECTIONS) * each) / 4))
        block.append((tokens, each))
        parts.append((tokens, max(0.0, bare - whole)))
    return Costs(*(Line.through(points) for points in (device, place, block, parts)))


class Chooser:
    """Decides where the host helps: where that brings the first token soonest.

    Args:
        places: uid of an adapter -> the places of a layer at which it acts.
    """

    def __init__(self, costs: Costs, meter: Meter, groups: int, places: Callable[[int], int]):
        self.costs = costs
        self._meter = meter
        self._groups = groups
        self._places = places

    def __call__(self, adapter: AdapterNode, left_s: float, tokens: int) -> bool:
        """See `jlora.cache.readiness.Helps`."""
        found = self.predict(adapter, left_s, tokens)
        return found["cpu"] < min(found["wait"], found["stream"])

    def predict(self, adapter: AdapterNode, left_s: float, tokens: int) -> dict[str, float]:
        """Seconds to the first token by the way of starting."""
        return predict(self.cold(adapter, left_s, tokens), self.costs)

    def cold(self, adapter: AdapterNode, left_s: float, tokens: int) -> Cold:
        """What is known of a request for the adapter."""
        copy_s = min(left_s, self._meter.load_s(ADAPTER, adapter.size))
        return Cold(tokens, adapter.size, self._places(adapter.uid), left_s, copy_s, self._groups)
