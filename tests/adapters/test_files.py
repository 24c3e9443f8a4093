"""Files that change while an adapter is read: one version is read, whole, or none."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jlora.adapters.peft import ATTEMPTS, CONFIG, WEIGHTS, read_peft
from jlora.engine.sources import Reader, read_adapter, scan_adapter
from jlora.errors import DataLoss, JloraError, NotFound
from jlora.layout import PoolLayout
from jlora.memory import Memory
from jlora.ports import DiskFile, DiskFiles, DiskFolder
from tests import _make
from tests.adapters._peft import SPEC, read


def test_a_scan_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, found = _make.make_adapter(tmp_path / "a", SPEC, r=8), list[int]()
    reader = Reader(SPEC, PoolLayout.of(SPEC, 64, 16), 64, ("tiny",), DiskFiles(), time.monotonic)
    read = DiskFile.read

    def counted(file: DiskFile, size: int) -> np.ndarray:
        data = read(file, size)
        found.append(len(data))
        return data

    monkeypatch.setattr(DiskFile, "read", counted)
    assert scan_adapter("a", str(path), reader).blocks > 0
    weights = (path / WEIGHTS).read_bytes()
    header = int.from_bytes(weights[:8], "little")
    assert sum(found) == (path / CONFIG).stat().st_size + 8 + header < len(weights)


def test_what_the_memory_does_not_hold_is_not_read(tmp_path: Path):
    """It is scanned all the same, and is read once there is memory."""
    path, left = str(_make.make_adapter(tmp_path / "a", SPEC, r=8)), [0]
    layout = PoolLayout.of(SPEC, 64, 16)
    reader = Reader(SPEC, layout, 64, ("tiny",), DiskFiles(), time.monotonic, memory=Memory(lambda: left[0]))
    blocks = scan_adapter("a", path, reader).blocks
    with pytest.raises(MemoryError, match="a: reading it takes up to .* MiB, and 0 are left"):
        read_adapter("a", path, reader)
    left[0] = 10 * blocks * layout.block_bytes
    assert read_adapter("a", path, reader).blocks == blocks


class Changing(DiskFiles):
    """A disk on which something happens between the reading of the two files, at most `times` times."""

    def __init__(self, change: Callable[[], object], times: int = 1):
        super().__init__()
        self.change, self.times, self.opened = change, times, 0

    @contextmanager
    def folder(self, directory: str) -> Iterator[DiskFolder]:
        self.opened += 1
        with super().folder(directory) as folder:
            read = folder.open

            @contextmanager
            def changed_before(name: str) -> Iterator[DiskFile]:
                if name == WEIGHTS and self.times:
                    self.times -= 1
                    self.change()
                with read(name) as file:
                    yield file

            folder.open = changed_before  # type: ignore[method-assign]
            yield folder


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Two versions that differ in alpha and weights, so that each config fits the other's weights."""
    return [_make.make_adapter(tmp_path / f"v{i}", SPEC, seed=i, lora_alpha=8 * i) for i in (1, 2)]


def flip(link: Path, target: Path) -> None:
    """Lets a link point elsewhere, atomically."""
    new = link.with_name(f"{link.name}.new")
    new.symlink_to(target)
    new.replace(link)


def linked(directory: Path, through: str) -> Path:
    """A directory whose files are links, as in the hub's cache and in Kubernetes' volumes."""
    directory.mkdir()
    for name in (CONFIG, WEIGHTS):
        (directory / name).symlink_to(f"{through}/{name}")
    return directory


def test_a_directory_that_another_replaces_is_read_to_its_end(tmp_path: Path, versions: list[Path]):
    first, second = (read(path).digest for path in versions)
    live = tmp_path / "live"
    for path in (live, linked(tmp_path / "linked", "../live")):
        live.symlink_to(versions[0])
        disk = Changing(lambda: flip(live, versions[1]))
        assert read_peft(path, SPEC, 64, files=disk).digest == first and disk.opened == 1
        assert read(path).digest == second
        live.unlink()

    def swap() -> None:
        versions[0].rename(tmp_path / "old")
        versions[1].rename(versions[0])

    assert read_peft(versions[0], SPEC, 64, files=Changing(swap)).digest == first
    assert read(versions[0]).digest == second


@pytest.mark.parametrize("how", ["one file after the other", "in place", "links", "removed"])
def test_files_that_change_between_the_reads_are_read_again(tmp_path: Path, versions: list[Path], how: str):
    path, other = versions
    if how == "links":
        path = linked(tmp_path / "live", "../v1")

    def change() -> None:
        if how == "links":
            for name in (WEIGHTS, CONFIG):
                flip(path / name, other / name)
        elif how == "removed":
            path.rename(tmp_path / "old")
            shutil.copytree(other, path)
            shutil.rmtree(tmp_path / "old")
        else:
            for name in (WEIGHTS, CONFIG):
                if how == "in place":
                    (path / name).write_bytes((other / name).read_bytes())
                else:
                    shutil.copy(other / name, path / "new").replace(path / name)

    disk = Changing(change)
    assert read_peft(path, SPEC, 64, files=disk).digest == read(other).digest
    assert disk.opened == 2


def test_files_that_change_at_every_attempt_are_refused(tmp_path: Path, versions: list[Path]):
    disk = Changing(lambda: (versions[0] / CONFIG).touch(), times=99)
    with pytest.raises(DataLoss, match=r"v1.*change while they are read.*rename"):
        read_peft(versions[0], SPEC, 64, files=disk)
    assert disk.opened == ATTEMPTS


@pytest.mark.parametrize("layout", ["directory", "links"])
def test_no_load_mixes_two_versions_that_are_swapped_all_the_time(tmp_path: Path, versions: list[Path], layout: str):
    digests = {read(path).digest for path in versions}
    link = tmp_path / "live"
    link.symlink_to(versions[0])
    path = link if layout == "directory" else linked(tmp_path / "linked", "../live")
    over, flips = threading.Event(), 0
    seen: list[str] = []

    def swap() -> None:
        nonlocal flips
        while not over.is_set():
            flip(link, versions[flips % 2])
            flips += 1

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        while len(seen) < 500 or flips < 500:
            seen.append(read(path).digest)
    finally:
        over.set()
        swapper.join()
    assert set(seen) == digests


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_takes_a_files_place_is_not_waited_for(tmp_path: Path, versions: list[Path], name: str):
    """A FIFO, a socket and a directory between the look and the opening; eight of them used to end all loads."""
    path = versions[0]

    def fifo() -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    outcomes: list[type[JloraError] | None] = []

    def load() -> None:
        try:
            read_peft(path, SPEC, 64, files=Changing(fifo) if name == WEIGHTS else DiskFiles())
        except JloraError as e:
            outcomes.append(type(e))

    if name == CONFIG:
        fifo()
    threads = [threading.Thread(target=load, daemon=True) for _ in range(8 if name == CONFIG else 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(outcomes) == {NotFound} and len(outcomes) == len(threads)


def test_links_to_files_are_followed_and_open_files_do_not_add_up(tmp_path: Path, versions: list[Path]):
    path = linked(tmp_path / "snapshot", "../v1")  # as the hub's cache keeps files
    before = len(os.listdir("/proc/self/fd"))
    assert read(path).digest == read(versions[0]).digest
    for _ in range(50):
        with pytest.raises(NotFound):
            read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
