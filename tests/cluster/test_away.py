"""A replica that is away for a moment keeps its adapters' homes; one that stays away loses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from jlora.adapters.catalogue import Row
from jlora.cluster.demand import Told
from jlora.cluster.directory import Member
from jlora.cluster.homes import Homes, Room, Rule
from jlora.cluster.placing import AGAIN_S, AWAY_S, LOOK_S, Placing, Steps
from jlora.cluster.registry import Registry
from jlora.cluster.routing.table import Table
from jlora.engine.futures import done
from jlora.ports import OsThreads, System

ROWS = [
    Row(name, i, "d" * 64, "e" * 64, "base", "f", {"q": 8}, ("q",), 10, 1, f"/{name}", (), False, (), 1.0, 0.0)
    for i, name in enumerate("abcd", 1)
]


@dataclass
class World:
    """A placement over a scripted controller of three replicas.

    Attributes:
        plans: the replicas of each plan; asked: (adapter, address of a replica), as often as it was asked.
    """

    members: dict[str, Member]
    registry: Registry
    now: float = 100.0
    plans: list[set[str]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    placing: Placing = field(init=False)
    table: Table = field(default_factory=lambda: Table({}))

    def __post_init__(self) -> None:
        def hold(address: str, version: Any, peers: Any) -> SimpleNamespace:
            self.asked.append((version.name, address))
            return SimpleNamespace(future=done(None))

        calls = SimpleNamespace(hold=hold, unload=lambda address, key: SimpleNamespace(future=done(None)))
        controller: Any = SimpleNamespace(
            members=lambda: list(self.members.values()), registry=self.registry, calls=calls, fetches=0,
            current=self.registry.version, peers=lambda version, near: (),
        )  # fmt: skip
        found: Any = SimpleNamespace(is_intact=lambda row: True)
        steps, system = Steps(None, Rule("dlora"), 3600.0), System(clock=lambda: self.now)
        self.placing = Placing(controller, found, self.table, steps, system)
        for row in ROWS:
            controller.told(row.name, Told(1, 100, 1, 100))
        self.placing.step(list(self.members.values()))
        self.round(0.0)

    def round(self, after_s: float = LOOK_S) -> None:
        self.now += after_s
        self.placing.round()

    def tell(self, name: str, *adapters: str, address: str = "") -> None:
        """What a replica says that it has."""
        tiers = {f"{row.name}@{row.uid}": "HOST" for row in ROWS if row.name in adapters}
        self.members[name] = Member(name, address or f"h-{name}", tiers, 100, 100)

    def homes(self) -> set[str]:
        return {name for parts in self.table.parts.values() for name in parts}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    registry, plan = Registry("", OsThreads()), Homes.plan
    registry.put(ROWS)

    def planned(self: Homes, room: Room, adapters: Any) -> None:
        made.plans.append(set(room.blocks))
        plan(self, room, adapters)

    made = World({name: Member(name, f"h-{name}", {}, 100, 100) for name in ("r0", "r1", "r2")}, registry)
    for name in made.members:
        made.tell(name, "a", "b", "c", "d")
    made.round()
    monkeypatch.setattr(Homes, "plan", planned)
    assert made.homes() == {"r0", "r1", "r2"}
    made.asked.clear()
    yield made
    registry.close()


def test_a_replica_that_is_suspect_for_one_look_costs_no_placement(world: World):
    before, places = dict(world.table.parts), world.placing.places()
    gone = world.members.pop("r1")
    world.round()
    assert world.table.parts == before and world.placing.places() == places, "its address is known still"
    world.members["r1"] = gone
    for _ in range(3):
        world.round()
    assert world.table.parts == before and not world.plans and not world.asked


def test_one_that_stays_away_loses_its_homes_once_and_gets_new_ones_when_it_is_back(world: World):
    gone = world.members.pop("r1")
    for _ in range(int(AWAY_S / LOOK_S) + 2):
        world.round()
    assert world.plans == [{"r0", "r2"}] and world.homes() == {"r0", "r2"}
    world.members["r1"] = gone
    world.round()
    assert world.plans[1:] == [{"r0", "r1", "r2"}] and "r1" in world.homes()


def test_one_that_is_back_at_once_with_nothing_is_asked_for_its_adapters(world: World):
    world.members.pop("r1")
    world.round()
    world.tell("r1", address="new")
    assert AGAIN_S > LOOK_S
    world.round()
    wanted = {name.partition("@")[0] for name, parts in world.table.parts.items() if "r1" in parts}
    assert not world.plans and wanted and set(world.asked) == {(name, "new") for name in wanted}
