"""The controller over real replicas: versions, pins, what goes and what comes, and replicas that are away."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jlora.adapters import catalogue
from jlora.cluster import upkeep
from jlora.cluster.directory import Member, Version
from jlora.cluster.view import THERE
from jlora.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jlora.model.spec import ModelSpec
from jlora.replica import Load
from tests import _make
from tests.cluster import _port as port
from tests.cluster import _service
from tests.cluster._service import Service
from tests.serve._server import Served, wait_until


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> Iterator[list[Served]]:
    with _service.replicas(tiny_model, 2) as served:
        yield served


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "AGAIN_S", 0.05)


@pytest.fixture
def service(two: list[Served]) -> Iterator[Service]:
    with _service.service(two) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path, tiny_spec: ModelSpec) -> str:
    return str(_make.make_adapter(tmp_path / "one", tiny_spec, seed=3, r=4))


def test_a_load_is_one_replicas_and_the_whole_services(service: Service, path: str):
    info = service.controller.load(Load("fr", path)).result(60)
    assert (info.name, info.uid, info.rank, info.pinned) == ("fr", 1, 4, False) and len(info.digest) == 64
    assert sorted(len(service.at(i)) for i in (0, 1)) == [0, 1]
    version = service.controller.current("fr")
    assert (version.key, version.digest, version.path, version.rank) == ("fr@1", info.digest, path, 4)
    (listed,) = service.controller.adapters().result(20)
    assert (listed.name, listed.digest, listed.blocks) == ("fr", info.digest, info.blocks)
    (peer,) = service.controller.peers(version, "nobody")
    holder = next(m for m in service.members() if m.tiers)
    assert peer == holder.address and service.controller.peers(version, holder.name) == ()
    with pytest.raises(AlreadyExists):
        service.controller.load(Load("fr", path)).result(60)
    with pytest.raises(NotFound, match="did you mean 'fr'"):
        service.controller.current("frr")


def test_a_replaced_version_stays_until_its_last_request_has_ended(service: Service, path: str):
    controller = service.controller
    controller.load(Load("fr", path)).result(60)
    old = controller.current("fr")
    controller.begin(old)
    assert controller.load(Load("fr", path, replace=True)).result(60).uid == 2
    assert controller.current("fr").key == "fr@2"
    service.upkeep.round()
    assert {key for i in (0, 1) for key in service.at(i)} == {"fr@1", "fr@2"}
    controller.end(old)
    wait_until(lambda: {key for i in (0, 1) for key in service.at(i)} == {"fr@2"})


def test_a_replaced_version_whose_files_were_overwritten_has_a_second_home_while_it_is_used(
    service: Service, path: str, tiny_spec: ModelSpec
):
    """Or its answers would end with the one replica that has it."""
    controller = service.controller
    controller.load(Load("fr", path)).result(60)
    old = controller.current("fr")
    controller.begin(old)
    _make.make_adapter(path, tiny_spec, seed=99, r=4)
    assert controller.load(Load("fr", path, replace=True)).result(60).digest != old.digest
    service.upkeep.look()
    wait_until(lambda: all(old.key in service.at(i) and service.at(i)[old.key].tier in THERE for i in range(2)))
    assert {service.at(i)[old.key].digest for i in range(2)} == {old.digest}
    controller.end(old)
    wait_until(lambda: not any(old.key in service.at(i) for i in range(2)))


def test_an_unload_forgets_the_name_at_once_and_waits_for_requests(service: Service, path: str):
    controller = service.controller
    controller.load(Load("fr", path)).result(60)
    version = controller.current("fr")
    controller.begin(version)
    unloading = controller.unload("fr")
    wait_until(lambda: controller.registry.find("fr") is None)
    assert not unloading.done()
    controller.end(version)
    assert unloading.result(60).name == "fr"
    assert not service.at(0) and not service.at(1)
    with pytest.raises(NotFound):
        controller.unload("fr").result(60)


def test_pins_hold_at_every_replica_also_at_one_that_comes_later(service: Service, path: str):
    service.up = [0]
    service.controller.load(Load("fr", path, pinned=True)).result(60)
    assert service.at(0)["fr@1"].pinned and not service.at(1)
    service.up = [0, 1]
    service.until(1, {"fr@1"})
    wait_until(lambda: service.at(1)["fr@1"].pinned)
    assert service.controller.pin("fr", False).result(60).pinned is False
    assert not any(service.at(i)["fr@1"].pinned for i in (0, 1))


def test_an_unpin_reaches_a_replica_that_was_away(service: Service, path: str):
    service.controller.load(Load("fr", path, pinned=True)).result(60)
    service.up = [0]
    service.upkeep.round()  # it notices
    assert service.controller.pin("fr", False).result(60).pinned is False
    assert service.at(1)["fr@1"].pinned
    service.up = [0, 1]
    wait_until(lambda: service.upkeep.round() or not service.at(1)["fr@1"].pinned)


def test_a_call_that_a_replica_has_missed_is_made_good(service: Service, path: str, monkeypatch: pytest.MonkeyPatch):
    """Its link broke for less than a round, so nobody saw it away."""
    controller = service.controller
    controller.load(Load("fr", path, pinned=True)).result(60)
    ask = controller.ask_to_pin

    def lost(wanted: object) -> NoReturn:
        raise Unavailable("the link is broken")

    def at_r1_lost(at: Member, *pin: Any) -> Any:
        return lost if at.name == "r1" else ask(at, *pin)

    for pinned in (False, True, False):
        with monkeypatch.context() as patch:
            patch.setattr(controller, "ask_to_pin", at_r1_lost)
            controller.pin("fr", pinned).result(60)
        assert service.at(0)["fr@1"].pinned is pinned
        wait_until(lambda p=pinned: service.upkeep.round() or service.at(1)["fr@1"].pinned is p)


def test_a_new_controller_takes_pins_that_its_registry_has_not(two: list[Served], path: str, tmp_path: Path):
    file = str(tmp_path / "adapters.db")
    with _service.service(two, file) as service:
        service.controller.load(Load("fr", path, pinned=True)).result(60)
        service.up = [0]
        service.controller.pin("fr", False).result(60)
        service.emptied = False
    with _service.service(two, file) as service:
        assert service.at(1)["fr@1"].pinned
        wait_until(lambda: service.upkeep.round() or service.at(1)["fr@1"].pinned is False)


@pytest.mark.parametrize("first", [True, False])
def test_of_two_calls_that_pin_the_later_one_holds(
    service: Service, path: str, first: bool, monkeypatch: pytest.MonkeyPatch
):
    """The first one is between its replicas' answers and its record."""
    controller = service.controller
    controller.load(Load("fr", path, pinned=not first)).result(60)
    answered, go_on = threading.Event(), threading.Event()
    seam = port.pins_everywhere(controller)
    everywhere = getattr(*seam)

    def held(version: Version, pinned: bool) -> None:
        everywhere(version, pinned)
        if pinned is first:
            answered.set()
            assert go_on.wait(20)

    monkeypatch.setattr(*seam, held)
    earlier = controller.pin("fr", first)
    assert answered.wait(20)
    assert controller.pin("fr", not first).result(20).pinned is not first
    go_on.set()
    with pytest.raises(FailedPrecondition, match="by a later call"):
        earlier.result(20)
    assert controller.current("fr").pinned is not first
    service.served[1].replica.pin_adapter("fr@1", first).result(20)  # as if the earlier call had come last
    wait_until(lambda: service.upkeep.round() or all(service.at(i)["fr@1"].pinned is not first for i in (0, 1)))


