"""Laws of popularity: which session uses which adapter.

An adapter's number is independent of its popularity (except for `by_client`), so ranks and sizes can be
assigned by number. A law has its own random numbers, so the same sessions can be replayed under
another law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.workloads import files
from jlora.sim.workloads.arrivals import SessionStarts, named

Random = np.random.Generator

# (adapters, starts, rng) -> the adapter, 0 to adapters - 1, of each session.
Popularity = Callable[[int, SessionStarts, Random], np.ndarray]

TOP = 10  # popular adapters of a drift


def identical(adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
    """One adapter for all sessions (Punica, Sec. 7)."""
    return np.full(len(starts), rng.integers(adapters))


def distinct(adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
    """Round robin (Punica; FASTLIBRA 6.9)."""
    return rng.permutation(adapters)[np.arange(len(starts)) % adapters]


def uniform(adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
    """All adapters alike (FASTLIBRA 6.9)."""
    return rng.integers(adapters, size=len(starts))


def by_client(adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
    """An adapter per client (dLoRA). With more clients, several share one; with more adapters, a client has several.

    Raises ConfigError if the arrivals have no clients.
    """
    if starts.clients is None:
        raise ConfigError("popularity clients: these arrivals have no clients")
    count = max(starts.clients.max(initial=0) + 1, 1)
    if count >= adapters:
        return starts.clients % adapters
    own = (adapters - 1 - starts.clients) // count + 1  # adapters c, c + count, c + 2 count, ...
    return starts.clients + count * rng.integers(own)


def zipf(exponent: float = 0.9) -> Popularity:
    """Shares ~ 1 / rank^exponent; real traces have 0.8 to 1."""
    return partial(_by_shares, partial(zipf_shares, exponent))


def geometric(ratio: float = 1.5) -> Popularity:
    """Each adapter has `ratio` times as many sessions as the next one (Punica "skewed")."""
    if ratio <= 1:
        raise ConfigError(f"popularity geometric:{ratio}: the ratio must be over 1")
    return partial(_by_shares, lambda adapters: _normalised(ratio ** -np.arange(adapters, dtype=float)))


def power(alpha: float = 0.3) -> Popularity:
    """The top 10 % get a share of 0.1^alpha; 1 is uniform (S-LoRA, Sec. 7)."""
    return partial(_by_shares, lambda adapters: np.diff(np.linspace(0, 1, adapters + 1) ** alpha))


def skewed(deviation: float = 0.1) -> Popularity:
    """Normal over the adapters' numbers; `deviation` is a share of their count (FASTLIBRA 6.9)."""

    def shares(adapters: int) -> np.ndarray:
        places = (np.arange(adapters) + 0.5) / adapters - 0.5
        return _normalised(np.exp(-((places / deviation) ** 2) / 2))

    return partial(_by_shares, shares)


def zipf_shares(exponent: float, adapters: int) -> np.ndarray:
    """The shares of `zipf`, by rank."""
    return _normalised(np.arange(1, adapters + 1) ** -exponent)


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def _by_shares(shares: Callable[[int], np.ndarray], adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
    """Independent draws from fixed shares, which are assigned to adapters at random."""
    return rng.permutation(adapters)[rng.choice(adapters, len(starts), p=shares(adapters))]


def drift(period_s: float = 300.0, exponent: float = 1.0, keep: int = 2) -> Popularity:
    """Zipf with new ranks every `period_s` seconds, of which `keep` of the top 10 stay there.

    Successive quarters of GenTD26 share 1 to 3 of their ten most popular adapters.
    """

    def draw(adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        chosen = rng.choice(adapters, len(starts), p=zipf_shares(exponent, adapters))
        periods = np.floor_divide(starts.times, period_s).astype(int)
        order = rng.permutation(adapters)
        drawn = np.empty(len(starts), int)
        for period in np.unique(periods):
            now = periods == period
            drawn[now] = order[chosen[now]]
            order = _new_ranks(order, keep, rng)
        return drawn

    return draw


def _new_ranks(order: np.ndarray, keep: int, rng: Random) -> np.ndarray:
    """New ranks, with only `keep` of the old top in the new one if there are enough others."""
    top = min(TOP, len(order))
    old, others = rng.permutation(order[:top]), rng.permutation(order[top:])
    fresh = min(top - keep, len(others))
    head = np.concatenate([old[: top - fresh], others[:fresh]])
    tail = np.concatenate([old[top - fresh :], others[fresh:]])
    return np.concatenate([rng.permutation(head), rng.permutation(tail)])


def recent(again: float = 0.8, depth: int = 10, exponent: float = 0.9) -> Popularity:
    """One of the last `depth` different adapters with probability `again`, else Zipf.

    In GenTD26 80-85 % of requests use one of the last ten adapters; after shuffling, 14 % do.
    """

    def draw(adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        fresh = zipf(exponent)(adapters, starts, rng).tolist()
        repeats = (rng.random(len(starts)) < again).tolist()
        picks = rng.random(len(starts)).tolist()
        last: list[int] = []
        drawn = []
        for adapter, repeat, pick in zip(fresh, repeats, picks, strict=True):
            if repeat and last:
                adapter = last[int(pick * len(last))]
            if adapter in last:
                last.remove(adapter)
            last = [*last, adapter][-depth:]
            drawn.append(adapter)
        return np.asarray(drawn, int)

    return draw


def real_order(ids: Sequence[str]) -> Popularity:
    """Recorded adapters in their order, from a random place on, cyclic.

    Ids are numbered as they first appear. With fewer adapters than ids, several ids share one.
    """

    def draw(adapters: int, starts: SessionStarts, rng: Random) -> np.ndarray:
        start = int(rng.integers(len(ids)))
        numbers: dict[str, int] = {}
        stretch = (ids[(start + i) % len(ids)] for i in range(len(starts)))
        return np.fromiter((numbers.setdefault(id, len(numbers)) % adapters for id in stretch), int, len(starts))

    return draw


LAWS: Mapping[str, Callable[..., Popularity]] = {
    "identical": lambda: identical,
    "distinct": lambda: distinct,
    "uniform": lambda: uniform,
    "clients": lambda: by_client,
    "zipf": zipf,
    "geometric": geometric,
    "power": power,
    "skewed": skewed,
    "drift": drift,
    "recent": recent,
}


def real(data: Path | None) -> Popularity:
    """GenTD26's order from the directory `data`; without it, its shape."""
    return recent() if data is None else real_order(files.lora_order(data))


def parse(text: str, data: Path | None = None) -> Popularity:
    """A law from a command line: `uniform`, `zipf:0.9`, `drift:300`, `real`, ... Raises ConfigError for others."""
    return named("popularity", text, {**LAWS, "real": lambda: real(data)})
