"""Placement in a simulated service: adapters move while requests run, and none is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import replace

import pytest

from jlora import cli
from jlora.cluster.asking import LOOK_S
from jlora.cluster.homes import Kind, Rule, Todo
from jlora.cluster.placement import moves
from jlora.sim.fleet import Fleet
from jlora.sim.member import Member
from jlora.sim.placing import Placed, Placing
from jlora.sim.service import stored
from jlora.sim.trace import Trace, Turn
from jlora.sim.wires import Wires
from jlora.types import TokenEvent
from tests.sim._sim import SPEC, policy_of, takes

RANKS, SIZES = (8, 8, 64, 64), (2, 2, 4, 4)
POINTS = {8: 400.0, 64: 100.0}


def shifting(count: int = 120) -> Trace:
    """First all for the small ranks, then all for the large ones."""
    turns = [
        Turn(0.1 * i, i, 0, tuple(range(50 * i, 50 * i + 12)), 6, i % 2 + 2 * (i >= count // 2)) for i in range(count)
    ]
    return Trace("shifting", tuple(turns), tuple("abcd"))


def placed(
    kind: Kind,
    ahead: bool = True,
    every_s: float = 2.0,
    loads: dict[int, float] | None = None,
    delay_s: float = 0.001,
) -> tuple[Fleet, Placing]:
    spec = replace(SPEC, adapters=SIZES)
    members = [Member(f"r{i}", spec, policy_of("jlora", spec), takes(0.3)) for i in range(4)]
    placing = Placing(
        Placed(Rule(kind, ahead), RANKS, SIZES, POINTS, 100, 100, every_s=every_s, loads=loads or {}), members
    )
    return Fleet(members, shifting(), placing.table, Wires(RANKS, delay_s, placing, every_s)), placing


@pytest.mark.parametrize("ahead", [True, False])
def test_adapters_follow_the_demand_and_every_request_is_answered(ahead: bool):
    fleet, placing = placed("loraserve", ahead)
    before = dict(placing.table.parts)
    fleet.run()
    assert len(fleet.asks) == 120 and all(ask.usage for ask in fleet.asks)
    fetched, _ = moves(before, placing.table.parts)
    assert fetched and placing.moved >= len(fetched)
    assert sum(len(parts) for key, parts in placing.table.parts.items() if key in "23") >= 3  # most servers
    cold = [ask for ask in fleet.asks if ask.first - ask.sent > 0.3]
    assert bool(cold) != ahead  # a request waits for a fetch only where it was not made ahead


def test_every_adapter_lives_where_the_table_says_and_nowhere_else():
    fleet, placing = placed("loraserve")
    fleet.run()
    for look in range(10):
        there = {n: {str(i) for i in range(len(SIZES)) if m.has(i)} for n, m in fleet.members.items()}
        todo = placing.round(there, fleet.now + look)
        for key, name in todo.fetch:
            fleet.members[name].ask(int(key))
        for key, name in todo.drop:
            fleet.members[name].forget(int(key))
        if placing.settled:
            break
        for member in fleet.members.values():
            member.idle(member.clock.now + 1.0)
    else:
        raise AssertionError("it does not settle")
    homes = {(key, name) for key, parts in placing.table.parts.items() for name in parts}
    held = {(str(i), name) for name, member in fleet.members.items() for i in range(4) if member.has(i)}
    assert homes == held and {key for key, _ in homes} == set("0123")


@pytest.mark.parametrize("kind", ["random", "contiguous"])
def test_the_baselines_never_move_anything(kind: Kind):
    fleet, placing = placed(kind)
    before = dict(placing.table.parts)
    fleet.run()
    assert placing.table.parts == before and placing.moved == 0
    assert all(ask.usage for ask in fleet.asks)
    assert sum(member.stored for member in fleet.members.values()) == 4


def test_a_placement_stores_less_than_every_adapter_everywhere(tmp_path):
    out, told = tmp_path / "out.json", []
    argv = ["sim", "--workload", "W2", "--seconds", "10", "--rate", "20", "--adapters", "12", "--shrink", "8"]
    argv += ["--replicas", "4", "--hbm-gb", "2", "--host-gb", "4", "--fetch-gbps", "10", "--json", str(out)]
    for flags in (["--place", "loraserve", "--place-s", "2"], ["--route", "random"]):
        assert cli.main([*argv, *flags]) == 0
        (run,) = json.loads(out.read_text())["runs"]
        assert run["route"] == flags[1] and run["summary"]["unfinished"] == 0
        told.append(run["service"])
    placed, spread = told
    assert spread["adapters_most"] == 12  # random requests bring every adapter to a replica
    assert 3 <= placed["adapters_mean"] < 0.6 * spread["adapters_mean"] and placed["adapters_peak"] < 12
    assert placed["bytes_fetched"] < 0.8 * spread["bytes_fetched"]


def test_the_most_that_a_server_holds_at_once_is_told_also_when_it_has_dropped_it():
    fleet, _ = placed("loraserve")
    seen = {name: [(member.stored, _blocks(member))] for name, member in fleet.members.items()}
    for name, member in fleet.members.items():
        _watch(member, seen[name])
    fleet.run()
    members = list(fleet.members.values())
    for member in members:
        for adapter in range(len(SIZES)):
            member.forget(adapter)
    told = stored(members, block_bytes=1000, before=0)
    assert told["adapters_peak"] == max(count for counts in seen.values() for count, _ in counts)
    assert told["bytes_peak"] == 1000 * max(blocks for counts in seen.values() for _, blocks in counts)
    assert told["adapters_peak"] > 1 >= told["adapters_most"]  # one may be on its way


def _blocks(member: Member) -> int:
    return sum(node.size for node in member.manager.adapters.values())


def _watch(member: Member, seen: list[tuple[int, int]]) -> None:
    step = member.step

    def watched(until: float) -> list[TokenEvent]:
        events = step(until)
        seen.append((member.stored, _blocks(member)))
        return events

    member.step = watched


def test_there_is_one_look_at_a_time_however_many_time_steps_end_before_it_settles(monkeypatch: pytest.MonkeyPatch):
    every_s, looks = 0.25, list[float]()
    monkeypatch.setattr(Placing, "settled", False)
    fleet, placing = placed("loraserve", every_s=every_s)
    play = placing.round
    monkeypatch.setattr(placing, "round", lambda there, now, close: looks.append(now) or play(there, now, close))
    fleet.run()
    assert 0 < len(looks) <= fleet.now / LOOK_S + fleet.now / every_s + 2


def test_a_controller_sees_what_messages_have_told_it(monkeypatch: pytest.MonkeyPatch):
    """With a delay of a second it asks for adapters that have come, and does not switch to them yet."""
    fleet, placing = placed("loraserve", delay_s=1.0)
    play, unseen, early = placing.round, 0, 0

    def watched(there: Mapping[str, Set[str]], now: float, close: bool) -> Todo:
        nonlocal unseen, early
        todo = play(there, now, close)
        here = {(str(i), n) for n, member in fleet.members.items() for i in range(len(SIZES)) if member.has(i)}
        told = {(key, name) for name, keys in there.items() for key in keys}
        unseen += len(here - told)
        early += sum((key, name) not in told for key, parts in placing.table.parts.items() for name in parts)
        return todo

    monkeypatch.setattr(placing, "round", watched)
    fleet.run()
    assert unseen > 0 == early and placing.moved


def test_dloras_preload_puts_the_adapters_that_are_asked_for_most_on_most_replicas():
    spec = replace(SPEC, adapters=SIZES)
    members = [Member(f"r{i}", spec, policy_of("jlora", spec), takes(0.3)) for i in range(4)]
    loads = {0: 80.0, 1: 10.0, 2: 5.0}
    placing = Placing(Placed(Rule("dlora"), RANKS, SIZES, POINTS, 20, 100, loads=loads), members)
    places = {key: len(parts) for key, parts in placing.table.parts.items()}
    assert places["0"] == 4 > places["2"] >= 1 and places["3"] == 1  # which nobody asks for
    assert all(member.has(0) for member in members)


def test_dloras_preload_forgets_what_was_asked_for_once():
    fleet, placing = placed("dlora", every_s=0.25, loads={0: 5.0, 1: 5.0})
    at = [len(placing.table.parts[key]) for key in "02"]
    fleet.run()  # half a run for the small ranks, then half a run for the large ones
    assert all(ask.usage for ask in fleet.asks) and placing.moved
    later = [len(placing.table.parts[key]) for key in "02"]
    assert at[0] > at[1] == 1 and later[1] > 1, "the new habit has more homes than the last resort"


def test_loraserve_is_a_route_by_its_own_placement_as_in_the_product(tmp_path):
    argv = ["sim", "--workload", "W2", "--seconds", "3", "--rate", "6", "--adapters", "6", "--shrink", "8"]
    argv += ["--replicas", "3", "--hbm-gb", "2", "--host-gb", "4", "--fetch-gbps", "10", "--place-s", "1"]
    runs = []
    for number, flags in enumerate((["--route", "loraserve", "jlora"], ["--place", "loraserve"])):
        out = tmp_path / f"{number}.json"
        assert cli.main([*argv, *flags, "--json", str(out)]) == 0
        runs += json.loads(out.read_text())["runs"]
    assert [run["route"] for run in runs] == ["loraserve", "jlora", "loraserve"]
    assert runs[0] == runs[2]


@pytest.mark.parametrize("route", ["jlora", "table"])
def test_a_placement_feeds_any_route(tmp_path, route: str):
    out = tmp_path / "out.json"
    argv = ["sim", "--workload", "W2", "--seconds", "3", "--rate", "6", "--adapters", "6", "--shrink", "8", "--route"]
    argv += [route, "--replicas", "3", "--hbm-gb", "2", "--host-gb", "4", "--fetch-gbps", "10", "--place", "dlora"]
    assert cli.main([*argv, "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["route"] == ("dlora" if route == "table" else "dlora, jlora") and run["summary"]["unfinished"] == 0
