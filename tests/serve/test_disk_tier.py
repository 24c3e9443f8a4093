"""Adapters beyond host memory: they stay on the disk until a request needs them, and leave memory for others."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from jlora.adapters.peft import WEIGHTS
from jlora.ports import DiskFiles, DiskFolder, System
from jlora.serve.proto import jlora_pb2 as pb
from tests import port
from tests.serve import _library
from tests.serve._library import COUNT, Tier, ask, on_disk, tier
from tests.serve._server import SMALL, Served, refused, request, serve, wait_until

IN_MEMORY = 3  # adapters that the host tier has room for


class Disk(DiskFiles):
    """Folders whose names `shut` holds back open when it is called with others. Those of `broken` have no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""
        self.number = errno.EIO  # what reading them meets
        self.asked: list[str] = []  # files of `broken` that were read
        self._open, self.opened = threading.Condition(), list[str]()
        self._shut: tuple[str | None, ...] = ()

    def folder(self, directory: str) -> AbstractContextManager[DiskFolder]:
        with self._open:
            self.opened.append(Path(directory).name)
            assert self._open.wait_for(lambda: Path(directory).name not in self._shut, 60)
        opened = super().folder(directory)
        return _failing(opened, self.asked, self.number) if Path(directory).name == self.broken else opened

    def shut(self, *names: str | None) -> None:
        with self._open:
            self._shut = names
            self._open.notify_all()


@dataclass
class _Lost:
    """A file that opens and cannot be read."""

    size: int
    name: str
    asked: list[str]
    number: int

    def read(self, size: int) -> Any:
        self.asked.append(self.name)
        raise OSError(self.number, os.strerror(self.number))


@contextmanager
def _failing(opened: AbstractContextManager[DiskFolder], asked: list[str], number: int) -> Iterator[DiskFolder]:
    with opened as folder:
        plain = folder.open

        @contextmanager
        def found(name: str) -> Iterator[Any]:
            with plain(name) as file:
                yield _Lost(file.size, name, asked, number) if name == WEIGHTS else file

        folder.open = found  # type: ignore[method-assign]
        yield folder


