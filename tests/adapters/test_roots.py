"""Adapters are read from `adapters.roots` and nowhere else, whatever names and links lead out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jlora.adapters.peft import CONFIG, WEIGHTS, read_peft
from jlora.config import load
from jlora.errors import ConfigError, InvalidArgument, NotFound
from jlora.ports import DiskFiles
from tests import _make
from tests.adapters._peft import SPEC, read

OUT = "is not in a directory of adapters.roots"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the adapter "in", beside the adapter "out"."""
    _make.make_adapter(tmp_path / "root" / "in", SPEC, seed=1)
    _make.make_adapter(tmp_path / "out", SPEC, seed=2)
    return tmp_path / "root"


def confined(path: Path | str, root: Path) -> str:
    return read_peft(path, SPEC, 64, files=DiskFiles([str(root)])).digest


def test_what_is_below_a_root_is_read_by_every_name(root: Path, monkeypatch: pytest.MonkeyPatch):
    digest = read(root / "in").digest
    (root / "link").symlink_to(root / "in")
    (root.parent / "into").symlink_to(root)
    monkeypatch.chdir(root.parent)
    for path in (root / "in", root / "link", "root/in", "into/in", "out/../root/in"):
        assert confined(path, root) == digest
    assert confined(root / "in", root / "in") == confined(root / "in", root.parent / "into") == digest
    blobs = root / "blobs"
    shutil.copytree(root / "in", blobs)
    (root / "linked").mkdir()
    for name in (CONFIG, WEIGHTS):  # as in the hub's cache
        (root / "linked" / name).symlink_to(f"../blobs/{name}")
    assert confined(root / "linked", root) == digest


def test_what_leads_out_of_the_roots_is_refused(root: Path):
    out = root.parent / "out"
    (root / "link").symlink_to(out)
    for path in (out, root / "link", root / ".." / "out", "/", "/etc", root.parent):
        with pytest.raises(InvalidArgument, match=OUT) as e:
            confined(path, root)
        assert str(root) not in str(e.value) and str(out) not in str(e.value)
    for name in (CONFIG, WEIGHTS):
        shutil.copytree(root / "in", root / "mixed")
        (root / "mixed" / name).unlink()
        (root / "mixed" / name).symlink_to(out / name)
        with pytest.raises(InvalidArgument, match=OUT):
            confined(root / "mixed", root)
        shutil.rmtree(root / "mixed")
    with pytest.raises(NotFound):
        confined(root / "none", root)


def test_no_descriptor_is_left_open(root: Path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(InvalidArgument, match=OUT):
            confined(root.parent / "out", root)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_root_that_is_removed_gives_its_place_to_no_other_directory(root: Path):
    files, place = DiskFiles([str(root)]), os.stat(root)
    shutil.rmtree(root)
    for i in range(100):  # on many file systems the next directory gets the inode of the one removed last
        (other := root.parent / f"other-{i}").mkdir()
        assert (os.stat(other).st_dev, os.stat(other).st_ino) != (place.st_dev, place.st_ino)
    _make.make_adapter(root.parent / "other-0" / "in", SPEC)
    with pytest.raises(InvalidArgument, match=OUT):
        read_peft(root.parent / "other-0" / "in", SPEC, 64, files=files)


def test_a_root_that_is_replaced_at_its_path_is_found(root: Path):
    """As Kubernetes and backups do it: a new directory, or a link that leads elsewhere."""
    link = root.parent / "current"
    link.symlink_to(root)
    files = DiskFiles([str(link)])
    before, open_now = read_peft(root / "in", SPEC, 64, files=files).digest, len(os.listdir("/proc/self/fd"))
    shutil.copytree(root, root.parent / "next")
    (root.parent / "swap").symlink_to("next")
    (root.parent / "swap").rename(link)
    assert read_peft(link / "in", SPEC, 64, files=files).digest == before
    with pytest.raises(InvalidArgument, match=OUT):  # no root any more
        read_peft(root / "in", SPEC, 64, files=files)
    assert len(os.listdir("/proc/self/fd")) == open_now


def test_roots_are_directories_and_paths_of_a_command_line_are_split(root: Path):
    for path in (root / "none", root / "in" / CONFIG, "a\0b"):
        with pytest.raises(ConfigError, match=r"adapters\.roots = "):
            DiskFiles([str(path)])
    assert load(None, {"adapters.roots": "/a:/b"}).adapters.roots == ("/a", "/b")
    assert load({"adapters": {"roots": ["/a:b"]}}).adapters.roots == ("/a:b",)
    with pytest.raises(ConfigError, match=r"adapters\.roots = 3: must be a list of paths"):
        load(None, {"adapters.roots": 3})
