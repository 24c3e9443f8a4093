"""Two commits side by side: neither has an advantage that is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from jlora.cli import main


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit of the two packages."""
    root = tmp_path / "repository"
    for package in ("jlora", "benchmarks"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("x = 1\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    monkeypatch.setattr(compare, "ROOT", root)
    return root


def test_a_checkout_has_bytecode_though_no_process_may_write_it(repository: Path):
    with compare.checkout("HEAD") as tree:
        assert tree != repository
        code = "import jlora, benchmarks; print(*(p.__cached__ for p in (jlora, benchmarks)))"
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
        made = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True)
        cached = [Path(path) for path in made.stdout.split()]
        assert len(cached) == 2 and all(path.is_relative_to(tree) and path.is_file() for path in cached)
    assert not tree.exists()


def test_rounds_of_a_checkout_with_other_changes_are_not_its_own(repository: Path):
    with compare.checkout("HEAD") as tree:
        assert compare.commit(tree) == compare.commit(repository)
    names = [compare.commit(repository)]
    for file in ("__init__.py", "new.py"):
        for text in ("x = 2\n", "x = 3\n"):
            (repository / "jlora" / file).write_text(text)
            names.append(compare.commit(repository))
    assert len(set(names)) == 5 and all(name.startswith(names[0]) for name in names)


def test_no_side_always_runs_behind_the_other(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def measured(options: Any, tree: Path, study: str) -> dict[str, float]:
        ran.append("old" if tree == repository else "new")
        return {"jlora seconds": 1.0}

    monkeypatch.setattr(compare, "measured", measured)
    words = ["compare", str(repository), "HEAD", "--studies", "throughput", "--rounds", "4"]
    assert main(["bench", *words, "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 0
    assert ran == ["old", "new", "new", "old"] * 2
