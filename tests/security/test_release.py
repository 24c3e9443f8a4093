"""A release is built of a commit, and of nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import release


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One commit of a package."""
    (tmp_path / "jlora").mkdir()
    for name in ("pyproject.toml", "jlora/a.py", "notes.md"):
        (tmp_path / name).write_text("as committed\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "One")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("name", ["jlora/a.py", "notes.md", "jlora/new.py"])
def test_a_checkout_that_is_not_its_commit_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
):
    monkeypatch.setattr(release, "wheel", lambda *_: pytest.fail("it is built"))
    (checkout / name).write_text("changed\n")
    assert release.main() == 1
    assert name in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_a_wheel_does_not_have_is_nobodys_affair(checkout: Path):
    (checkout / "scratch.txt").write_text("not in a wheel\n")
    assert release.changed() == "" and int(release.stamp()) > 1e9


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_checkout_at_which_git_does_not_look_is_not_built(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    """As one of another user: what it has changed would go out as the commit."""
    monkeypatch.setattr(release, "wheel", lambda *_: pytest.fail("it is built"))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    with pytest.raises(SystemExit, match="release: git status: .*dubious ownership"):
        release.main()
    monkeypatch.setenv("PATH", str(checkout))
    with pytest.raises(SystemExit, match="release: git status: No such file"):
        release.main()


def test_without_git_a_source_tree_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "7")
    assert release.changed() == "" and release.stamp() == "7"
