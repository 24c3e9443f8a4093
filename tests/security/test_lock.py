"""The lock files are in step with pyproject.toml, and every package in them has hashes."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_architecture import ROOT
from tools import lock


@pytest.mark.parametrize("python", lock.PYTHONS)
def test_a_lock_file_is_in_step(python: str):
    text = lock.path_of(python).read_text()
    assert text.startswith(lock.stamp(lock.asked()) + "\n"), "make lock"
    pinned = lock.pinned(text)
    for line in lock.asked():
        wanted = Requirement(line)
        version, _ = pinned[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), f"{wanted}: {version} is pinned"
    assert all(hashes for _, hashes in pinned.values())


@pytest.mark.parametrize("python", lock.PYTHONS)
def test_a_lock_file_has_packages_and_hashes_only(python: str):
    """Nothing names a place to fetch from: one index serves all of it."""
    lines = [line.strip(" \\") for line in lock.path_of(python).read_text().splitlines()[1:]]
    entry = r"[\w.-]+==[\w.+!-]+( ; .+)?|--hash=sha256:[0-9a-f]{64}"
    assert [line for line in lines if not re.fullmatch(entry, line)] == []
    assert "://" not in "".join(lines)


def test_a_changed_dependency_is_found():
    asked = lock.asked()
    assert lock.stamp(asked) == lock.stamp(asked[::-1])
    assert lock.stamp([*asked[1:], f"{asked[0]},!=0"]) != lock.stamp(asked) != lock.stamp(asked[1:])


def test_every_supported_python_has_a_file():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.14"' in project
    assert lock.PYTHONS == ("3.11", "3.12", "3.13")