@pytest.fixture(scope="module")
def library(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _library.write(tmp_path_factory.mktemp("library"), text_model)


@pytest.fixture(scope="module")
def expected(text_model: Path, library: Path) -> dict[str, list[int]]:
    return _library.answers(text_model, library)


@pytest.fixture(scope="module")
def disk() -> Disk:
    return Disk()


@pytest.fixture(scope="module")
def shared(text_model: Path, library: Path, disk: Disk) -> Iterator[Served]:
    largest = 2  # blocks of rank 8
    tiers = {"cache.host_blocks": IN_MEMORY * largest, "cache.hbm_blocks": 40}
    settings = {**SMALL, **tiers, "adapters.dir": str(library), "adapters.lazy": True, "model.max_model_len": 256}
    with serve(text_model, settings, System(files=disk)) as served:
        yield served


@pytest.fixture
def served(shared: Served, disk: Disk) -> Iterator[Served]:
    yield shared
    disk.shut(None)
    disk.broken = ""
    disk.asked.clear()
    shared.check_idle()


def one_on_disk(served: Served, *but: str) -> str:
    """The name of an adapter that is on the disk only; it asks for others until there is one."""
    for i in range(COUNT):
        found = [name for name in on_disk(served) if name not in but]
        if found:
            return found[0]
        ask(served, f"a{i}")
    raise AssertionError("all adapters fit into memory")


def push_out(served: Served, name: str) -> None:
    """Asks for others until the adapter is on the disk only: one that was asked for more often stays for longer."""
    for i in range(20 * COUNT):
        if tier(served, name) == "DISK":
            return
        if name != f"a{i % COUNT}":
            ask(served, f"a{i % COUNT}")
    raise AssertionError("the adapter stays in memory")


def test_an_adapter_that_left_memory_answers_as_before(served: Served, disk: Disk, expected: dict[str, list[int]]):
    dropped, order = served.cache().adapters_dropped, random.Random(3)
    names = sorted(expected)
    for _ in range(3):
        order.shuffle(names)
        calls = [(name, served.inference.Generate.future(request(model=name), timeout=60)) for name in names]
        assert {name: list(call.result().outputs[0].token_ids) for name, call in calls} == expected
        served.check_idle()
    assert served.cache().adapters_dropped > dropped
    assert len(on_disk(served)) >= COUNT - 2 * IN_MEMORY
    assert len({tuple(answer) for answer in expected.values()}) > COUNT // 2  # the adapters do differ


def test_reads_are_counted_with_those_that_failed_and_their_seconds(
    served: Served, library: Path, expected: dict[str, list[int]]
):
    def counted() -> tuple[int, int, float]:
        theirs, ours = served.control.GetCacheState(pb.GetCacheStateRequest()), served.cache()
        found = theirs.adapter_reads, theirs.adapter_reads_failed, theirs.adapter_read_s
        assert found == (ours.adapter_reads, ours.adapter_reads_failed, ours.adapter_read_s)
        return found

    name = one_on_disk(served)
    reads, failed, seconds = counted()
    ask(served, name)
    first = counted()
    assert first[:2] == (reads + 1, failed) and first[2] > seconds
    ask(served, name)  # it is in memory
    assert counted() == first
    name = one_on_disk(served, name)
    reads, _, seconds = counted()
    shutil.move(library / name, library.parent / "away")
    with refused(grpc.StatusCode.NOT_FOUND, repr(name)):
        ask(served, name)
    assert counted() == (reads, failed + 1, seconds)
    shutil.move(library.parent / "away", library / name)
    assert ask(served, name) == expected[name]


def test_adapters_are_counted_by_tier_and_those_that_come_from_the_disk(served: Served, disk: Disk):
    def counted() -> dict[str, int]:
        state = served.control.GetCacheState(pb.GetCacheStateRequest())
        names = ("registered", "hbm", "host", "disk", "loading", "reading")
        return {name: getattr(state, f"adapters_{name}") for name in names}

    def listed() -> dict[str, int]:
        tiers = Counter(tier(served, f"a{i}").lower() for i in range(COUNT))
        return {"registered": COUNT, **{name: tiers[name] for name in ("hbm", "host", "disk", "loading")}}

    ask(served, "a0")
    served.check_idle()
    wait_until(lambda: counted() == {**listed(), "reading": 0})  # a copy to the device may be landing
    assert counted()["hbm"] and counted()["disk"] >= COUNT - 2 * IN_MEMORY
    names, before = on_disk(served)[:3], len(disk.opened)
    disk.shut(*names)
    calls = [served.inference.Generate.future(request(model=name), timeout=60) for name in names]
    wait_until(lambda: counted()["reading"] == 3)  # two are read at once, and one waits for a reader
    wait_until(
        lambda: sum(name in names for name in disk.opened[before:]) == 2
    )  # they have their host blocks: no other leaves
    at = counted()
    assert at == {**listed(), "reading": 3} and at["loading"] == 3
    metrics = urllib.request.urlopen(f"{served.http}/metrics", timeout=20).read().decode()
    assert f'jlora_adapters{{tier="disk"}} {at["disk"]:.1f}' in metrics and "jlora_adapters_reading 3.0" in metrics
    served.check_integrity()
    disk.shut(None)
    for call in calls:
        call.result()
    served.check_idle()
    wait_until(lambda: counted() == {**listed(), "reading": 0})


def test_others_overtake_a_request_whose_adapter_is_being_read(
    served: Served, disk: Disk, expected: dict[str, list[int]]
):
    name = one_on_disk(served)
    disk.shut(name)
    waiting = served.inference.Generate.future(request(model=name), timeout=60)
    wait_until(lambda: tier(served, name) == "LOADING")
    assert ask(served, "", prompt=(9, 8, 7))
    info = served.adapters.GetAdapter(pb.GetAdapterRequest(name=name))
    assert (info.waiting, info.running) == (1, 0)
    served.check_integrity()
    disk.shut(None)
    answer = waiting.result()
    assert list(answer.outputs[0].token_ids) == expected[name]
    timing = answer.timing
    assert 0 < timing.adapter_cold_start_s <= timing.ttft_s
    assert timing.queue_s < timing.adapter_cold_start_s


def test_so_many_are_read_at_once_as_there_are_readers(served: Served, disk: Disk, expected: dict[str, list[int]]):
    one_on_disk(served)
    names = on_disk(served)[:4]
    assert len(names) == 4
    before = len(disk.opened)

    def opened() -> list[str]:
        return [name for name in disk.opened[before:] if name in names]

    disk.shut(*names)
    calls = {name: served.inference.Generate.future(request(model=name), timeout=60) for name in names}
    wait_until(lambda: len(opened()) == 2)  # `adapters.readers`
    for i in range(5):  # others go on, and no third reading begins meanwhile
        assert ask(served, "", prompt=(9, 8, i))
    assert len(opened()) == 2
    disk.shut(None)
    assert {name: list(call.result().outputs[0].token_ids) for name, call in calls.items()} == {
        name: expected[name] for name in names
    }
    # Once for its weights, and once for a chat template of its own.
    assert Counter(opened()) == dict.fromkeys(names, 2)


def test_a_reading_ends_when_nobody_waits_for_it_any_more(served: Served, disk: Disk):
    name = disk.broken = one_on_disk(served)
    disk.shut(name)
    failed = served.cache().adapter_reads_failed
    calls = [served.inference.Generate.future(request(model=name), timeout=60) for _ in range(2)]
    wait_until(lambda: disk.opened[-1] == name)
    reserved = port.parts(served.replica).scheduler.manager.reserved
    assert reserved
    for call in calls:
        call.cancel()
    wait_until(lambda: tier(served, name) == "DISK")
    disk.shut(None)
    wait_until(lambda: not reserved)
    assert served.cache().adapter_reads_failed == failed  # nobody has missed it
    assert not disk.asked  # its weights were not read any more


def test_files_that_changed_are_data_loss_and_never_served(
    served: Served, disk: Disk, library: Path, expected: dict[str, list[int]], text_model: Path
):
    ask(served, "a1")  # pins its digest
    push_out(served, "a1")
    weights = library / "a1" / "adapter_model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with refused(grpc.StatusCode.DATA_LOSS, "'a1'", "changed on the disk"):
        ask(served, "a1")
    assert ask(served, "a2") == expected["a2"]
    weights.write_bytes(kept)
    assert ask(served, "a1") == expected["a1"]


@pytest.mark.parametrize(("number", "status"), [
    (errno.EIO, grpc.StatusCode.DATA_LOSS), (errno.ENFILE, grpc.StatusCode.RESOURCE_EXHAUSTED),
])  # fmt: skip
def test_a_disk_that_fails_under_a_reading_costs_the_adapters_own_requests_alone(
    served: Served, disk: Disk, expected: dict[str, list[int]], number: int, status: grpc.StatusCode
):
    name, disk.number = one_on_disk(served), number
    disk.broken = name
    calls = {one: served.inference.Generate.future(request(model=one), timeout=60) for one in expected}
    with refused(status, name, os.strerror(number)):
        calls.pop(name).result()
    assert all(list(call.result().outputs[0].token_ids) == expected[one] for one, call in calls.items())
    disk.broken, disk.number = "", errno.EIO
    assert ask(served, name) == expected[name]


def test_files_that_are_gone_are_not_found_by_name(served: Served, library: Path, expected: dict[str, list[int]]):
    name = one_on_disk(served)
    shutil.move(library / name, library.parent / "away")
    with refused(grpc.StatusCode.NOT_FOUND, repr(name), "gone from the disk"):
        ask(served, name)
    assert ask(served, "", prompt=(4, 5))
    shutil.move(library.parent / "away", library / name)
    port.look(served.replica)  # its watch may have looked meanwhile, and forgotten the adapter
    assert ask(served, name) == expected[name]


def test_files_that_are_touched_without_a_change_are_read_and_the_adapter_may_leave_memory(
    served: Served, library: Path, expected: dict[str, list[int]]
):
    ask(served, "a3")
    config = library / "a3" / "adapter_config.json"
    config.touch()
    port.look(served.replica)
    push_out(served, "a3")
    assert ask(served, "a3") == expected["a3"]
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="a3"))
    port.look(served.replica)
    with refused(grpc.StatusCode.NOT_FOUND, "'a3'"):  # unloaded by hand: it comes back when its files change
        ask(served, "a3")
    config.touch()
    port.look(served.replica)
    assert tier(served, "a3") == "DISK" and ask(served, "a3") == expected["a3"]


