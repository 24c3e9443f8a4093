"""Drawn requests for studies of papers whose traces are private: arrivals, popularity, random prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jlora.sim.hardware import Hardware
from jlora.sim.scenario import Work
from jlora.sim.trace import FIRST_ID, Trace, Turn

VOCAB = 30000
# Seconds, tokens of prompt and answer, the adapter's index.
Request = tuple[float, int, int, int]


def arrivals(rng: np.random.Generator, rate: float, count: int, burst: float = 1.0) -> np.ndarray:
    """Seconds of each request; `burst` is the coefficient of variation of the gaps, 1 for Poisson's."""
    shape = burst**-2
    return np.cumsum(rng.gamma(shape, 1 / (shape * rate), count))


def zipf(count: int, exponent: float) -> np.ndarray:
    """The share of each of so many adapters, the most popular first."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    return weights / weights.sum()


def turns_of(rng: np.random.Generator, requests: Iterable[Request]) -> tuple[Turn, ...]:
    """Requests of random tokens, each a session of its own."""
    return tuple(
        Turn(float(at), i, 0, tuple(rng.integers(FIRST_ID, VOCAB, prompt).tolist()), int(output), int(adapter))
        for i, (at, prompt, output, adapter) in enumerate(requests)
    )


def work_of(name: str, turns: tuple[Turn, ...], ranks: Sequence[int], hardware: Hardware) -> Work:
    """The requests for adapters of these ranks."""
    return Work.of(Trace(name, turns, tuple(map(str, range(len(ranks))))), ranks, hardware)
