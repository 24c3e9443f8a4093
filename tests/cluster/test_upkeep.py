"""Versions whose files are gone: which get a second home first, how many at once, and who takes no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jlora.adapters.peft import FILES
from jlora.cluster import found as module
from jlora.cluster.calls import Answer, Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory import Member, Version
from jlora.cluster.found import Found
from jlora.cluster.registry import Registry, row_of
from jlora.cluster.upkeep import AGAIN_S, FULL_S, SAVES, SHOWN, Upkeep
from jlora.config import Config
from jlora.errors import DataLoss, NotFound, ResourceExhausted
from jlora.ports import System
from jlora.replica import Load
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import AdapterInfo
from tests.cluster import _port as port
from tests.cluster._links import wait_for

COUNT = 3 * SAVES
INFO = AdapterInfo("", 0, "abc", 4, {"q": 4}, ("q",), 0, 0, "HOST", False, 0, 0, 0, -1.0, 0.0)


def answered(message: pb.AdapterInfo) -> Future[pb.AdapterInfo]:
    answer: Future[pb.AdapterInfo] = Future()
    answer.set_result(message)
    return answer


class Keeps(Calls):
    """Answers at once; `hold` with an error if the replica is full."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[str, str]] = []
        self.full: set[str] = set()
        self.lender = "h:0"
        self.loaded = pb.AdapterInfo(digest="new")

    def load(self, address: str, message: pb.LoadAdapterRequest) -> Answer:
        return Answer(address, answered(self.loaded))

    def unload(self, address: str, key: str) -> Answer:
        return Answer(address, answered(pb.AdapterInfo()))

    def pin(self, address: str, key: str, pinned: bool) -> Answer:
        return Answer(address, answered(pb.AdapterInfo()))

    def get(self, address: str, key: str) -> Answer:
        return Answer(address, answered(pb.AdapterInfo(digest="read", tier="HOST")))

    def pinned(self, address: str, wanted: Callable[[], bool]) -> list[str]:
        return []

    def hold(self, address: str, version: Version, peers: Sequence[str], lost: bool = False) -> Answer:
        assert lost and self.lender in peers
        answer: Future[pb.AdapterInfo] = Future()
        self.held.append((address, version.key))
        if address in self.full:
            answer.set_exception(ResourceExhausted("no room"))
        else:
            answer.set_result(pb.AdapterInfo())
        return Answer(address, answer)


@dataclass
class Ground:
    """A controller and its upkeep over two replicas that are nothing but their messages."""

    calls: Keeps = field(default_factory=Keeps)
    now: float = 100.0
    tiers: dict[str, dict[str, str]] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        system = System(clock=lambda: self.now)
        found, registry = Found(Config(), system), Registry("", system.threads)
        self.controller = Controller(registry, found, self.calls, system)
        self.controller.follow(self.members)
        self.upkeep = Upkeep(self.controller, found, system)
        versions = [Version(f"a{i}", i + 1, f"/nowhere/a{i}") for i in range(COUNT)]
        registry.put([row_of(version, INFO, False, 0.0) for version in versions])
        self.keys = [version.key for version in versions]
        self.tiers |= {"r0": dict.fromkeys(self.keys, "HOST"), "r1": {}}
        for uses, version in enumerate(versions):  # the last one most
            for _ in range(uses):
                self.controller.begin(version)
                self.controller.end(version)

    def members(self) -> list[Member]:
        return [
            Member(name, f"h:{name[1:]}", tiers, draining=name in self.draining) for name, tiers in self.tiers.items()
        ]

    def look(self, calls: int) -> list[str]:
        """Which were asked for in a look that begins so many calls; the most used last."""
        before = len(self.calls.held)
        port.look(self.upkeep)
        wait_for(lambda: len(self.calls.held) >= before + calls)
        return sorted((key for _, key in self.calls.held[before:]), key=[*self.keys, "own@1000"].index)


@pytest.fixture
def ground() -> Iterator[Ground]:
    made = Ground()
    yield made
    made.upkeep.close()
    made.controller.close()
    made.controller.registry.close()


def test_the_most_used_come_first_and_some_at_a_time(ground: Ground):
    first = ground.look(SAVES)
    assert first == ground.keys[-SAVES:]
    assert ground.look(0) == [], "they are on their way"
    ground.tiers["r1"] = dict.fromkeys(first, "LOADING")
    assert ground.look(0) == []
    ground.tiers["r1"] = dict.fromkeys(first, "HOST")
    assert ground.look(SAVES) == ground.keys[-2 * SAVES : -SAVES]
    ground.now += AGAIN_S + 1
    assert ground.look(SAVES) == ground.keys[-2 * SAVES : -SAVES], "they have not come"


