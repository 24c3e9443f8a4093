"""LoRAServe's routing: a table of each adapter's servers with their parts of its requests."""

from __future__ import annotations

import random
from collections.abc import Mapping

from jlora.cluster.routing.policy import Ask, up
from jlora.cluster.routing.simple import load
from jlora.cluster.view import View


class Table:
    """Draws a server by its part. Without one that is up, the most idle replica.

    Attributes:
        parts: adapter -> server -> part; a new placement replaces it.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, float]], seed: int = 0):
        self.parts = parts
        self._random = random.Random(seed)

    def place(self, parts: Mapping[str, Mapping[str, float]]) -> None:
        """Replaces the placement; any thread may call."""
        self.parts = parts

    def choose(self, view: View, ask: Ask, now: float) -> str | None:
        drawn = self._random.random()  # once a request, so that runs with different tables stay comparable
        replicas = {replica.name: replica for replica in up(view)}
        parts = {} if ask.adapter is None else self.parts.get(ask.adapter, {})
        weights = {name: part for name, part in parts.items() if name in replicas}
        left = drawn * sum(weights.values())
        for name, part in weights.items():
            left -= part
            if left < 0:
                return name
        if weights:
            return next(reversed(weights))
        best = min(replicas.values(), key=load, default=None)
        return None if best is None else best.name
