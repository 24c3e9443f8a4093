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
    """Predicts the steps of a replica. All times are seconds."""

    def prefill_s(self, ranks: Ranks, tokens: int) -> float:
        """Of a step that computes these prompts, `tokens` in all.

        Without any it is what every such step takes, the intercept b of CaraServe's models (section 5). So
        the difference that one more prompt makes is the same whether or not others wait.
        """
        ...

    def step_s(self, ranks: Ranks, context: int = 0, prompt: int = 0) -> float:
        """Of a step of these requests, which reads `context` tokens and computes `prompt` tokens beside."""
        ...


@dataclass(frozen=True, slots=True)
class RankCosts:
    """One line per kernel, beside what the base costs. All times are seconds.

    Attributes:
        fixed_s, weights_s: of a step; weights are read while up to `weights_s / token_s` tokens are computed.
        token_s: of a prompt token; context_s: of reading a token's KV.
        rank_s: of one rank of one request.
        padded: every request counts with the largest rank in the batch.
    """

    fixed_s: float
    weights_s: float
    token_s: float
    context_s: float
    rank_s: float
    padded: bool

    def adapters_s(self, requests: int, total: int, largest: int) -> float:
        """The part of the adapters in a step: so many requests with one, the sum of their ranks, the largest."""
        return self.rank_s * (requests * largest if self.padded else total)

    def prefill_s(self, ranks: Ranks, tokens: int) -> float:
        return self.fixed_s + self.weights_s + tokens * self.token_s + self._adapters(ranks)

    def step_s(self, ranks: Ranks, context: int = 0, prompt: int = 0) -> float:
        base = self.fixed_s + max(self.weights_s, prompt * self.token_s) + context * self.context_s
        return base + self._adapters(ranks)

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