def test_a_replica_that_is_full_is_left_in_peace_for_a_while(ground: Ground):
    ground.calls.full = {"h:1"}
    assert len(ground.look(SAVES)) == SAVES
    wait_for(lambda: port.full(ground.upkeep))
    ground.now += AGAIN_S + 1
    assert ground.look(0) == []
    ground.tiers["r2"] = {}
    assert ground.look(SAVES) == ground.keys[-SAVES:]
    assert {address for address, _ in ground.calls.held[SAVES:]} == {"h:2"}
    ground.now += FULL_S
    del ground.tiers["r2"]
    assert len(ground.look(SAVES)) == SAVES


def test_a_replica_that_drains_lends_what_it_has_and_takes_nothing(ground: Ground):
    """`hold` asserts who lends."""
    ground.draining = {"r0"}
    ground.tiers["r2"] = {}
    first = ground.look(SAVES)
    assert first == ground.keys[-SAVES:]
    ground.tiers["r1"] = dict.fromkeys(first, "HOST")
    ground.draining = {"r1"}
    ground.tiers["r0"] = {}
    ground.tiers["r2"] = dict.fromkeys(ground.keys, "HOST")
    ground.now += AGAIN_S + 1
    taken = len(ground.calls.held)
    ground.calls.lender = "h:2"
    assert ground.look(SAVES)
    assert {address for address, _ in ground.calls.held[taken:]} == {"h:0"}, "it is the only one that takes more"


def test_a_pin_at_a_replica_that_forgets_the_version_meanwhile_has_found_other_files(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
):
    """A replica forgets a version whose first read finds other weights; one that was unloaded is just unknown."""

    def unknown(address: str, *_: object) -> Answer:
        answer: Future[pb.AdapterInfo] = Future()
        answer.set_exception(NotFound("unknown"))
        return Answer(address, answer)

    controller = ground.controller
    monkeypatch.setattr(ground.calls, "pin", unknown)
    monkeypatch.setattr(ground.calls, "hold", lambda at, *_: Answer(at, answered(pb.AdapterInfo())))
    for version, error in ((controller.current("a0"), DataLoss), (Version("gone", 99, "/nowhere"), NotFound)):
        ground.now += 100  # no router of an earlier controller counts any more
        with pytest.raises(error):
            controller.ask_to_pin(Member("r1", "h:1"), version, True)(lambda: True)


def test_what_is_noted_of_versions_goes_with_them(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_REFUSED", 20)
    ground.calls.loaded = pb.AdapterInfo()  # the digest is asked for, too
    for i in range(100):
        load = Load("x", str(tmp_path / str(i)), pinned=True)
        ground.tiers["r1"] = {f"x@{ground.controller.load(load).result(20).uid}": "HOST"}
        ground.upkeep.round()
        assert port.noted(ground.upkeep)
        ground.controller.unload("x").result(20)
        ground.now += AGAIN_S + 1
        ground.upkeep.round()
        port.look(ground.upkeep)
    assert port.noted(ground.upkeep) <= 2 * COUNT + 10 and port.refused(ground.upkeep) <= 21


@pytest.mark.parametrize(
    ("digest", "gone", "kept"), [("new", False, True), ("abc", False, False), ("abc", True, True)], ids=str
)
def test_a_version_that_was_replaced_is_kept_while_it_is_used_and_no_path_has_it(
    ground: Ground, tmp_path: Path, digest: str, gone: bool, kept: bool
):
    """Its files are another version's, its own, or gone."""
    for name in FILES:
        (tmp_path / name).touch()
    controller = ground.controller
    old = Version("own", 1000, str(tmp_path), "abc")
    controller.registry.put([row_of(old, INFO, False, 0.0)])
    controller.begin(old)
    ground.calls.loaded = pb.AdapterInfo(digest=digest)
    controller.load(Load("own", str(tmp_path), replace=True)).result(20)
    if gone:
        (tmp_path / FILES[0]).unlink()
    ground.tiers |= {"r0": {old.key: "HOST"}, "r1": {}}
    assert ground.look(kept) == [old.key] * kept
    controller.end(old)
    ground.now += AGAIN_S + 1
    assert ground.look(0) == []


def test_a_drop_is_told_and_one_of_another_controllers_version_as_a_warning(
    ground: Ground, caplog: pytest.LogCaptureFixture
):
    """Two controllers of the same replicas drop each other's versions for ever."""
    caplog.set_level(logging.INFO, "jlora")
    ground.now += 100  # no router of an earlier controller counts any more
    ground.controller.registry.number()  # `old` had it
    ground.tiers |= {"r0": {"old@1": "HOST"}, "r1": {"old@1": "HOST"}}
    ground.upkeep.round()
    ground.upkeep.round()
    ground.tiers |= {"r0": {}, "r1": {f"other{i:02}@9000": "HOST" for i in range(SHOWN + 5)}}
    ground.upkeep.round()
    old, other = [record for record in caplog.records if "drop versions" in record.getMessage()]
    assert old.levelname == "INFO" and "(r0, r1) drop versions that are not current: old@1" in old.getMessage()
    assert other.levelname == "WARNING" and "other09@9000 and 5 more; this controller has not" in other.getMessage()
