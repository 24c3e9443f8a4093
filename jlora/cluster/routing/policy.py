"""What a routing policy is: it chooses a replica for a request, from a view that may be old."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jlora.cluster.view import ReplicaView, View


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy knows of a request.

    Attributes:
        adapter: the key of its version; None is the base.
        rank: the adapter's largest; 0 for the base, or while nobody has read the adapter.
        prompt: tokens; those that an earlier attempt has generated count.
        session: what ties requests together that share a long prefix; "": nothing does.
        cached: replica -> tokens of the prompt that the router believes to be in its cache; a missing one has none.
        outputs: mean tokens of an answer, as the router has measured them; 0: it has not.
    """

    adapter: str | None
    rank: int
    prompt: int
    session: str = ""
    cached: Mapping[str, int] = field(default_factory=dict)
    outputs: float = 0.0


class Policy(Protocol):
    """A policy may keep books of its own choices; it reads no clock and draws from its own seed."""

    def choose(self, view: View, ask: Ask) -> str | None:
        """The name of a replica that is up; None if none is. The request goes there, so the books note it."""
        ...

    def peek(self, view: View, ask: Ask) -> str | None:
        """What `choose` would answer now. The books stay as they are: no request goes anywhere."""
        ...


class Bookless:
    """Base of the policies that keep no books."""

    __slots__ = ()

    def choose(self, view: View, ask: Ask) -> str | None:
        raise NotImplementedError

    def peek(self, view: View, ask: Ask) -> str | None:
        return self.choose(view, ask)


class Drawing(Bookless):
    """Base of the policies whose books are a generator of random numbers."""

    __slots__ = ("_random",)

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def peek(self, view: View, ask: Ask) -> str | None:
        before = self._random.getstate()
        try:
            return self.choose(view, ask)
        finally:
            self._random.setstate(before)


def up(view: View) -> list[ReplicaView]:
    """The replicas that take requests, in the order of the view."""
    return [replica for replica in view.values() if replica.health == "up"]


def cheapest(view: View, cost: Callable[[ReplicaView], Any]) -> str | None:
    """The name of the replica with the least cost, the first of equals; None if none is up."""
    best = min(up(view), key=cost, default=None)
    return None if best is None else best.name