def test_a_replica_that_was_away_drops_what_is_gone(service: Service, path: str):
    service.controller.load(Load("fr", path, pinned=True)).result(60)
    service.up = [0]
    service.controller.unload("fr").result(60)
    assert not service.at(0) and set(service.at(1)) == {"fr@1"}
    service.up = [0, 1]
    service.until(1, set())


def test_without_a_replica_only_what_needs_none_is_done(service: Service, path: str, tmp_path: Path):
    service.up = []
    with pytest.raises(Unavailable, match="no replica is up"):
        service.controller.load(Load("fr", path)).result(60)
    assert service.controller.load(Load("later", path, lazy=True)).result(60).digest == ""
    with pytest.raises(NotFound):
        service.controller.load(Load("none", str(tmp_path / "none"), lazy=True)).result(60)
    assert [info.name for info in service.controller.adapters().result(20)] == ["later"]


def test_a_load_goes_on_elsewhere_when_its_replica_dies(service: Service, path: str, monkeypatch: pytest.MonkeyPatch):
    """The first replica never answers, and then it is down."""
    reached, first = threading.Event(), service.served[0].replica
    asked: list[tuple[Any, ...]] = []
    load_adapter = first.load_adapter

    def hangs(*args: Any) -> object:
        asked.append(args)
        reached.set()
        return first.warm().__class__()

    monkeypatch.setattr(first, "load_adapter", hangs)
    loading = service.controller.load(Load("fr", path, pinned=True))
    assert reached.wait(20)
    service.up = [1]
    info = loading.result(60)
    # Not the number that the first was given: it may come back, having read other files.
    assert info.digest and info.uid == 2 and set(service.at(1)) == {"fr@2"}
    monkeypatch.undo()
    assert load_adapter(*asked[0]).result(60).pinned and set(service.at(0)) == {"fr@1"}
    monkeypatch.setattr(upkeep, "AGAIN_S", 0.05)
    service.up = [0, 1]
    service.until(0, {"fr@2"})  # what it has read too late is taken from it, and the service's pin brings the other


