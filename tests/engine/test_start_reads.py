"""The adapters that a server reads before it serves anybody: several at a time, in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jlora import config, machine
from jlora.adapters.catalogue import Catalogue, Row
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.policies import Jlora
from jlora.cache.transfer import Meter
from jlora.cache.tree import AdapterNode
from jlora.engine import loading, sources
from jlora.engine.records import NewAdapter, of_files, row_of
from jlora.engine.sources import Reader, read_adapter, scan_adapter
from jlora.errors import DataLoss, ResourceExhausted
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


def find(library: Sequence[NewAdapter], blocks: int, **keys: Any) -> list[str]:
    """The names that a start finds whose pool has so many blocks, and that knows the library from an earlier start."""
    smaller = reader(DiskFiles())
    smaller = replace(smaller, layout=replace(smaller.layout, blocks=blocks))
    catalogue = Catalogue("", OsThreads(), smaller.fits)
    rows = [
        row_of(of_files(new, AdapterNode(uid, new.blocks), 0.0), smaller.fits, 0.0)
        for uid, new in enumerate(library, 1)
    ]
    catalogue.put(rows).result()
    settings = config.load(None, {f"adapters.{key}": value for key, value in keys.items()})
    found = sources.find(settings, smaller, catalogue, progress=False)
    catalogue.close()
    return [item.name for item in found]


def test_one_that_this_pool_can_never_hold_is_left_out_alone(library: list[NewAdapter], tmp_path: Path):
    _make.make_adapter(tmp_path / "large", SPEC, r=64)
    large = scan_adapter("large", str(tmp_path / "large"), reader(DiskFiles()))
    blocks = max(new.blocks for new in library) + 2
    assert large.blocks >= blocks
    assert find([*library, large], blocks) == NAMES, "those that were loaded at run time"
    assert find([*library, large], blocks, dir=str(tmp_path), lazy=True) == NAMES
    with pytest.raises(ResourceExhausted, match="adapter large: "):
        find([*library, large], blocks, dir=str(tmp_path))


def test_one_that_the_host_tier_cannot_hold_is_left_out_where_it_is_not_required(
    library: list[NewAdapter], caplog: pytest.LogCaptureFixture
):
    large = replace(library[1], projections=("q",) * 9, name="large")
    assert [item.name for item in sources.held([library[0], large], 8, ())] == ["a0"]
    assert "'large' is left out: it needs 9 blocks, and the host tier has 8" in caplog.text
    assert [item.name for item in sources.held([library[0], large], 8, {"large"})] == ["a0", "large"]


def test_the_time_of_a_read_has_no_wait_for_memory(library: list[NewAdapter]):
    """It would count as a slow disk."""
    now, memory = [0.0], Memory(lambda: UNLIMITED)

    @contextmanager
    def waits(need: int, what: str, wait_s: float) -> Iterator[None]:
        now[0] += 25.0
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "promised", waits)
        new = read_adapter("a0", library[0].path, replace(reader(DiskFiles()), clock=lambda: now[0], memory=memory))
    assert new.read_s == 0.0 and now == [25.0]


def spoil(adapter: NewAdapter) -> None:
    file = next(Path(adapter.path).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def test_a_start_writes_new_adapters_down_together(
    library: list[NewAdapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each transaction waits for the disk: ten thousand of them would keep a start's writer busy for many seconds."""
    catalogue, written = Catalogue(str(tmp_path / "a.db"), OsThreads()), list[int]()
    put = catalogue.put

    def counted(rows: Sequence[Row]) -> Future[None]:
        written.append(len(rows))
        return put(rows)

    monkeypatch.setattr(catalogue, "put", counted)
    manager = CacheManager(Sizes(63, 64, 16), Jlora(Meter(1e-3)), lambda: 0.0)
    parts: Any = SimpleNamespace(
        scheduler=SimpleNamespace(manager=manager), registry=AdapterRegistry(), swapper=None, clock=lambda: 0.0,
        readers=2, catalogue=catalogue, wall=lambda: 1.0,
    )  # fmt: skip
    loading.Adapters(parts).begin_with(library)
    catalogue.close()
    assert written == [len(NAMES)]
    again = Catalogue(str(tmp_path / "a.db"), OsThreads())
    assert [row.name for row in again.rows()] == NAMES
    again.close()