def test_changed_files_keep_no_more_than_their_share_of_memory(
    served: Served, library: Path, expected: dict[str, list[int]]
):
    ask(served, "a5")
    weights = library / "a5" / "adapter_model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    port.look(served.replica)
    assert ask(served, "a5") == expected["a5"]  # from memory
    push_out(served, "a5")  # it takes two blocks of six, and a quarter may be kept
    with refused(grpc.StatusCode.DATA_LOSS, "'a5'", "changed on the disk"):
        ask(served, "a5")
    assert ask(served, "a6") == expected["a6"]
    weights.write_bytes(kept)
    port.look(served.replica)
    assert ask(served, "a5") == expected["a5"]


def test_the_directory_is_watched(served: Served, library: Path, expected: dict[str, list[int]]):
    misnamed = library / os.fsdecode(b"a\xff")  # before "new", and no name for an adapter
    shutil.copytree(library / "a4", misnamed)
    shutil.copytree(library / "a4", library / "new")
    whole = (library / "new" / "adapter_model.safetensors").read_bytes()
    (library / "new" / "adapter_model.safetensors").write_bytes(whole[:-8])  # it is still being copied
    port.look(served.replica)
    with refused(grpc.StatusCode.NOT_FOUND, "'new'"):
        ask(served, "new")
    (library / "new" / "adapter_model.safetensors").write_bytes(whole)
    port.look(served.replica)
    before = served.adapters.GetAdapter(pb.GetAdapterRequest(name="new"))
    assert (Tier.Name(before.tier), before.digest) == ("DISK", "")
    shutil.copyfile(library / "a6" / "adapter_model.safetensors", library / "new" / "adapter_model.safetensors")
    port.look(served.replica)  # never read so far: the change is a new version
    assert served.adapters.GetAdapter(pb.GetAdapterRequest(name="new")).uid > before.uid
    assert ask(served, "new") == expected["a6"]
    assert served.adapters.GetAdapter(pb.GetAdapterRequest(name="new")).digest
    push_out(served, "new")
    shutil.rmtree(misnamed)
    shutil.rmtree(library / "new")
    port.look(served.replica)
    with refused(grpc.StatusCode.NOT_FOUND, "'new'"):
        served.adapters.GetAdapter(pb.GetAdapterRequest(name="new"))


