"""Mixes of ranks: which adapter has which rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.trace import Trace


def ranks_of(mix: str, trace: Trace, seed: int) -> list[int]:
    """The rank of each adapter of a trace. Each rank of the mix has the same number of adapters.

    Args:
        mix: "32,64" is independent of popularity: FASTLIBRA's (6.1), or LoRAServe's "8,16,32,64,128".
            "hot:32,64" gives the highest ranks to the most popular adapters. Raises ConfigError.
    """
    kind, colon, numbers = mix.rpartition(":")
    try:
        ranks = [int(number) for number in numbers.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1 or (colon and kind != "hot"):
        raise ConfigError(f"ranks {mix!r}: must be numbers like 32,64, or hot:32,64")
    count, asked = len(trace.adapters), trace.asked
    if not colon:
        return deal(ranks, count, seed)
    hottest = sorted(range(count), key=lambda adapter: -asked[adapter])
    falling = sorted((ranks[i % len(ranks)] for i in range(count)), reverse=True)
    return [rank for _, rank in sorted(zip(hottest, falling, strict=True))]


def deal(ranks: Sequence[int], adapters: int, seed: int) -> list[int]:
    """Equal shares of `ranks`, shuffled."""
    shares = [ranks[i % len(ranks)] for i in range(adapters)]
    return np.random.default_rng((seed, 1)).permutation(shares).tolist()
