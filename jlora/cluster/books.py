"""A router's books: the requests that it has at each replica, and what the replicas' messages said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from jlora.cluster.routing.policy import Ask
from jlora.cluster.view import Held, ReplicaView, View


@dataclass(slots=True)
class _Book:
    waiting: Counter[int] = field(default_factory=Counter)
    running: Counter[int] = field(default_factory=Counter)
    wanted: dict[str, tuple[int, int]] = field(default_factory=dict)  # adapter -> requests that wait, and its rank
    tokens: int = 0
    context: int = 0
    uncached: int = 0

    def held(self) -> Held:
        waiting, running = ({rank: n for rank, n in all.items() if n} for all in (self.waiting, self.running))
        wanted = {key: rank for key, (_, rank) in self.wanted.items()}
        return Held(waiting, running, self.tokens, self.context, self.uncached, wanted)

    def waits(self, name: str, ask: Ask, change: Literal[1, -1]) -> None:
        """One request more, or less, that waits at the replica of this name."""
        self.waiting[ask.rank] += change
        self.tokens += change * ask.prompt
        self.uncached += change * (ask.prompt - ask.cached.get(name, 0))  # as its router believes
        if ask.adapter is not None:
            count, rank = self.wanted.pop(ask.adapter, (0, 0))
            if count + change:
                self.wanted[ask.adapter] = count + change, max(rank, ask.rank)


class Books:
    """Keeps a `View` up to date. A request is sent, begins with its first token, and ends."""

    def __init__(self) -> None:
        self._views: dict[str, ReplicaView] = {}
        self._books: dict[str, _Book] = {}

    @property
    def view(self) -> View:
        return self._views

    def is_up(self) -> bool:
        """Whether a replica takes requests."""
        return any(seen.health == "up" for seen in self._views.values())

    def heard(self, seen: ReplicaView) -> None:
        """A message: all of the replica's fields but `sent` and `held`, which are the router's own."""
        book = self._books.setdefault(seen.name, _Book())
        held = book.held()
        self._views[seen.name] = replace(seen, sent=held.count, held=held)

    def sent(self, name: str, ask: Ask) -> None:
        self._books[name].waits(name, ask, 1)
        self._renew(name)

    def began(self, name: str, ask: Ask) -> None:
        book = self._books[name]
        book.waits(name, ask, -1)
        book.running[ask.rank] += 1
        book.context += ask.prompt
        self._renew(name)

    def told(self, name: str, tokens: int) -> None:
        """Outputs of requests that have begun; seen with the next message."""
        self._books[name].context += tokens

    def ended(self, name: str, ask: Ask, outputs: int | None) -> None:
        """`outputs`: its tokens that were told; None: it had not begun."""
        book = self._books[name]
        if outputs is not None:
            book.running[ask.rank] -= 1
            book.context -= ask.prompt + outputs
        else:
            book.waits(name, ask, -1)
        self._renew(name)

    def gone(self, name: str) -> None:
        """The replica is no longer one of the service's; it has no requests left."""
        self._views.pop(name, None)
        self._books.pop(name, None)

    def _renew(self, name: str) -> None:
        held = self._books[name].held()
        self._views[name] = replace(self._views[name], sent=held.count, held=held)
