"""Laws of popularity: which session uses which adapter.

    law            adapter of a session                                                source
    Identical      always the same                                                     Punica, Sec. 7
    Distinct       round robin                                                         Punica; FASTLIBRA 6.9
    Uniform        uniform                                                             FASTLIBRA 6.9
    Zipf(s)        the k-th most popular with share ~ 1 / k^s                          real traces: s = 0.8-1
    Geometric(r)   the k-th most popular with share ~ 1 / r^k                          Punica "skewed", r = 1.5
    Power(a)       number floor(N x^(1/a)), x uniform: the top 10 % get 0.1^a          S-LoRA, Sec. 7
    Skewed(x)      normal law of deviation x N around the middle adapter               FASTLIBRA 6.9 "skewed-x"
    Drift(T)       Zipf with new ranks every T seconds                                 LoRAServe; GenTD26
    Recent         one of the last few again, else Zipf                                shape of the real order
    RealOrder      the ids of a recorded trace, in its order                           GenTD26
    ByClient       one adapter per client                                              MAF in dLoRA, FASTLIBRA

An adapter's number is independent of its popularity (except for `ByClient`), so ranks and sizes can be
assigned by number. A law has its own random numbers, so the same sessions can be replayed under
another law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.workloads import files
from jlora.sim.workloads.arrivals import SessionStarts

Random = np.random.Generator
TOP = 10  # popular adapters of a drift


class Popularity(Protocol):
    """A law of popularity."""

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        """The adapter, 0 to adapters - 1, of each session."""
        ...


class _Shares:
    """Independent draws from fixed shares, which are assigned to adapters at random."""

    __slots__ = ()

    def shares(self, adapters: int) -> np.ndarray:
        """Shares by rank; they sum to 1."""
        raise NotImplementedError

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        return rng.permutation(adapters)[rng.choice(adapters, len(starts), p=self.shares(adapters))]


@dataclass(frozen=True, slots=True)
class Identical:
    """One adapter for all sessions."""

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        return np.full(len(starts), rng.integers(adapters))


@dataclass(frozen=True, slots=True)
class Distinct:
    """Round robin."""

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        return rng.permutation(adapters)[np.arange(len(starts)) % adapters]


@dataclass(frozen=True, slots=True)
class Uniform:
    """All adapters alike."""

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        return rng.integers(adapters, size=len(starts))


@dataclass(frozen=True, slots=True)
class Zipf(_Shares):
    """Shares ~ 1 / rank^exponent."""

    exponent: float = 0.9

    def shares(self, adapters: int) -> np.ndarray:
        weights = np.arange(1, adapters + 1) ** -self.exponent
        return weights / weights.sum()


@dataclass(frozen=True, slots=True)
class Geometric(_Shares):
    """Each adapter has `ratio` times as many sessions as the next one."""

    ratio: float = 1.5

    def __post_init__(self) -> None:
        if self.ratio <= 1:
            raise ConfigError(f"popularity geometric:{self.ratio}: the ratio must be over 1")

    def shares(self, adapters: int) -> np.ndarray:
        weights = self.ratio ** -np.arange(adapters, dtype=float)
        return weights / weights.sum()


@dataclass(frozen=True, slots=True)
class Power(_Shares):
    """A smaller `alpha` is more skewed; 1 is uniform."""

    alpha: float = 0.3

    def shares(self, adapters: int) -> np.ndarray:
        return np.diff(np.linspace(0, 1, adapters + 1) ** self.alpha)


@dataclass(frozen=True, slots=True)
class Skewed(_Shares):
    """Normal over the adapters' numbers; `deviation` is a share of their count."""

    deviation: float = 0.1

    def shares(self, adapters: int) -> np.ndarray:
        places = (np.arange(adapters) + 0.5) / adapters - 0.5
        weights = np.exp(-((places / self.deviation) ** 2) / 2)
        return weights / weights.sum()


