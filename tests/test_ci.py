"""The time that continuous integration has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_test_that_begins_too_late_is_left_out_and_counted():
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/test_machine.py"],
        cwd=ROOT,
        env=os.environ | {"JLORA_TESTS_UNTIL": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"SKIPPED \[\d+\] .*: no time left", ran.stdout)
    assert "passed" not in ran.stdout


def test_the_quick_tests_the_oracle_the_compilers_and_ray_are_never_left_out():
    always, _, late = (ROOT / ".ci" / "run").read_text().partition("export JLORA_TESTS_UNTIL")
    assert late and all(what in always for what in ("make test ", "tests/oracle", "JLORA_AOT=required"))
    found = re.search(r"printf '(tests/cluster/test_%s.py) ' ([\w ]+)\)", always)
    assert found and {"ray", "routers", "memory", "last_holder", "service_end"} <= set(found[2].split())
    assert all((ROOT / found[1].replace("%s", name)).is_file() for name in found[2].split())