def test_a_disk_that_does_not_show_the_files_for_a_while_forgets_no_digest(
    served: Served, library: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]]
):
    ask(served, "a5")  # pins its digest
    push_out(served, "a5")
    before = served.adapters.GetAdapter(pb.GetAdapterRequest(name="a5"))

    def stale(directory: str, names: object) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(disk, "stamp", stale)
        port.look(served.replica)
    away = library.rename(library.parent / "unmounted")
    library.mkdir()
    port.look(served.replica)
    library.rmdir()
    port.look(served.replica)
    away.rename(library)
    port.look(served.replica)
    after = served.adapters.GetAdapter(pb.GetAdapterRequest(name="a5"))
    assert (after.uid, after.digest) == (before.uid, before.digest) and before.digest
    assert ask(served, "a5") == expected["a5"]


def test_a_lazy_load_checks_the_files_and_leaves_them_on_the_disk(
    served: Served, library: Path, expected: dict[str, list[int]]
):
    lazy = pb.LoadAdapterRequest(name="lazy", path=str(library / "a5"), lazy=True)
    info = served.adapters.LoadAdapter(lazy)
    assert (Tier.Name(info.tier), len(info.digest)) == ("DISK", 64)
    assert ask(served, "lazy") == expected["a5"]
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="lazy"))
    body = json.dumps({"lora_name": "lazy", "lora_path": str(library / "a5"), "lazy": True}).encode()
    post = urllib.request.Request(f"{served.http}/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=20) as answer:
        assert json.load(answer)["adapter"]["adapter"]["tier"] == "DISK"
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="lazy"))
    lazy.pinned = True
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "lazy", "pinned"):
        served.adapters.LoadAdapter(lazy)


