"""docs/security.md names every class of published advisories, and a test that exists for each that is in scope."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.test_architecture import ROOT

ROW = re.compile(r"^\| (C\d+) \|(.*)\|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PAGE = (ROOT / "docs" / "security.md").read_text()


@functools.cache
def known_in(path: str) -> set[str]:
    """The tests of a file; none if there is no such file."""
    file = ROOT / path
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def missing(text: str) -> list[str]:
    return [f"{path}::{name}" for path, name in TEST.findall(text) if name not in known_in(path)]


def test_every_class_has_a_row():
    assert [name for name, _, _ in ROW.findall(PAGE)] == [f"C{i}" for i in range(1, 26)]


@pytest.mark.parametrize(("name", "does", "tests"), ROW.findall(PAGE), ids=[name for name, _, _ in ROW.findall(PAGE)])
def test_a_row_names_tests_that_exist(name: str, does: str, tests: str):
    assert TEST.search(tests), f"{name}: names no test"
    assert missing(tests) == []
    assert len(does.strip()) > 20


def test_a_test_that_is_gone_is_found():
    assert missing("`tests/security/test_page.py::test_no_such_thing`, `tests/no_such.py::test_x`") == [
        "tests/security/test_page.py::test_no_such_thing", "tests/no_such.py::test_x",
    ]  # fmt: skip