def test_a_cancelled_load_leaves_nothing(service: Service, path: str, monkeypatch: pytest.MonkeyPatch):
    reached, go_on = threading.Event(), threading.Event()
    seam = port.reads(service.controller)
    read = getattr(*seam)

    def slow(*args: object) -> object:
        info = read(*args)  # pyright: ignore[reportArgumentType]
        reached.set()
        assert go_on.wait(20)
        return info

    monkeypatch.setattr(*seam, slow)
    loading = service.controller.load(Load("fr", path))
    assert reached.wait(20) and loading.cancel()
    go_on.set()
    wait_until(lambda: not service.at(0) and not service.at(1))
    assert service.controller.adapters().result(20) == []


@pytest.mark.parametrize(
    "load, error",
    [(Load("a@1", "x"), InvalidArgument), (Load("a", "/nowhere"), NotFound), (Load("..", "x"), InvalidArgument)],
)
def test_a_load_that_cannot_be_is_refused_and_leaves_nothing(service: Service, load: Load, error: type[Exception]):
    with pytest.raises(error):
        service.controller.load(load).result(60)
    assert service.controller.adapters().result(20) == [] and not service.at(0) and not service.at(1)


def test_a_load_that_the_registry_cannot_keep_fails_alone(
    two: list[Served], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catalogue, "PATIENCE_S", 0.05)
    file = str(tmp_path / "adapters.db")
    with _service.service(two, file) as service:
        service.controller.load(Load("kept", path)).result(60)
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("begin immediate")
        for call in (
            service.controller.load(Load("new", path)),
            service.controller.unload("kept"),
            service.controller.pin("kept", True),
        ):
            with pytest.raises(Unavailable, match="adapters.registry"):
                call.result(60)
        assert service.controller.current("kept").key == "kept@1"
        assert [info.name for info in service.controller.adapters().result(20)] == ["kept"]
        other.execute("rollback")
        other.close()
        service.until(0, set(service.at(0)) & {"kept@1"})
        service.controller.load(Load("new", path)).result(60)


def test_a_new_controller_has_what_the_old_one_had(two: list[Served], path: str, tmp_path: Path):
    file = str(tmp_path / "adapters.db")
    with _service.service(two, file) as service:
        service.controller.load(Load("fr", path, pinned=True)).result(60)
        digest = service.controller.current("fr").digest
    with _service.service(two, file) as service:
        assert service.controller.current("fr") == Version(
            "fr", 1, path, digest, 4, service.controller.current("fr").bytes, True
        )
        service.until(0, {"fr@1"})
        service.until(1, {"fr@1"})
        assert service.controller.load(Load("fr", path, replace=True)).result(60).uid == 2


