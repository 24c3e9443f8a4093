"""A killed process leaves its folder, and the next start removes it; what a living process holds stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from jlora.cluster import scratch
from jlora.cluster.scratch import Scratch

HOLD = "from jlora.cluster.scratch import Scratch; made = Scratch(); print(made.path, flush=True); input()"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a folder that is not new."""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        (path / "token").write_text("secret")
        os.utime(path, (0, 0))
        yield process, path
        process.kill()


def test_a_folder_is_the_owners_own_and_ends_with_its_start(temporary: Path):
    with closing(Scratch()) as one, closing(Scratch()) as two:
        assert one.path != two.path and one.path.stat().st_mode & 0o077 == 0
        scratch.sweep()
        assert {one.path, two.path} == set(temporary.iterdir())
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_process_goes_with_the_next_start(other: tuple[subprocess.Popen[str], Path]):
    process, path = other
    with closing(Scratch()):
        assert (path / "token").exists(), "its process lives"
    process.kill()
    process.wait()
    with closing(Scratch()):
        assert not path.exists()


def test_what_is_new_or_foreign_stays(temporary: Path):
    new, foreign = temporary / f"{scratch.PREFIX}new", temporary / "another"
    for folder in (new, foreign):
        folder.mkdir()
    os.utime(foreign, (0, 0))
    (temporary / f"{scratch.PREFIX}file").write_text("no folder")
    os.utime(temporary / f"{scratch.PREFIX}file", (0, 0))
    with closing(Scratch()):
        assert new.exists() and foreign.exists()