def test_pins_and_hints_reach_down_to_the_disk(served: Served):
    name = one_on_disk(served)
    pinned = served.adapters.PinAdapter(pb.PinAdapterRequest(name=name, pinned=True), timeout=20)
    assert Tier.Name(pinned.tier) == "HBM" and pinned.pinned
    served.adapters.PinAdapter(pb.PinAdapterRequest(name=name, pinned=False))
    other = one_on_disk(served, name)
    hint = served.inference.Prefetch(request(model=other))
    assert not hint.adapter_resident and hint.coming_bytes > 0
    wait_until(lambda: tier(served, other) in ("HBM", "HOST"))


def test_a_pin_that_waits_for_the_disk_pins_what_its_name_means_then(
    served: Served, disk: Disk, library: Path, expected: dict[str, list[int]]
):
    def load(source: str, **fields: Any) -> None:
        path = str(library / source)
        served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="other", path=path, lazy=True, **fields))

    load("a5")
    disk.shut("a5")
    pins = [served.adapters.PinAdapter.future(pb.PinAdapterRequest(name="other", pinned=True)) for _ in range(2)]
    wait_until(lambda: tier(served, "other") == "LOADING")
    load("a6", replace=True)
    disk.shut(None)
    assert {Tier.Name(pin.result(20).tier) for pin in pins} == {"HBM"}
    assert ask(served, "other") == expected["a6"]
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="other"))


def test_an_unpin_ends_a_pin_that_waits_for_the_disk(served: Served, disk: Disk):
    name = one_on_disk(served)
    disk.shut(name)
    pin = served.adapters.PinAdapter.future(pb.PinAdapterRequest(name=name, pinned=True))
    wait_until(lambda: tier(served, name) == "LOADING")
    asked = served.inference.Generate.future(request(model=name), timeout=60)  # so that it is read all the same
    wait_until(lambda: served.stats().live_requests == 1)
    # It waits for no disk.
    assert not served.adapters.PinAdapter(pb.PinAdapterRequest(name=name, pinned=False), timeout=20).pinned
    with refused(grpc.StatusCode.FAILED_PRECONDITION, repr(name), "unpinned"):
        pin.result(20)
    disk.shut(None)
    assert asked.result(60).outputs
    assert not served.adapters.GetAdapter(pb.GetAdapterRequest(name=name)).pinned


def test_a_request_waits_while_nothing_may_leave_the_host_tier(
    served: Served, disk: Disk, expected: dict[str, list[int]]
):
    manager = port.parts(served.replica).scheduler.manager
    name = one_on_disk(served)
    held = served.replica.between_steps(lambda: manager.reserve(manager.host.total - manager.host.adapters)).result(20)
    backed = [node for node in manager.adapters.values() if node.backed]
    for node in backed:
        served.replica.between_steps(lambda node=node: manager.back(node, False)).result(20)
    waiting = served.inference.Generate.future(request(model=name), timeout=60)
    wait_until(lambda: tier(served, name) == "LOADING")
    assert ask(served, "", prompt=(3, 3))
    assert not waiting.done()
    for node in backed:
        served.replica.between_steps(lambda node=node: manager.back(node, True)).result(20)
    assert held is not None
    served.replica.between_steps(lambda: manager.cancel(held)).result(20)
    assert list(waiting.result().outputs[0].token_ids) == expected[name]
