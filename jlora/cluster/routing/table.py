"""Routing by a table of each adapter's servers with their parts of its requests: LoRAServe's, and in turn."""

from __future__ import annotations

from collections.abc import Mapping

from jlora.cluster.routing.policy import Ask, Drawing, cheapest, up
from jlora.cluster.routing.simple import load
from jlora.cluster.view import View


class Table(Drawing):
    """Draws a server by its part, as LoRAServe does. Without one that is up, the most idle replica.

    Attributes:
        parts: adapter -> server -> part; a new placement replaces it.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, float]], seed: int = 0):
        super().__init__(seed)
        self.parts = parts

    def place(self, parts: Mapping[str, Mapping[str, float]]) -> None:
        """Replaces the placement; any thread may call."""
        self.parts = parts

    def choose(self, view: View, ask: Ask) -> str | None:
        names = {replica.name for replica in up(view)}
        parts = {} if ask.adapter is None else self.parts.get(ask.adapter, {})
        chosen = self._pick(ask.adapter, {name: part for name, part in parts.items() if name in names})
        return cheapest(view, load) if chosen is None else chosen

    def _pick(self, adapter: str | None, weights: dict[str, float]) -> str | None:
        """One of the servers that are up; None without any."""
        drawn = self._random.random()  # once a request, so that runs with different tables stay comparable
        left = drawn * sum(weights.values())
        for name, part in weights.items():
            left -= part
            if left < 0:
                return name
        return next(reversed(weights), None)


class Turns(Table):
    """Takes an adapter's servers in turn, each as often as its part says: dLoRA's round-robin over its preload.

    This is smooth weighted round-robin. Every request for the adapter credits each server with its part. The server
    with the most credit gets the request, and pays what all were credited.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, float]], seed: int = 0):
        super().__init__(parts, seed)
        self._credits: dict[str | None, dict[str, float]] = {}

    def peek(self, view: View, ask: Ask) -> str | None:
        before = dict(self._credits)  # `_pick` replaces an adapter's credits, and changes none
        try:
            return self.choose(view, ask)
        finally:
            self._credits = before

    def _pick(self, adapter: str | None, weights: dict[str, float]) -> str | None:
        if not weights:
            return None
        old = self._credits.get(adapter, {})
        credits = {name: old.get(name, 0.0) + part for name, part in weights.items()}
        chosen = max(credits, key=lambda name: credits[name])
        credits[chosen] -= sum(weights.values())
        self._credits[adapter] = credits
        return chosen
