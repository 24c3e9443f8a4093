"""Counts by adapter, for as many adapters as a label may have values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from jlora.types import Usage

SHOWN = 64  # adapters with counts of their own
KNOWN = 1024  # adapters whose requests are remembered, to find those with the most
OTHER = "other"  # the adapters that are not shown, together

Counts = tuple[int, int, int]  # requests, prompt tokens, output tokens


class Tally:
    """Requests and tokens of the adapters with the most requests; the others share one line.

    A request counts in one line, and stays there: so the lines' increases never sum up to more than the requests. An
    adapter that loses its line counts with the others from then on. With its line it gets back what that had, so that
    no line falls. Only one that was forgotten meanwhile begins again at zero, which a Prometheus counter may.
    """

    def __init__(self) -> None:
        self._shown: dict[str, Counts] = {}
        self._hidden: dict[str, Counts] = {}  # of adapters that have lost their line
        self._other: Counts = (0, 0, 0)
        self._requests: Counter[str] = Counter()

    def __len__(self) -> int:
        """Adapters that it remembers."""
        return len(self._requests)

    def add(self, name: str, usage: Usage) -> None:
        """One answered request of an adapter, or of the base by its name."""
        self._requests[name] += 1
        if len(self._requests) > KNOWN:
            self._forget()
        if name not in self._shown and name != OTHER:
            self._show(name)
        counts = (1, usage.prompt_tokens, usage.completion_tokens)
        if name in self._shown:
            self._shown[name] = _sum(self._shown[name], counts)
        else:
            self._other = _sum(self._other, counts)

    def lines(self) -> Mapping[str, Counts]:
        """The counts by name."""
        return {**self._shown, OTHER: self._other}

    def _show(self, name: str) -> None:
        if len(self._shown) >= SHOWN:
            least = min(self._shown, key=lambda shown: self._requests[shown])
            if self._requests[least] >= self._requests[name]:
                return
            self._hidden[least] = self._shown.pop(least)
        self._shown[name] = self._hidden.pop(name, (0, 0, 0))

    def _forget(self) -> None:
        """Keeps those with the most requests among the adapters that have lost a line, and among those without one."""
        ranked = [name for name, _ in self._requests.most_common() if name not in self._shown]
        had = [name for name in ranked if name in self._hidden][: KNOWN // 2]
        new = [name for name in ranked if name not in self._hidden][: KNOWN // 4]
        self._hidden = {name: self._hidden[name] for name in had}
        self._requests = Counter({name: self._requests[name] for name in (*self._shown, *had, *new)})


def _sum(one: Counts, two: Counts) -> Counts:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]
