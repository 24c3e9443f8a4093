"""Where adapters live, as the controller and the simulator plan it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from jlora import config as configuration
from jlora.cluster import directory_server, placing, service
from jlora.cluster.homes import Homes, Kind, Room, Rule
from jlora.cluster.placement import Wanted
from jlora.cluster.routing.simple import RoundRobin
from jlora.cluster.secret import Secret
from jlora.errors import ConfigError
from jlora.ports import System

TABLE = Rule()
ROOM = Room({"r0": 20, "r1": 20}, {"r0": 100, "r1": 100}, {8: 100.0})


PARTS = {"a": {"r0": 1.0}, "b": {"r1": 1.0}, "c": {"r1": 1.0}}


def asked(**rates: float) -> list[Wanted]:
    return [Wanted(key, 8, rate, 2) for key, rate in rates.items()]


def homes(rule: Rule = TABLE) -> Homes:
    """Of adapters `a` at r0, `b` and `c`, which nobody asks for, at r1."""
    made = Homes(rule)
    made.begin(ROOM, asked(a=1.0, b=1.0, c=1.0))
    made.become(PARTS, PARTS)
    return made


HERE = {"r0": {"a"}, "r1": {"b", "c"}}


def moved(rule: Rule = TABLE) -> Homes:
    """Now `b`'s new home is r0, and `a`'s is r1."""
    made = homes(rule)
    made.plan(ROOM, asked(a=50.0, b=50.0, c=0.0))
    made.become({"a": {"r1": 1.0}, "b": {"r0": 1.0}, "c": {"r1": 1.0}}, made.parts, "ab")
    return made


def test_requests_switch_when_the_new_home_has_the_adapter_and_then_the_old_one_drops_it():
    made = moved()
    todo = made.look(HERE)
    assert set(todo.fetch) == {("a", "r1"), ("b", "r0")} and not todo.drop
    assert made.parts["a"] == {"r0": 1.0} and not made.settled
    there = {"r0": {"a"}, "r1": {"a", "b", "c"}}
    todo = made.look(there)
    assert todo.fetch == [("b", "r0")] and not todo.drop  # requests may be on their way to r0
    assert made.parts["a"] == {"r1": 1.0} and made.parts["b"] == {"r1": 1.0}
    assert made.look(there).drop == [("a", "r0")]
    last = {"r0": {"b"}, "r1": {"a", "b", "c"}}
    made.look(last)
    assert made.look(last).drop == [("b", "r1")] and made.settled


def test_a_new_home_has_its_part_of_the_requests_while_another_one_still_fetches():
    made, names = Homes(TABLE), ("r0", "r1", "r2")
    room = Room(dict.fromkeys(names, 20), dict.fromkeys(names, 100), {8: 100.0})
    made.plan(room, asked(a=150.0))
    made.become({"a": {"r1": 0.5, "r2": 0.5}}, {"a": {"r0": 1.0}}, "a")
    everywhere = {name: {"a"} for name in names}
    assert made.look({**everywhere, "r1": set(), "r2": set()}).fetch == [("a", "r1"), ("a", "r2")]
    for _ in range(3):
        todo = made.look({**everywhere, "r2": set()})
        assert todo.fetch == [("a", "r2")] and not todo.drop and made.parts["a"] == {"r1": 0.5, "r0": 0.5}
        assert not made.settled
    assert not made.look(everywhere).drop and made.parts["a"] == {"r1": 0.5, "r2": 0.5}
    assert made.look(everywhere).drop == [("a", "r0")]


def test_a_new_home_that_loses_its_copy_keeps_its_part():
    made = homes()
    made.plan(ROOM, asked(a=50.0, b=50.0, c=0.0))
    everywhere = {name: {"a", "b", "c"} for name in ROOM.blocks}
    made.look(everywhere)
    before = made.parts["a"]
    assert made.look({name: {"b", "c"} for name in ROOM.blocks}).fetch == [("a", name) for name in before]
    assert made.parts["a"] == before


def test_parts_of_old_homes_that_are_gone_go_to_the_new_ones_that_have_the_adapter():
    made = Homes(TABLE)
    made.become({"a": {"r1": 0.5, "r2": 0.3, "r3": 0.2}}, {"a": {"r0": 1.0}}, "a")
    made.look({"r1": {"a"}, "r2": {"a"}, "r3": set()})
    assert made.parts["a"] == pytest.approx({"r1": 0.625, "r2": 0.375})


def test_what_nobody_asks_for_keeps_its_home_and_is_not_fetched_again():
    made = homes()
    made.plan(ROOM, asked(a=0.0, b=0.0, c=0.0))
    todo = made.look({"r0": set(), "r1": {"b"}})
    assert not todo.fetch and not todo.drop and made.settled
    assert made.parts == {"a": {"r0": 1.0}, "b": {"r1": 1.0}, "c": {"r1": 1.0}}


@pytest.mark.parametrize("kind", ["loraserve", "dlora"])
def test_a_plan_is_held_by_every_host_tier_and_what_has_no_room_stays_where_it_is(kind: Kind):
    made = homes(Rule(kind))
    made.plan(Room(ROOM.blocks, {"r0": 2, "r1": 3}, ROOM.points), asked(a=50.0, b=40.0, c=1.0))
    assert made.wanted.keys() == {"a", "b", "c"} and made.wanted["c"] == {"r1": 1.0}  # its home so far
    assert sorted(next(iter(made.wanted[key])) for key in "ab") == ["r0", "r1"]
    there = {name: {key for key in "ab" if name in made.wanted[key]} for name in ("r0", "r1")}
    assert not made.look(there).fetch, "the one that has no room is not fetched"


def test_what_the_service_has_no_more_has_no_home():
    made = homes()
    made.plan(ROOM, asked(a=0.0, b=50.0))
    made.look(HERE)
    assert "c" not in made.parts and "c" not in made.wanted


def test_homes_that_are_not_up_have_no_part():
    made = homes()
    made.plan(Room({"r1": 20}, {"r1": 100}, ROOM.points), asked(a=50.0, b=0.0, c=0.0))
    todo = made.look({"r1": {"b", "c"}})
    assert todo.fetch == [("a", "r1")] and "a" not in made.parts
    made.look({"r1": {"a", "b", "c"}})
    assert made.parts["a"] == {"r1": 1.0} and made.settled


def test_a_late_switch_fetches_nothing_and_drops_the_old_copy_once_a_request_has_brought_the_new_one():
    made = moved(Rule(ahead=False))
    assert not made.look(HERE).fetch and made.parts["a"] == {"r1": 1.0}
    assert not made.look(HERE).drop
    there = {"r0": {"a"}, "r1": {"a", "b", "c"}}
    made.look(there)
    assert made.look(there).drop == [("a", "r0")]


def test_where_policies_route_nothing_is_dropped():
    made = moved(Rule(routed=False))
    everywhere = {"r0": {"a", "b"}, "r1": {"a", "b", "c"}}
    assert not any(made.look(everywhere).drop for _ in range(3)) and made.settled


def test_dloras_preload_gives_more_homes_to_what_is_asked_for_more():
    made = Homes(Rule("dlora", routed=False))
    made.plan(ROOM, asked(a=80.0, b=5.0, c=0.0))
    assert len(made.wanted["a"]) == 2 > len(made.wanted["b"]) and "c" not in made.wanted
    assert {("a", "r0"), ("a", "r1")} <= set(made.look({"r0": set(), "r1": set()}).fetch)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"cluster.placement": "loraserve"}, "cluster.placement = loraserve: .*engine.step_model"),
        ({"cluster.placement": "dlora", "cluster.routing": "loraserve"}, "must be off or loraserve when"),
        ({"cluster.placement": "tidy"}, "cluster.placement"),
    ],
)
def test_a_placement_that_cannot_be_made_is_refused(settings: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        service.steps_of(configuration.load(None, settings))


def test_a_preload_needs_no_step_model_and_no_table():
    steps = service.steps_of(configuration.load(None, {"cluster.placement": "dlora", "cluster.routing": "sticky"}))
    assert steps is not None and steps.costs is None and not steps.rule.routed


def test_further_routers_hear_of_a_switch_before_the_old_homes_drop():
    """A copy is dropped at the look after the switch at the earliest (above)."""
    assert placing.LOOK_S > directory_server.BEAT_S


@pytest.mark.parametrize("placement, lines", [("dlora", 1), ("off", 0)])
def test_a_placement_that_a_further_router_is_told_is_named_as_without_effect(
    placement: str, lines: int, caplog: pytest.LogCaptureFixture
):
    settings = {"cluster.placement": placement, "cluster.controller": "127.0.0.1:1"}
    with ExitStack() as opened:
        service.followed(configuration.load(None, settings), Secret("x"), System(), opened, RoundRobin())
    assert caplog.text.count("cluster.placement = dlora has no effect here") == lines