@dataclass(frozen=True, slots=True)
class Drift:
    """Zipf with new ranks every `period_s` seconds, of which `keep` of the top 10 stay there.

    Successive quarters of GenTD26 share 1 to 3 of their ten most popular adapters.
    """

    period_s: float = 300.0
    exponent: float = 1.0
    keep: int = 2

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        chosen = rng.choice(adapters, len(starts), p=Zipf(self.exponent).shares(adapters))
        periods = np.floor_divide(starts.times, self.period_s).astype(int)
        order = rng.permutation(adapters)
        drawn = np.empty(len(starts), int)
        for period in np.unique(periods):
            now = periods == period
            drawn[now] = order[chosen[now]]
            order = self._deal(order, rng)
        return drawn

    def _deal(self, order: np.ndarray, rng: Random) -> np.ndarray:
        """New ranks, with only `keep` of the old top in the new one if there are enough others."""
        top = min(TOP, len(order))
        old, others = rng.permutation(order[:top]), rng.permutation(order[top:])
        fresh = min(top - self.keep, len(others))
        head = np.concatenate([old[: top - fresh], others[:fresh]])
        tail = np.concatenate([old[top - fresh :], others[fresh:]])
        return np.concatenate([rng.permutation(head), rng.permutation(tail)])


@dataclass(frozen=True, slots=True)
class Recent:
    """One of the last `depth` different adapters with probability `again`, else Zipf.

    In GenTD26 80-85 % of requests use one of the last ten adapters; after shuffling, 14 % do.
    """

    again: float = 0.8
    depth: int = 10
    exponent: float = 0.9

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        fresh = Zipf(self.exponent).draw(adapters, starts, rng).tolist()
        repeats = (rng.random(len(starts)) < self.again).tolist()
        picks = rng.random(len(starts)).tolist()
        recent: list[int] = []
        drawn = []
        for adapter, repeat, pick in zip(fresh, repeats, picks, strict=True):
            if repeat and recent:
                adapter = recent[int(pick * len(recent))]
            if adapter in recent:
                recent.remove(adapter)
            recent = [*recent, adapter][-self.depth :]
            drawn.append(adapter)
        return np.asarray(drawn, int)


@dataclass(frozen=True, eq=False)
class RealOrder:
    """Recorded adapters in their order, from a random place on, cyclic.

    Ids are numbered as they first appear. With fewer adapters than ids, several ids share one.
    """

    ids: Sequence[str]

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        start = int(rng.integers(len(self.ids)))
        numbers: dict[str, int] = {}
        stretch = (self.ids[(start + i) % len(self.ids)] for i in range(len(starts)))
        return np.fromiter((numbers.setdefault(id, len(numbers)) % adapters for id in stretch), int, len(starts))


@dataclass(frozen=True, slots=True)
class ByClient:
    """An adapter per client. With more clients, several share one; with more adapters, a client uses any of its own.

    `draw` raises ConfigError if the arrivals have no clients.
    """

    def draw(self, adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        if starts.clients is None:
            raise ConfigError("popularity clients: these arrivals have no clients")
        count = max(starts.clients.max(initial=0) + 1, 1)
        if count >= adapters:
            return starts.clients % adapters
        own = (adapters - 1 - starts.clients) // count + 1  # adapters c, c + count, c + 2 count, ...
        return starts.clients + count * rng.integers(own)


def real_order(data: Path | None) -> Popularity:
    """GenTD26's order from the directory `data`; without it, its shape."""
    return Recent() if data is None else RealOrder(files.lora_order(data))


LAWS: Mapping[str, Callable[..., Popularity]] = {
    "identical": Identical,
    "distinct": Distinct,
    "uniform": Uniform,
    "zipf": Zipf,
    "geometric": Geometric,
    "power": Power,
    "skewed": Skewed,
    "drift": Drift,
    "recent": Recent,
    "clients": ByClient,
}


def parse(text: str, data: Path | None = None) -> Popularity:
    """A law from a command line: `uniform`, `zipf:0.9`, `drift:300`, `real`, ...

    Raises:
        ConfigError: an unknown law, or a wrong number.
    """
    name, _, number = text.partition(":")
    if name == "real":
        return real_order(data)
    if name not in LAWS:
        raise ConfigError(f"popularity {text!r}: must be one of {', '.join([*LAWS, 'real'])}")
    try:
        law = LAWS[name](float(number)) if number else LAWS[name]()
    except (TypeError, ValueError) as e:
        raise ConfigError(f"popularity {text!r}: {name} does not take {number!r}") from e
    if number and not float(number) > 0:
        raise ConfigError(f"popularity {text!r}: the number must be above 0")
    return law
