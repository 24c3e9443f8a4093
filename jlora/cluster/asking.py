"""Which adapters a controller asks its replicas to fetch now: a few at a time, and not again for a while.

The controller and the simulator have the same one. It reads no clock and makes no calls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from jlora.cluster.homes import Pair

LOOK_S = 1.5  # between two looks at where adapters are
AGAIN_S = 10.0  # before a replica is asked again for what has not come
COMING = 8  # adapters that a replica is asked for at once


class Asking:
    """What replicas have been asked for, and what has come in this time step."""

    def __init__(self) -> None:
        self._again: dict[Pair, float] = {}  # when it may be asked again; inf: not in this time step

    def begin(self) -> None:
        """A time step begins: what has come may be asked for again."""
        self._again = {pair: again for pair, again in self._again.items() if again < math.inf}

    def due(self, lacking: Sequence[Pair], now: float) -> Iterator[Pair]:
        """Those to ask for now; each counts as asked for from then on.

        What was never asked for goes first, then what was asked for longest ago: adapters that cannot come hold up no
        others. If an adapter came and is missing again, the replica's cache has dropped it for something worth more:
        the next time step asks again.

        Args:
            lacking: all that a look has found.
        """
        self._again |= dict.fromkeys(self._again.keys() - set(lacking), math.inf)
        coming = Counter(name for (_, name), again in self._again.items() if now < again < math.inf)
        for pair in sorted(lacking, key=lambda pair: self._again.get(pair, 0.0)):
            name = pair[1]
            if self._again.get(pair, 0.0) <= now and coming[name] < COMING:
                coming[name] += 1
                self._again[pair] = now + AGAIN_S
                yield pair

    def lost(self, name: str) -> None:
        """A replica has ended, with all that it was asked for."""
        self._again = {pair: again for pair, again in self._again.items() if pair[1] != name}
