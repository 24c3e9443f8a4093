"""A placement whose controller begins anew: replicas have what an earlier one has placed, and routers its table."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from jlora.cluster.calls import Calls
from jlora.cluster.controller import Controller
from jlora.cluster.demand import Told
from jlora.cluster.directory import Member, Version
from jlora.cluster.found import Found
from jlora.cluster.placing import Placing, Steps
from jlora.cluster.registry import Registry, row_of
from jlora.cluster.routing.table import Table
from jlora.config import Config
from jlora.ports import System
from jlora.types import AdapterInfo
from tests.cluster import _port as port
from tests.test_step_model import STEPS

NAMES = ("a", "b", "c", "d")
INFO = AdapterInfo("", 0, "abc", 4, {"q": 4}, ("q",), 8, 1, "HOST", False, 0, 0, 0, -1.0, 0.0)
HELD = {"r0": ("c", "d"), "r1": ("a", "b")}  # as a plan packs them, but for the order of the replicas


class Notes(Calls):
    """Takes all, and brings nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def hold(self, address: str, version: Version, peers: Any, lost: bool = False) -> Any:
        self.asked.append((address, version.key))
        return SimpleNamespace(future=Future())

    def unload(self, address: str, key: str) -> Any:
        raise AssertionError(f"{key} is dropped at {address}")


class Restarted:
    """A new controller's placement over two replicas that have adapters."""

    def __init__(self) -> None:
        self.now = 100.0
        system = System(clock=lambda: self.now)
        found, registry, self.calls = Found(Config(), system), Registry("", system.threads), Notes()
        registry.put([row_of(Version(n, i, f"/{n}"), INFO, False, 0.0) for i, n in enumerate(NAMES, 1)])
        self.keys = {version.name: version.key for version in registry.versions()}
        self.controller, self.table = Controller(registry, found, self.calls, system), Table({})
        self.controller.follow(lambda: list(self.members.values()))
        self.placing = Placing(self.controller, found, self.table, Steps(STEPS, every_s=60.0, slo_s=1.0), system)
        self.members: dict[str, Member] = {}

    def comes(self, name: str, adapters: tuple[str, ...] = ()) -> None:
        """Its first message is there."""
        tiers = dict.fromkeys((self.keys[adapter] for adapter in adapters), "HOST")
        self.members[name] = Member(name, f"h:{name[1:]}", tiers, blocks=100, host_blocks=400)

    def homes(self) -> dict[str, set[str]]:
        return {key.partition("@")[0]: set(parts) for key, parts in self.table.parts.items()}


@pytest.fixture
def restarted() -> Iterator[Restarted]:
    made = Restarted()
    yield made
    made.controller.close()
    made.controller.registry.close()


def test_what_replicas_bring_along_keeps_its_home_before_and_after_the_first_plan(restarted: Restarted):
    for name, adapters in HELD.items():  # one after the other, as links come
        restarted.comes(name, adapters)
        restarted.placing.round()
    here = {adapter: {name} for name, adapters in HELD.items() for adapter in adapters}
    assert restarted.homes() == here
    for name in NAMES:
        restarted.controller.told(name, Told(1, 100, 1, 100))
    restarted.now += 60
    for _ in range(3):
        restarted.placing.round()
    assert port.asked(restarted.placing) == set(NAMES)
    assert restarted.homes() == here and not restarted.calls.asked, "nothing moves: the demand is even"


def test_further_routers_are_told_of_no_placement_before_the_first_plan(restarted: Restarted):
    """They keep the last table of the earlier controller until then."""
    assert restarted.placing.places() is None
    restarted.now += 60
    restarted.placing.round()
    assert restarted.placing.places() is None, "no replica has come yet"
    restarted.now += 60
    restarted.comes("r0", ("a",))
    restarted.placing.round()
    assert restarted.placing.places() == {restarted.keys["a"]: {"h:0": 1.0}}


def test_what_comes_to_a_replica_before_the_first_plan_is_no_home(restarted: Restarted):
    """Or a replica that starts last would get no requests for what the others have loaded by then."""
    restarted.comes("r0")
    restarted.placing.round()
    restarted.comes("r0", ("a",))
    restarted.comes("r1")
    restarted.placing.round()
    assert restarted.homes() == {}
