"""Looking for a peak, the highest rate that a replica bears, or for the best choice, in as few runs as it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

REACH = 10.0  # times: as far from the first rate as a peak is looked for


def rounded(value: float) -> float:
    """Four digits: rates are told apart by them."""
    return float(f"{value:.4g}")


@dataclass(frozen=True, slots=True)
class Bracket:
    """Where a peak lies: it is borne at `under` (0: not known), not at `over` (infinity: not known).

    Attributes:
        stride: factor to the next rate where one of the two is not known.
    """

    under: float
    over: float
    stride: float

    @property
    def next(self) -> float:
        """The rate to try."""
        if self.under and self.over < math.inf:
            return rounded(math.sqrt(self.under * self.over))
        return rounded(self.under * self.stride if self.under else self.over / self.stride)


def find_peak(over: Callable[[float], bool], bracket: Bracket, close: float) -> float:
    """The highest rate that is not too much, to a factor of `close`.

    Args:
        over: runs at a rate; whether it was too much.
    Returns:
        Where none is seen within a factor of `REACH` of the first rate, the last rate tried.
    """
    least = bracket.over / REACH if bracket.over < math.inf else 0.0
    most = bracket.under * REACH or math.inf
    while bracket.over > close * bracket.under:
        rate = bracket.next
        if not least <= rate <= most:
            break
        bracket = replace(bracket, over=rate) if over(rate) else replace(bracket, under=rate)
    return bracket.under or bracket.over


def find_best(cost: Callable[[float], float], choices: Sequence[float], first: slice) -> float:
    """The choice with the lowest cost.

    Args:
        choices: in an order in which costs have one valley.
        first: of the choices, at least one: tried in any case, and those beyond while an outermost one is the best.
    """
    costs: dict[int, float] = {}
    asked = set(range(len(choices))[first])
    while not asked <= costs.keys():
        costs |= {i: cost(choices[i]) for i in sorted(asked - costs.keys())}
        best = min(sorted(costs), key=costs.__getitem__)
        asked = {max(best - 1, 0), best, min(best + 1, len(choices) - 1)}
    return choices[best]
