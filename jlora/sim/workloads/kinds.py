"""Six kinds of traffic to many replicas, as records. No jax.

Lengths are lognormal. Each kind differs from the first in one thing: how far its popularity reaches, whether requests
share prefixes, whether popularity shifts, how they arrive, and whether several adapters read one context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from jlora.sim.trace import Trace
from jlora.sim.workloads import scenarios
from jlora.sim.workloads.arrivals import gamma
from jlora.sim.workloads.load import Exchange, Load, Source
from jlora.sim.workloads.play import play
from jlora.sim.workloads.popularity import drift, zipf

Random = np.random.Generator
SHIFT_S = 4.0  # between two shifts of popularity
TURNS, GAP_S = 5, 3.0  # of a conversation: its exchanges, and mean seconds between two
SERVICE_PROMPT = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind.

    Attributes:
        rate: requests per second of a replica.
        adapters: for each replica.
    """

    name: str
    source: Source
    rate: float
    adapters: int = 50

    def trace(self, replicas: int, seconds: float, seed: int, vocab: int = 32000) -> Trace:
        """Its traffic to so many replicas."""
        return play(self.source, Load(self.rate * replicas, seconds, self.adapters * replicas, seed=seed, vocab=vocab))


def _single(rng: Random, group: int) -> list[Exchange]:
    return [_asked(rng, 5.0)]


def _talk(rng: Random, group: int) -> list[Exchange]:
    gaps = [0.0, *rng.exponential(1.0, TURNS - 1).tolist()]
    return [_asked(rng, 4.2, gap) for gap in gaps]


def _asked(rng: Random, middle: float, gap: float = 0.0) -> Exchange:
    """A question with this median (a logarithm) and an answer of about 60 tokens."""
    asked, told = rng.lognormal(middle, 0.6), rng.lognormal(3.8, 0.8)
    return Exchange(min(asked, 1000.0), min(told, 600.0), gap)


_zipf = partial(Source, dialog=_single, arrivals=gamma(1.0), popularity=zipf(0.9))
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("Zipf", _zipf("zipf"), 7.0),
        Kind("long tail", _zipf("long tail", popularity=zipf(0.6)), 7.0, adapters=600),
        Kind(
            "sessions",
            Source("sessions", _talk, gamma(1.0), zipf(0.9), TURNS, GAP_S, SERVICE_PROMPT),
            8.0,
        ),
        Kind("shifting skew", _zipf("shifting", popularity=drift(SHIFT_S, 1.2)), 7.0),
        Kind("bursts", _zipf("bursts", arrivals=gamma(4.0)), 6.0),
        Kind("pipelines", scenarios.pipelines(activated=True), 6.0),
    )
}  # fmt: skip
