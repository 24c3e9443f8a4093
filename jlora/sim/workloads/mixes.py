"""Mixes of ranks: which adapter has which rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.trace import Trace


class RankMix(Protocol):
    """A way to assign ranks to the adapters of a trace."""

    def of(self, trace: Trace, seed: int) -> list[int]:
        """The rank of each adapter."""
        ...


@dataclass(frozen=True, slots=True)
class EqualShares:
    """Each rank has the same number of adapters, independent of popularity.

    (64, 32) is FASTLIBRA's mix (6.1), (8, 16, 32, 64, 128) LoRAServe's.
    """

    ranks: tuple[int, ...] = (64, 32)

    def of(self, trace: Trace, seed: int) -> list[int]:
        return deal(self.ranks, len(trace.adapters), seed)


@dataclass(frozen=True, slots=True)
class HighOnHot:
    """Each rank has the same number of adapters; the most popular have the highest."""

    ranks: tuple[int, ...] = (64, 32)

    def of(self, trace: Trace, seed: int) -> list[int]:
        count, asked = len(trace.adapters), trace.asked
        falling = sorted((self.ranks[i % len(self.ranks)] for i in range(count)), reverse=True)
        hottest = sorted(range(count), key=lambda adapter: -asked[adapter])
        by_adapter = dict(zip(hottest, falling, strict=True))
        return [by_adapter[adapter] for adapter in range(count)]


def deal(ranks: tuple[int, ...], adapters: int, seed: int) -> list[int]:
    """Equal shares of `ranks`, shuffled."""
    shares = [ranks[i % len(ranks)] for i in range(adapters)]
    return np.random.default_rng((seed, 1)).permutation(shares).tolist()


def parse(text: str) -> RankMix:
    """A mix from a command line: `32,64` for equal shares, `hot:8,16,32` for the highest on the most popular.

    Raises:
        ConfigError: the text has another form.
    """
    kind, colon, numbers = text.rpartition(":")
    try:
        ranks = tuple(int(number) for number in numbers.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1 or (colon and kind != "hot"):
        raise ConfigError(f"ranks {text!r}: must be numbers like 32,64, or hot:32,64")
    return HighOnHot(ranks) if colon else EqualShares(ranks)
