"""docs/reliability.md names tests and studies that exist, has every fault of the list, and counts as the records do.

The files of tests that docs/cluster.md names exist, too.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

from benchmarks.__main__ import STUDIES
from benchmarks.faults.study import KNOWN

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def names(path: Path) -> set[str]:
    """The tests of a file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    missing = [f"{file}::{test}" for file, test in named if test not in names(ROOT / file)]
    assert len(named) > 40 and not missing, missing


def test_every_study_that_the_page_names_exists():
    assert set(re.findall(r"`jlora bench ([a-z-]+)", PAGE)) <= STUDIES.keys()


def test_every_fault_has_a_row_that_names_what_injects_it():
    rows = {row[0]: row for row in re.findall(r"^\| (F\d+) \|(.*)$", PAGE, re.MULTILINE)}
    assert list(rows) == [f"F{i}" for i in range(1, 20)]
    assert all("::" in row or "jlora " in row for _, row in rows.values())
    assert {fault.partition("-")[0] for fault in KNOWN} <= set(rows)


def test_every_file_of_tests_that_the_failures_of_a_service_name_exists():
    page = (ROOT / "docs" / "cluster.md").read_text()
    named = set(re.findall(r"\btest_\w+\.py\b", page))
    missing = named - {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(named) > 5 and not missing, missing


def test_the_seeds_that_were_played_are_those_of_the_record():
    played: Counter[str] = Counter()
    for line in (ROOT / "docs" / "results" / "seeds-modelled.jsonl").read_text().splitlines():
        played[json.loads(line)["world"]] += json.loads(line)["seeds"]
    one, many = f"{played['engine']:,}", f"{played['cluster']:,}"
    assert f"{one} of one replica and {many} of many were played" in (ROOT / "docs" / "simulated-faults.md").read_text()
    assert f"[{one} and {many}](simulated-faults.md#what-was-played-and-found) were played" in PAGE
