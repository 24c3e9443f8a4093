"""Adapters whose files go and come back, or that one node cannot read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from jlora import config as configuration
from jlora.adapters.catalogue import Row
from jlora.adapters.peft import FILES
from jlora.cluster.calls import Answer, Calls
from jlora.cluster.controller import Controller
from jlora.cluster.directory import Member
from jlora.cluster.found import Found
from jlora.cluster.registry import Registry
from jlora.cluster.upkeep import Upkeep
from jlora.cluster.uses import Uses
from jlora.errors import DataLoss, JloraError, NotFound, Unavailable
from jlora.ports import System
from jlora.replica import Load
from jlora.serve.proto import jlora_pb2 as pb


class Answers(Calls):
    """Replicas that answer at once; `load` with the address's error if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, JloraError] = {}
        self.asked: list[str] = []

    def _answer(self, address: str, error: JloraError | None = None) -> Answer:
        answer: Future[pb.AdapterInfo] = Future()
        if error is None:
            answer.set_result(pb.AdapterInfo(digest="read", tier="HOST"))
        else:
            answer.set_exception(error)
        return Answer(address, answer)

    def load(self, address: str, message: pb.LoadAdapterRequest) -> Answer:
        self.asked.append(address)
        return self._answer(address, self.errors.get(address))

    def unload(self, address: str, key: str) -> Answer:
        return self._answer(address)

    def get(self, address: str, key: str) -> Answer:
        return self._answer(address)


class Place:
    """A controller of four replicas, and its `adapters.dir` with the adapters `a` and `b`."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder, Answers()
        for name in "ab":
            self.make(folder / name)
        system = System()
        registry = Registry("", system.threads)
        self.found = Found(configuration.load({"adapters.dir": str(folder)}), system)
        self.controller = Controller(registry, self.found, self.calls, system)
        self.controller.uses = Uses(hold_s=0)
        self.controller.follow(lambda: [Member(f"r{i}", f"h:{i}", {"x@1": "HOST"} if i else {}) for i in range(4)])
        self.upkeep = Upkeep(self.controller, self.found, system)
        self.upkeep.look()

    @staticmethod
    def make(path: Path) -> str:
        path.mkdir(parents=True)
        for name in FILES:
            (path / name).touch()
        return str(path)

    def names(self) -> list[str]:
        return [row.name for row in self.controller.registry.all()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "all")
    yield made
    made.upkeep.close()
    made.controller.close()
    made.controller.registry.close()


def test_a_version_that_was_loaded_from_another_path_meanwhile_stays(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its files moved out of `adapters.dir`, and a client names their new path while upkeep looks."""
    gone = place.found.gone
    path = str(tmp_path / "elsewhere")

    def loaded_behind(rows: Sequence[Row]) -> list[Row]:
        shutil.move(place.folder / "a", path)
        told = gone(rows)
        place.controller.load(Load("a", path, replace=True)).result(20)
        return told

    monkeypatch.setattr(place.found, "gone", loaded_behind)
    place.upkeep.look()
    place.controller.unload("b").result(20)  # a later call: what the look began is over, too
    assert place.names() == ["a"] and place.controller.current("a").path == path


def test_a_directory_that_is_replaced_between_two_looks_is_found_again(place: Place, monkeypatch: pytest.MonkeyPatch):
    """As by `rm -rf a && cp -r new a`: upkeep sees it without files, and forgets it when they are there."""
    first, gone = place.controller.current("a"), place.found.gone

    def back_behind(rows: Sequence[Row]) -> list[Row]:
        shutil.rmtree(place.folder / "a")
        told = gone(rows)
        place.make(place.folder / "a")
        return told

    monkeypatch.setattr(place.found, "gone", back_behind)
    place.upkeep.look()
    assert place.names() == ["b"]
    monkeypatch.setattr(place.found, "gone", gone)
    place.upkeep.look()
    assert place.names() == ["a", "b"] and place.controller.current("a").number > first.number


def test_an_adapter_that_a_client_has_unloaded_is_not_found_again_as_it_is(place: Place):
    place.controller.unload("a").result(20)
    place.upkeep.look()
    assert place.names() == ["b"]


def test_a_load_that_one_node_cannot_read_goes_to_one_other(place: Place):
    """The replica with the fewest adapters in memory is asked first: it may have so few because it can read none."""
    place.calls.errors = {"h:0": NotFound("no such directory")}
    assert place.controller.load(Load("c", "/c")).result(20).name == "c"
    assert place.calls.asked == ["h:0", "h:1"]


@pytest.mark.parametrize(
    ("errors", "asked"),
    [
        ((NotFound("here"), NotFound("no directory")), 2),
        ((DataLoss("here"), NotFound("no directory")), 2),
        ((NotFound("here"), Unavailable("away"), NotFound("no directory")), 3),
    ],
    ids=["missing", "damaged", "one is away"],
)
def test_files_that_two_nodes_cannot_read_are_missing(place: Place, errors: Sequence[JloraError], asked: int):
    place.calls.errors = {f"h:{i}": error for i, error in enumerate(errors)}
    with pytest.raises(NotFound, match="no directory"):
        place.controller.load(Load("c", "/c")).result(20)
    assert len(place.calls.asked) == asked and place.names() == ["a", "b"]
