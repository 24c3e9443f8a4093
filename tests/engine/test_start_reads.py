"""The adapters that a server reads before it serves anybody: several at a time, in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jlora import config, machine
from jlora.adapters.catalogue import Row
from jlora.cache.tree import AdapterNode
from jlora.engine.records import NewAdapter, of_files, row_of
from jlora.engine.sources import Reader, scan_adapter
from jlora.errors import DataLoss
from jlora.layout import PoolLayout
from jlora.machine import UNLIMITED
from jlora.memory import Memory
from jlora.ports import DiskFiles, DiskFolder, Files, OsThreads
from tests import _make, port

SPEC = _make.tiny_spec()
READERS = 3
NAMES = [f"a{i}" for i in range(2 * READERS)]


class Met(DiskFiles):
    """The disk, where a read goes on when `READERS` of them are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.meeting, self.lock = threading.Barrier(READERS), threading.Lock()

    @contextmanager
    def folder(self, directory: str) -> Iterator[DiskFolder]:
        with self.lock:
            self.begun += 1
        self.meeting.wait(20)
        with super().folder(directory) as folder:
            yield folder


@dataclass
class Engine:
    """What the host tier gets, and how many were read or being read when each came."""

    files: Met
    names: list[str] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)

    def read_in(self, new: NewAdapter, pinned: bool) -> None:
        assert new.data is not None
        self.ahead.append(self.files.begun - len(self.names))
        self.names.append(new.name)
        self.pinned += [new.name] * pinned


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[NewAdapter]:
    """The adapters, found and not read."""
    monkeypatch.setattr(machine, "threads", lambda: 2)
    for seed, name in enumerate(NAMES):
        _make.make_adapter(tmp_path / name, SPEC, seed)
    return [scan_adapter(name, str(tmp_path / name), reader(DiskFiles())) for name in NAMES]


def reader(files: Files, spare: int = UNLIMITED) -> Reader:
    layout = PoolLayout.of(SPEC, 64, 16)
    return Reader(SPEC, layout, 64, (SPEC.name,), files, lambda: 0.0, memory=Memory(lambda: spare))


def read_in(found: Sequence[Row | NewAdapter], spare: int = UNLIMITED, **paths: str) -> Engine:
    files = Met()
    engine, keys = Engine(files), {f"adapters.paths.{name}": path for name, path in paths.items()}
    read: Any = getattr(*port.adapters_read_at_start())
    settings = config.load(None, {"adapters.readers": READERS, **keys})
    read(SimpleNamespace(adapters=engine), found, reader(files, spare), settings, OsThreads())
    return engine


def test_they_are_read_at_the_same_time_and_come_in_order(library: list[NewAdapter]):
    engine = read_in(library)
    assert engine.names == NAMES
    assert max(engine.ahead) <= READERS  # of hundreds, memory holds these only


def test_one_that_cannot_be_read_changes_nothing_for_the_others(
    library: list[NewAdapter], caplog: pytest.LogCaptureFixture
):
    spoil(library[1])
    library[4] = replace(library[4], digest="of an earlier version")
    pinned = row_of(of_files(library[2], AdapterNode(1, library[2].blocks), 0.0), "", 0.0)
    engine = read_in([*library[:2], replace(pinned, pinned=True), *library[3:]])
    assert engine.pinned == ["a2"]
    assert engine.names == [name for name in NAMES if name not in ("a1", "a4")]
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2 and "a1 stays on the disk" in said[0] and "'a4'" in said[1]


def test_one_without_which_no_server_starts_ends_the_start(library: list[NewAdapter]):
    spoil(library[0])
    with pytest.raises(DataLoss, match=rf"^adapter a0: .* \(from {library[0].path}\)$"):
        read_in(library, a0=library[0].path)
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("jlora-start")}


def test_adapters_that_memory_does_not_hold_stay_on_the_disk_also_where_they_are_required(
    library: list[NewAdapter], caplog: pytest.LogCaptureFixture
):
    assert read_in(library, spare=0, a0=library[0].path).names == []
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in said if "stays on the disk until a request needs it" in line] == NAMES


def spoil(adapter: NewAdapter) -> None:
    file = next(Path(adapter.path).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
