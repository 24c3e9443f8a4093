"""Least-loaded and session-sticky: pure choices from a view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.cluster.routing.policy import Ask, Policy
from jlora.cluster.routing.session import SLACK, SessionSticky
from jlora.cluster.routing.sessions import Sessions
from jlora.cluster.view import ReplicaView, View

BASE = Ask(adapter=None, rank=0, prompt=100)


def view(*replicas: ReplicaView) -> View:
    return {replica.name: replica for replica in replicas}


def up(name: str, sent: int = 0, **fields: Any) -> ReplicaView:
    return ReplicaView(name, "up", sent=sent, **fields)


@pytest.mark.parametrize("policy", [LeastLoaded(), SessionSticky()])
def test_only_replicas_that_are_up_are_chosen(policy: Policy):
    down = [
        ReplicaView("r0", "loading"), ReplicaView("r1", "suspect"), ReplicaView("r2", "draining"),
        ReplicaView("r3", "down"),
    ]  # fmt: skip
    assert policy.choose(view(*down), BASE) is None
    assert policy.choose({}, BASE) is None
    assert policy.choose(view(*down, up("r9", sent=50)), BASE) == "r9"


def test_the_least_loaded_counts_what_other_routers_sent_and_what_is_on_its_way():
    policy = LeastLoaded()
    assert policy.choose(view(up("a", sent=3), up("b", sent=2)), BASE) == "b"
    assert policy.choose(view(up("a"), up("b", running=1)), BASE) == "a"
    assert policy.choose(view(up("a", sent=2, running=1), up("b", sent=1, waiting=3)), BASE) == "a"


def test_among_equals_the_adapters_place_decides_then_room():
    policy, ask = LeastLoaded(), replace(BASE, adapter="x@1", rank=8)
    tiers = [up("a", tiers={"x@1": "DISK"}), up("b", tiers={"x@1": "HBM"}), up("c", tiers={"x@1": "HOST"}), up("d")]
    assert policy.choose(view(*tiers), ask) == "b"
    assert policy.choose(view(up("a"), up("b", free_blocks=9)), ask) == "b"


def test_a_session_stays_until_its_home_is_overloaded_or_gone():
    policy, ask = SessionSticky(), replace(BASE, session="s")
    assert policy.choose(view(up("a"), up("b", sent=1)), ask) == "a"
    assert policy.choose(view(up("a", sent=SLACK), up("b")), ask) == "a"
    assert policy.choose(view(up("a", sent=SLACK + 1), up("b")), ask) == "b"
    assert policy.choose(view(up("a"), up("b", sent=1)), ask) == "b"  # it lives there now
    assert policy.choose(view(up("a"), ReplicaView("b", "draining")), ask) == "a"


def test_without_a_session_the_cached_prompt_decides():
    sessions = Sessions()
    policy, ask = SessionSticky(sessions), replace(BASE, cached={"a": 16, "b": 64})
    assert policy.choose(view(up("a"), up("b", sent=2)), ask) == "b"
    assert policy.choose(view(up("a"), up("b", sent=9)), ask) == "a"
    assert len(sessions) == 0


def test_a_prompt_that_many_have_cached_goes_to_the_least_loaded_of_them():
    policy, ask = SessionSticky(), replace(BASE, cached={"a": 64, "b": 64, "c": 64, "d": 16})
    for session in ("", "new"):
        seen = view(up("a", sent=2), up("b", sent=1), up("c", sent=2), up("d"))
        assert policy.choose(seen, replace(ask, session=session)) == "b"
    assert policy.choose(view(up("a"), up("b"), up("c", tiers={"x@1": "HBM"})), replace(ask, adapter="x@1")) == "c"


@pytest.mark.parametrize("best", [up("c", sent=SLACK + 1), ReplicaView("c", "suspect"), None])
def test_a_holder_that_takes_nothing_hides_no_other(best: ReplicaView | None):
    ask = replace(BASE, cached={"b": 64, "c": 96})
    others = [up("a"), up("b", sent=2)]
    assert SessionSticky().choose(view(*others, *([best] if best else [])), ask) == "b"
    policy = SessionSticky()
    policy.choose(view(up("c")), replace(ask, session="s"))  # its home
    assert policy.choose(view(*others, *([best] if best else [])), replace(ask, session="s")) == "b"


def test_the_table_of_homes_is_bounded():
    sessions, both = Sessions(most=3), view(up("a"), up("b"))
    policy = SessionSticky(sessions)
    for i in range(10):
        policy.choose(both, replace(BASE, session=str(i)))
    assert len(sessions) == 3 and [sessions.home(str(i)) for i in (6, 7, 9)] == ["", "a", "a"]


def test_among_equals_the_home_of_the_fewest_sessions_comes_first_then_the_one_that_rests():
    sessions = Sessions(most=3)
    order = lambda: sorted("abc", key=sessions.order)  # noqa: E731
    for session, name in (("s", "a"), ("t", "b"), ("s", "c")):  # s has moved
        sessions.served(session, name)
    assert order() == ["a", "b", "c"]
    sessions.served("", "a")  # without a session
    sessions.served("t", "b")
    assert order() == ["a", "c", "b"]
    for session in "uv":  # the oldest session, s, is forgotten
        sessions.served(session, "b")
    assert sessions.home("s") == "" and order() == ["c", "a", "b"]
