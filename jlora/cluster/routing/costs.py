"""Step models of a router: seconds of a prefill and of a decode step, from the ranks in the batch.

CaraServe (section 5) fits one line per kernel. A padded kernel computes every request at the largest rank, an
unpadded one each at its own:

    padded (BGMV)       seconds = a * requests * largest rank + b
    unpadded (MBGMV)    seconds = a * sum of ranks + b
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Ranks = Mapping[int, int]  # largest rank of an adapter (0: the base) -> requests


class Costs(Protocol):
    """Predicts the steps of a replica."""

    def prefill_s(self, ranks: Ranks, tokens: int) -> float:
        """Seconds to compute these prompts, `tokens` in all; 0 if there are none."""
        ...

    def decode_s(self, ranks: Ranks) -> float:
        """Seconds of a step in which each of these requests decodes one token."""
        ...


@dataclass(frozen=True, slots=True)
class RankCosts:
    """One line per kernel, in seconds.

    Attributes:
        step_s: of a step without adapters.
        token_s: of a prompt token.
        rank_s: of one rank of one request.
        padded: every request counts with the largest rank in the batch.
    """

    step_s: float
    token_s: float
    rank_s: float
    padded: bool

    def adapters_s(self, requests: int, total: int, largest: int) -> float:
        """The part of the adapters in a step: so many requests with one, the sum of their ranks, the largest."""
        return self.rank_s * (requests * largest if self.padded else total)

    def prefill_s(self, ranks: Ranks, tokens: int) -> float:
        return self._adapters(ranks) + self.step_s + tokens * self.token_s if ranks else 0.0

    def decode_s(self, ranks: Ranks) -> float:
        return self.step_s + self._adapters(ranks)

    def _adapters(self, ranks: Ranks) -> float:
        requests = total = largest = 0
        for rank, count in ranks.items():
            if rank:
                requests, total, largest = requests + count, total + rank * count, max(largest, rank)
        return self.adapters_s(requests, total, largest)


def joined(*groups: Ranks) -> dict[int, int]:
    """Requests of several groups together."""
    found: dict[int, int] = {}
    for group in groups:
        for rank, count in group.items():
            found[rank] = found.get(rank, 0) + count
    return found