def test_a_directory_is_known_by_its_headers_and_its_digest_by_the_first_read(
    two: list[Served], tiny_model: Path, tiny_spec: ModelSpec, tmp_path: Path
):
    place = tmp_path / "all"
    _make.make_adapter(place / "first", tiny_spec, seed=4, r=2)
    with _service.service(two, adapters__dir=str(place), model__path=str(tiny_model)) as service:
        version = service.controller.current("first")
        assert (version.digest, version.rank) == ("", 2) and not service.at(0)
        _make.make_adapter(place / "second", tiny_spec, seed=5, r=4)
        service.upkeep.look()
        assert service.controller.current("second").rank == 4
        service.served[0].replica.load_adapter(version.key, version.path).result(60)  # as with its first request

        def known() -> bool:
            service.upkeep.round()
            return service.controller.current("first").digest == service.at(0)[version.key].digest

        wait_until(known)
        assert service.controller.current("first").key == version.key


def test_of_two_replicas_that_read_different_files_the_first_one_has_the_version(
    two: list[Served], tiny_model: Path, tiny_spec: ModelSpec, tmp_path: Path
):
    path = _make.make_adapter(tmp_path / "all" / "a", tiny_spec, seed=4, r=2)
    with _service.service(two, adapters__dir=str(tmp_path / "all"), model__path=str(tiny_model)) as service:
        key = service.controller.current("a").key
        service.served[0].replica.load_adapter(key, str(path)).result(60)
        wait_until(lambda: service.upkeep.round() or service.controller.current("a").digest)
        _make.make_adapter(path, tiny_spec, seed=5, r=2)
        service.served[1].replica.load_adapter(key, str(path)).result(60)
        service.until(1, set())
        assert service.controller.current("a").digest == service.at(0)[key].digest


def test_a_pin_reads_the_version_and_no_other(service: Service, path: str, tiny_spec: ModelSpec):
    """The files have changed since: the replica that comes late must not serve them under the old version, not for a
    moment: it once loaded what the path had, and answered requests with it until the controller had looked.
    """
    service.up = [0]
    digest = service.controller.load(Load("fr", path)).result(60).digest
    _make.make_adapter(path, tiny_spec, seed=99, r=4)
    service.up = [1]  # no peer is there that has it
    with pytest.raises(DataLoss, match="'fr@1': its files have changed"):
        service.controller.pin("fr", True).result(60)
    assert "fr@1" not in service.at(1)
    service.up = [0, 1]  # the one that has it is back
    assert service.controller.pin("fr", True).result(60).pinned
    assert (service.at(1)["fr@1"].digest, service.at(1)["fr@1"].pinned) == (digest, True)


def test_a_pin_reads_what_a_peer_has_where_the_files_have_changed(service: Service, path: str, tiny_spec: ModelSpec):
    service.up = [0]
    digest = service.controller.load(Load("fr", path)).result(60).digest
    _make.make_adapter(path, tiny_spec, seed=99, r=4)
    service.up = [0, 1]
    assert service.controller.pin("fr", True).result(60).pinned
    for i in (0, 1):
        assert (service.at(i)["fr@1"].digest, service.at(i)["fr@1"].pinned) == (digest, True)


def test_a_second_pin_that_fails_takes_nothing_of_the_first(
    service: Service, path: str, monkeypatch: pytest.MonkeyPatch
):
    service.controller.load(Load("fr", path, pinned=True)).result(60)
    ask = service.controller.ask_to_pin

    def full(wanted: object) -> NoReturn:
        raise ResourceExhausted("no room")

    monkeypatch.setattr(service.controller, "ask_to_pin", lambda at, *pin: full if at.name == "r1" else ask(at, *pin))
    with pytest.raises(ResourceExhausted):
        service.controller.pin("fr", True).result(60)
    assert all(service.at(i)["fr@1"].pinned for i in (0, 1)) and service.controller.current("fr").pinned
