"""Who asks for which adapter: one small object per law.

    law            adapter of a session                                                source
    Identical      always the same                                                     Punica, Sec. 7
    Distinct       each in its turn                                                    Punica; FASTLIBRA 6.9
    Uniform        any, alike                                                          FASTLIBRA 6.9
    Zipf(s)        the k-th most popular with share ~ 1 / k^s                          real traces: s = 0.8-1
    Geometric(r)   the k-th most popular with share ~ 1 / r^k                          Punica "skewed", r = 1.5
    Power(a)       number floor(N x^(1/a)), x uniform: the top 10 % get 0.1^a          S-LoRA, Sec. 7
    Skewed(x)      a normal law of deviation x N around the middle one                 FASTLIBRA 6.9 "skewed-x"
    Drift(T)       Zipf whose ranks are dealt anew every T seconds                     LoRAServe; GenTD26
    Recent         one of the last few again, else Zipf                                shape of the real order
    RealOrder      the ids of a recorded trace, in its order                           GenTD26
    ByClient       the client who asks, one adapter each                               MAF as dLoRA, FASTLIBRA use it

An adapter's number says nothing of its popularity (except for `ByClient`): ranks and sizes can be
dealt by number. A law draws from its own random numbers, so the same sessions can be replayed
under another law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.workloads import files
from jlora.sim.workloads.arrivals import Begun

Random = np.random.Generator
TOP = 10  # how many adapters are "the popular ones" of a drift


class Popularity(Protocol):
    """A law of popularity."""

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """The adapter, 0 to adapters - 1, of each of the sessions that began."""
        ...


@dataclass(frozen=True, slots=True)
class Identical:
    """One adapter for all."""

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        return np.full(len(begun), rng.integers(adapters))


@dataclass(frozen=True, slots=True)
class Distinct:
    """Round robin."""

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        return rng.permutation(adapters)[np.arange(len(begun)) % adapters]


@dataclass(frozen=True, slots=True)
class Uniform:
    """All alike."""

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        return rng.integers(adapters, size=len(begun))


@dataclass(frozen=True, slots=True)
class Zipf:
    """Shares ~ 1 / rank^exponent."""

    exponent: float = 0.9

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        return _independent(self.shares(adapters), begun, rng)

    def shares(self, adapters: int) -> np.ndarray:
        """By rank; they sum to 1."""
        weights = np.arange(1, adapters + 1) ** -self.exponent
        return weights / weights.sum()


@dataclass(frozen=True, slots=True)
class Geometric:
    """Each adapter is asked for `ratio` times as often as the next one."""

    ratio: float = 1.5

    def __post_init__(self) -> None:
        if self.ratio <= 1:
            raise ConfigError(f"popularity geometric:{self.ratio}: the ratio must be over 1")

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        weights = self.ratio ** -np.arange(adapters, dtype=float)
        return _independent(weights / weights.sum(), begun, rng)


@dataclass(frozen=True, slots=True)
class Power:
    """The smaller `alpha`, the more skewed; 1 is uniform."""

    alpha: float = 0.3

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        edges = np.linspace(0, 1, adapters + 1) ** self.alpha
        return _independent(np.diff(edges), begun, rng)


@dataclass(frozen=True, slots=True)
class Skewed:
    """Normal over the adapters' numbers; `deviation` is in parts of their count."""

    deviation: float = 0.1

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        places = (np.arange(adapters) + 0.5) / adapters - 0.5
        weights = np.exp(-((places / self.deviation) ** 2) / 2)
        return _independent(weights / weights.sum(), begun, rng)


@dataclass(frozen=True, slots=True)
class Drift:
    """Zipf; every `period_s` the ranks are dealt anew and `keep` of the top 10 stay there.

    GenTD26's successive quarters share 1 to 3 of their ten most popular adapters.
    """

    period_s: float = 300.0
    exponent: float = 1.0
    keep: int = 2

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        chosen = rng.choice(adapters, len(begun), p=Zipf(self.exponent).shares(adapters))
        periods = np.floor_divide(begun.times, self.period_s).astype(int)
        order = rng.permutation(adapters)
        drawn = np.empty(len(begun), int)
        for period in np.unique(periods):
            now = periods == period
            drawn[now] = order[chosen[now]]
            order = self._deal(order, rng)
        return drawn

    def _deal(self, order: np.ndarray, rng: Random) -> np.ndarray:
        """New ranks: of the old top only `keep` are in the new one, as far as there are others."""
        top = min(TOP, len(order))
        old, others = rng.permutation(order[:top]), rng.permutation(order[top:])
        fresh = min(top - self.keep, len(others))
        head = np.concatenate([old[: top - fresh], others[:fresh]])
        tail = np.concatenate([old[top - fresh :], others[fresh:]])
        return np.concatenate([rng.permutation(head), rng.permutation(tail)])


@dataclass(frozen=True, slots=True)
class Recent:
    """With probability `again` one of the last `depth` different adapters; else Zipf.

    The shape of a real order: in GenTD26 an adapter is among the last ten in 80-85 % of requests,
    in 14 % of the same requests shuffled.
    """

    again: float = 0.8
    depth: int = 10
    exponent: float = 0.9

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        fresh = _independent(Zipf(self.exponent).shares(adapters), begun, rng).tolist()
        repeats = (rng.random(len(begun)) < self.again).tolist()
        picks = rng.random(len(begun)).tolist()
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
    """Recorded adapters in their order, from a place on that the seed gives; then from the start again.

    Ids are dealt to adapters as they first appear, so with fewer adapters than ids several share one.
    """

    ids: Sequence[str]

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`."""
        start = int(rng.integers(len(self.ids)))
        numbers: dict[str, int] = {}
        stretch = (self.ids[(start + i) % len(self.ids)] for i in range(len(begun)))
        return np.fromiter((numbers.setdefault(id, len(numbers)) % adapters for id in stretch), int, len(begun))


@dataclass(frozen=True, slots=True)
class ByClient:
    """An adapter per client, dealt in turn when clients are more; when adapters are more, a client
    has several and asks for any of its own."""

    def draw(self, adapters: int, begun: Begun, rng: Random) -> np.ndarray:
        """See `Popularity`. Raises ConfigError: the arrivals know no clients."""
        if begun.clients is None:
            raise ConfigError("popularity clients: these arrivals know no clients")
        count = max(begun.clients.max(initial=0) + 1, 1)
        if count >= adapters:
            return begun.clients % adapters
        own = (adapters - 1 - begun.clients) // count + 1  # adapters c, c + count, c + 2 count, ...
        return begun.clients + count * rng.integers(own)


def real_order(data: Path | None) -> Popularity:
    """GenTD26's order from the directory `data`, or its shape."""
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
        ConfigError: there is no such law, or it takes no such number.
    """
    name, _, number = text.partition(":")
    if name == "real":
        return real_order(data)
    if name not in LAWS:
        raise ConfigError(f"popularity {text!r}: must be one of {', '.join([*LAWS, 'real'])}")
    try:
        law = LAWS[name](float(number)) if number else LAWS[name]()
    except (TypeError, ValueError) as e:
        raise ConfigError(f"popularity {text!r}: {number!r} is no number that {name} takes") from e
    if number and not float(number) > 0:
        raise ConfigError(f"popularity {text!r}: the number must be over 0")
    return law


def _independent(shares: np.ndarray, begun: Begun, rng: Random) -> np.ndarray:
    """Independent draws; which adapter has which share is drawn too."""
    return rng.permutation(len(shares))[rng.choice(len(shares), len(begun), p=shares)]
