"""Whatever names and prompts clients make up, no table of ours grows with them: 100,000 unique keys for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jlora.cluster.prefixes import Prefixes
from jlora.cluster.routing.policy import Ask
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.routing.sessions import Sessions
from jlora.cluster.view import ReplicaView
from jlora.errors import LimitReached
from jlora.serve.access.tenants import Tenants
from jlora.serve.gate import Gate, Room
from jlora.serve.tally import Tally
from jlora.types import Usage
from tests import port

KEYS = 100_000
# A table, how many entries it has, and how many it may have.
Filled = tuple[Callable[[], int], int]


def sessions() -> Iterator[Filled]:
    homes = Sessions(most=1000)
    policy, view = SessionSticky(homes), {"one": ReplicaView("one", "up")}
    yield lambda: len(homes), 1000
    for i in range(KEYS):
        policy.choose(view, Ask(None, 0, 8, session=f"session {i}"))


def prefixes() -> Iterator[Filled]:
    table = Prefixes(block_tokens=2, most=1000)
    yield lambda: len(table), 1000
    for i in range(KEYS):
        table.sent("one", table.chain((i, i + 1), ("adapter", f"tenant {i}")))


def adapters() -> Iterator[Filled]:
    tally = Tally()
    yield lambda: max(len(tally), len(tally.lines())), 1024
    for i in range(KEYS):
        tally.add(f"adapter {i}", Usage(1, 0, 1))


def tenants() -> Iterator[Filled]:
    """Clients without a key name their tenant: it is no key of the tables of limits."""
    gate, limits = Gate(), Tenants()
    yield lambda: port.tenants(gate, limits), 2
    for i in range(KEYS):
        with limits.call(f"tenant {i}", completes=True), gate.completions(Room(1, 1), 1, None), gate.call(1, False):
            pass


@pytest.mark.parametrize("fill", [sessions, prefixes, adapters, tenants], ids=lambda fill: fill.__name__)
def test_a_table_stays_bounded(fill: Callable[[], Iterator[Filled]]):
    filling: Any = fill()
    size, most = next(filling)
    assert size() <= most
    for _ in filling:
        pass
    assert 0 < size() <= most


def test_what_is_bounded_is_still_counted():
    gate = Gate()
    with gate.completions(Room(2, 2), 3, "greedy"):
        with pytest.raises(LimitReached, match="greedy"), gate.completions(Room(2, 2), 1, "greedy"):
            pass
        with gate.completions(Room(2, 2), 1, "modest"):
            pass
