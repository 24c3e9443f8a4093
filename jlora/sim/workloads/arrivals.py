"""Session starts: renewal processes, recorded clocks, and clients with rates of their own.

Every process has the mean rate that the caller asks for. Other rates stretch the clock, which keeps
the pattern (FASTLIBRA 6.2, S-LoRA Sec. 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jlora.errors import ConfigError

Random = np.random.Generator
Law = TypeVar("Law")
WINDOW_S = 600.0  # ServeGen's windows


@dataclass(frozen=True, eq=False)
class SessionStarts:
    """Session starts in seconds, ascending, and each one's client (0 is the most active)."""

    times: np.ndarray
    clients: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True, slots=True)
class Span:
    """A time span in seconds; 0 is the start of the trace."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


# (rate, span, rng) -> session starts in the span, `rate` per second on average.
Arrivals = Callable[[float, Span, Random], SessionStarts]


def gamma(cv: float) -> Arrivals:
    """Independent gaps of a Gamma law with coefficient of variation `cv` (1: a Poisson process)."""
    shape = 1 / cv**2

    def draw(rate: float, span: Span, rng: Random) -> SessionStarts:
        return SessionStarts(span.begin + _renew(lambda n: rng.gamma(shape, 1 / shape, n), rate * span.seconds) / rate)

    return draw


@dataclass(frozen=True, eq=False)
class Recorded:
    """A stretch of a recorded clock, from a random place on, cyclic.

    A lower rate keeps a random part of the arrivals; a higher rate runs the clock faster. The clock
    is then adjusted so that the stretch has exactly the rate.
    """

    times: np.ndarray  # seconds, ascending, at least two
    clients: np.ndarray | None = None

    def __call__(self, rate: float, span: Span, rng: Random) -> SessionStarts:
        gaps = np.diff(self.times)
        wanted = max(1, round(rate * span.seconds))
        keep = min(1.0, rate * (self.times[-1] - self.times[0]) / len(gaps))
        stretch = math.ceil(wanted / keep)
        places = (rng.integers(len(gaps)) + np.arange(stretch)) % len(gaps)
        clock = np.cumsum(gaps[places])
        kept = np.sort(rng.choice(stretch, wanted, replace=False))
        times = span.begin + clock[kept] * (span.seconds / max(clock[-1], 1e-9))
        return SessionStarts(times, None if self.clients is None else self.clients[places[kept] + 1])


@dataclass(frozen=True, eq=False)
class Clients:
    """Clients whose rates change from window to window, with independent gaps.

    ServeGen's model: in a window a client is a renewal process. Burstiness and drift of the whole come
    from a few clients (Sec. 4). Plays a stretch of windows from a random one on.
    """

    rates: np.ndarray  # requests per second, [client, window]
    shapes: np.ndarray  # of each client's gaps
    weibull: np.ndarray  # whether its gaps are Weibull, else Gamma

    def __call__(self, rate: float, span: Span, rng: Random) -> SessionStarts:
        count = math.ceil(span.seconds / WINDOW_S)
        first = int(rng.integers(self.rates.shape[1]))
        rates = self.rates[:, (first + np.arange(count)) % self.rates.shape[1]]
        edges = np.minimum(np.arange(count + 1) * WINDOW_S, span.seconds)
        expected = rates * np.diff(edges)
        expected *= rate * span.seconds / max(expected.sum(), 1e-12)
        active = np.argsort(-expected.sum(axis=1), kind="stable")
        times, clients = [np.empty(0)], [np.empty(0, int)]
        for number, client in enumerate(active):
            # On a clock that runs with the client's rate, its gaps have mean 1.
            passed = np.concatenate([[0.0], np.cumsum(expected[client])])
            ticks = _renew(self._gaps(client, rng), passed[-1])
            times.append(span.begin + np.interp(ticks, passed, edges))
            clients.append(np.full(len(ticks), number))
        order = np.argsort(np.concatenate(times), kind="stable")
        return SessionStarts(np.concatenate(times)[order], np.concatenate(clients)[order])

    def _gaps(self, client: int, rng: Random) -> Callable[[int], np.ndarray]:
        shape = float(self.shapes[client])
        if self.weibull[client]:
            return lambda n: rng.weibull(shape, n) / math.gamma(1 + 1 / shape)
        return lambda n: rng.gamma(shape, 1 / shape, n)


def typical_clients(count: int) -> Clients:
    """Clients like ServeGen's without its files: lognormal rates (sigma 2) that vary by 0.75 between
    windows, gaps of Gamma shape 0.7. The same clients every time."""
    rng = np.random.default_rng(count)
    level = rng.lognormal(0.0, 2.0, (count, 1))
    windows = rng.gamma(1 / 0.75**2, 0.75**2, (count, 144))
    return Clients(level * windows, np.full(count, 0.7), np.zeros(count, bool))


def named(what: str, text: str, laws: Mapping[str, Callable[..., Law]]) -> Law:
    """A law from a command line: a name, and for some a number above 0, as in `zipf:0.9`. Raises ConfigError."""
    name, _, number = text.partition(":")
    if name not in laws:
        raise ConfigError(f"{what} {text!r}: must be one of {', '.join(laws)}")
    try:
        if number and not float(number) > 0:
            raise ValueError("must be above 0")
        return laws[name](float(number)) if number else laws[name]()
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{what} {text!r}: {name} does not take the number {number!r}") from e


def parse(text: str) -> Arrivals:
    """Arrivals from a command line: `poisson` or `gamma:CV`. Raises ConfigError for other texts."""
    return named("arrivals", text, {"poisson": lambda: gamma(1.0), "gamma": gamma})


def _renew(gaps: Callable[[int], np.ndarray], length: float) -> np.ndarray:
    """Points of a renewal process in [0, length); `gaps(n)` draws n gaps of mean 1."""
    parts: list[np.ndarray] = []
    reached = 0.0
    while reached < length:
        part = reached + np.cumsum(gaps(int(length - reached) + 16))
        parts.append(part)
        reached = float(part[-1])
    joined = np.concatenate(parts or [np.empty(0)])
    return joined[joined < length]
