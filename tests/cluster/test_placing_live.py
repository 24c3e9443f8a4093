"""LoRAServe's placement over a live router and real engines: adapters move while requests run, and none fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from jlora.cluster.demand import Told, Trend
from jlora.cluster.homes import Rule
from jlora.cluster.placing import THERE, Placing, Steps
from jlora.cluster.routing.table import Table
from jlora.engine.futures import done
from jlora.ports import System
from tests import _make
from tests.cluster import _port as port
from tests.cluster import _whole
from tests.cluster._links import wait_for
from tests.cluster._service import text_spec
from tests.cluster._whole import PROMPT, World
from tests.test_step_model import STEPS

NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def placed(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Placing, Table]]:
    table = Table({})
    with _whole.world(text_model, table) as world:
        for seed, name in enumerate(NAMES):
            path = _make.make_adapter(tmp_path_factory.mktemp(name) / name, text_spec(), seed=seed, r=4)
            world.router.load_adapter(name, str(path)).result(60)
        placing = Placing(world.controller, world.found, table, Steps(STEPS, Rule(slack=0.0), 0.5), System())
        wait_for(lambda: all(member.blocks for member in world.controller.members()))
        yield world, placing, table
        for name in NAMES:
            world.router.unload_adapter(name).result(60)


def homes(table: Table) -> dict[str, set[str]]:
    return {key.partition("@")[0]: set(parts) for key, parts in table.parts.items()}


def crowded(table: Table) -> set[str]:
    """The only home of most adapters."""
    at = Counter(min(where) for where in homes(table).values() if len(where) == 1)
    return {at.most_common(1)[0][0]}


def held(world: World) -> dict[str, set[str]]:
    """Adapter -> the replicas that have it in memory."""
    found: dict[str, set[str]] = {name: set() for name in NAMES}
    for seat in world.seats:
        for info in seat.engine.adapters().result(20):
            if info.tier in ("HBM", "HOST"):
                found[info.name.partition("@")[0]].add(seat.name)
    return found


def told(world: World) -> dict[str, set[str]]:
    """`held`, as the replicas have told the controller."""
    found: dict[str, set[str]] = {name: set() for name in NAMES}
    for member in world.controller.members():
        for key in [key for key, tier in member.tiers.items() if tier in THERE]:
            found[key.partition("@")[0]].add(member.name)
    return found


def settle(world: World, placing: Placing, table: Table) -> None:
    """Looks until every adapter that is asked for is where the table sends its requests, and nowhere else."""

    def settled() -> bool:
        threading.Event().wait(0.05)  # the replicas tell their tiers ten times a second
        placing.look(world.controller.members())
        wanted = port.planned(placing)
        asked = port.asked(placing)
        here = held(world)
        return homes(table) == wanted and all(here[name] == wanted[name] for name in asked)

    wait_for(settled, 60)


@pytest.mark.slow
def test_adapters_move_with_their_demand_and_no_request_fails(
    placed: tuple[World, Placing, Table], monkeypatch: pytest.MonkeyPatch
):
    world, placing, table = placed
    expected = {name: world.ask(name).read() for name in NAMES}
    wait_for(lambda: port.load(placing).ended == len(NAMES))
    assert (port.load(placing).prompt, port.load(placing).output) == (len(NAMES) * len(PROMPT), len(NAMES) * 64)
    monkeypatch.setattr(world.controller, "told", lambda *told: None)  # the demand is the test's own,
    monkeypatch.setattr(port.load(placing), "demand", Trend(steps=1))  # and that of one time step
    for name in NAMES:
        port.load(placing).told(name, Told(1, 100, 1, 100))
    placing.step(world.controller.members())
    settle(world, placing, table)
    hot = [name for name, where in homes(table).items() if where == crowded(table)][:2]
    for name in hot:
        port.load(placing).told(name, Told(1, 100, 1, 100))
    running = [world.ask(name, 128) for name in NAMES]  # they run through the moves
    placing.step(world.controller.members())
    answers = []
    while homes(table) != port.planned(placing) or not answers:
        placing.look(world.controller.members())
        name = NAMES[len(answers) % len(NAMES)]
        answers.append((name, world.ask(name, 16)))
        answers[-1][1].read()
    settle(world, placing, table)
    answers += [(name, world.ask(name, 16)) for name in NAMES]
    assert all(answer.read() == expected[name][:16] for name, answer in answers)
    assert [answer.read()[:64] for answer in running] == [expected[name] for name in NAMES]
    first, second = (homes(table)[name] for name in hot)
    assert first | second == {"r0", "r1"}, "two busy adapters share no replica while the other one idles"


@pytest.mark.slow
def test_a_replica_that_leaves_loses_its_parts_and_gets_new_ones_when_it_is_back(
    placed: tuple[World, Placing, Table],
):
    world, placing, table = placed
    expected = {name: world.ask(name).read() for name in NAMES}
    left = world.seats[0]
    left.kill()
    wait_for(lambda: len(world.controller.members()) == 1)
    placing.round()
    assert {name: world.ask(name).read() for name in NAMES} == expected
    wait_for(lambda: traffic(world, placing) or all(parts == {"r1"} for parts in homes(table).values()))
    left.start()
    world.router.place({seat.name: seat.address for seat in world.seats})
    wait_for(lambda: len(world.controller.members()) == 2)
    wait_for(lambda: traffic(world, placing) or "r0" in set().union(*homes(table).values()))
    assert {name: world.ask(name).read() for name in NAMES} == expected


def traffic(world: World, placing: Placing) -> None:
    """A time step in which all adapters are asked for: what nobody asks for stays where it is."""
    for name in NAMES:
        world.ask(name).read()
    placing.round()


@pytest.mark.slow
def test_what_nobody_asks_for_stays_where_it_is(placed: tuple[World, Placing, Table]):
    world, placing, table = placed
    wait_for(lambda: traffic(world, placing) or len(homes(table)) == len(NAMES))
    settle(world, placing, table)
    wait_for(lambda: told(world) == held(world))
    before, parts, asked = held(world), homes(table), world.controller.fetches
    for _ in range(5):  # longer than a forecast remembers
        placing.step(world.controller.members())
    for _ in range(3):
        placing.look(world.controller.members())
    assert parts and homes(table) == parts and held(world) == before and world.controller.fetches == asked


def test_a_copy_is_dropped_only_when_every_home_has_the_adapter(
    placed: tuple[World, Placing, Table], monkeypatch: pytest.MonkeyPatch
):
    world, placing, table = placed
    dropped: list[tuple[str, str]] = []

    def unload(address: str, key: str) -> SimpleNamespace:
        dropped.append((address, key))
        return SimpleNamespace(future=done(None))

    monkeypatch.setattr(world.controller.calls, "hold", lambda *_, **__: SimpleNamespace(future=done(None)))
    monkeypatch.setattr(world.controller.calls, "unload", unload)
    version = next(v for v in world.controller.registry.versions() if v.name == "a")
    port.plan(placing, {"a": {"r1"}}, monkeypatch)
    port.homeless(placing, monkeypatch)

    def look(**tiers: str) -> None:
        members = world.controller.members()
        placing.look([replace(m, tiers={version.key: tiers[m.name]} if m.name in tiers else {}) for m in members])

    for tier in ("LOADING", "DISK"):
        for _ in range(3):
            look(r0="HBM", r1=tier)
    assert not dropped and not table.parts
    look(r0="HBM", r1="HOST")
    assert table.parts == {version.key: {"r1": 1.0}} and not dropped  # requests on their way to r0 may come yet
    look(r0="HBM", r1="HOST")
    assert dropped == [(next(m.address for m in world.controller.members() if m.name == "r0"), version.key)]


@pytest.mark.slow
def test_an_adapter_that_does_not_come_keeps_its_places(
    placed: tuple[World, Placing, Table], monkeypatch: pytest.MonkeyPatch
):
    world, placing, table = placed
    for name in NAMES:
        port.load(placing).told(name, Told(1, 100, 1, 100))
    placing.step(world.controller.members())
    settle(world, placing, table)
    before = homes(table)
    assert before.keys() == set(NAMES)
    wait_for(lambda: told(world) == held(world))
    new = {name: {"r1"} if parts == {"r0"} else {"r0"} for name, parts in before.items()}
    port.plan(placing, new, monkeypatch)
    asked: list[str] = []
    hold = world.controller.calls.hold

    def lost(address: str, version, peers, lost: bool = False):
        asked.append(version.name)
        return hold("127.0.0.1:1", version, peers)  # nobody is there

    monkeypatch.setattr(world.controller.calls, "hold", lost)
    there = {m.name: {k for k, tier in m.tiers.items() if tier in THERE} for m in world.controller.members()}
    lacking = {name for name, parts in new.items() if any(f"{name}@" not in str(there[home]) for home in parts)}
    for _ in range(3):
        placing.look(world.controller.members())
    assert set(asked) == lacking and len(asked) == len(lacking), "each is asked for once, until it may have failed"
    assert all(homes(table)[name] == before[name] for name in lacking)


@pytest.mark.slow
def test_dloras_preload_brings_what_is_asked_for_to_replicas_that_lack_it_and_drops_nothing(
    placed: tuple[World, Placing, Table],
):
    world = placed[0]
    placing = Placing(world.controller, world.found, Table({}), Steps(None, Rule("dlora", routed=False)), System())
    for name, count in zip("abc", (8, 4, 2), strict=True):
        port.load(placing).told(name, Told(count, 10, count, 10))
    lacking = next(member for member in world.controller.members() if member.name == "r1")
    key = next(version.key for version in world.controller.registry.versions() if version.name == "a")
    with suppress(grpc.RpcError):  # it may lack the adapter already
        world.controller.calls.unload(lacking.address, key).future.result(20)
    wait_for(lambda: "r1" not in held(world)["a"] and told(world) == held(world))
    before = held(world)
    asked = world.controller.fetches
    placing.step(world.controller.members())
    wanted = port.planned(placing)
    assert wanted["a"] == {"r0", "r1"} and wanted.get("d", set()) == before["d"]  # which nobody asks for

    def come() -> bool:
        placing.look(world.controller.members())
        return all(held(world)[name] >= where | before[name] for name, where in wanted.items())

    wait_for(come)
    assert (
        "r1" in held(world)["a"]
        and held(world)["d"] == before["d"]
        and world.controller.fetches - asked <= sum(map(len, wanted.values()))
    )


@pytest.mark.slow
def test_more_adapters_than_host_tiers_hold_are_not_fetched_for_ever(
    placed: tuple[World, Placing, Table], text_model: Path, tmp_path: Path
):
    blocks = next(row.blocks for row in placed[0].controller.registry.all())
    table = Table({})
    with _whole.world(text_model, table, host_blocks=2 * blocks) as world:
        names = [f"many{i}" for i in range(6)]
        for seed, name in enumerate(names):
            path = _make.make_adapter(tmp_path / name, text_spec(), seed=seed, r=4)
            world.router.load_adapter(name, str(path)).result(60)
        placing = Placing(world.controller, world.found, table, Steps(STEPS), System())
        for name in names:
            port.load(placing).told(name, Told(1, 100, 1, 100))
        wait_for(lambda: all(member.host_blocks == 2 * blocks for member in world.controller.members()))
        placing.step(world.controller.members())
        moved = []
        for _ in range(60):
            placing.look(world.controller.members())
            moved.append(world.controller.fetches)
            threading.Event().wait(0.05)
        assert moved[-1] <= 2 and moved[-1] == moved[30], "each host tier holds two, and a plan fills three quarters"
        assert world.ask(names[-1]).read() and all(len(world.ask(name, 4).read()) == 4 for name in names)
