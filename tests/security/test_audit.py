"""An audit says what it has checked: an answer about no package is no clean bill, and has an exit code of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.audit import NOT_AUDITED, verdict
from tools.lock import PYTHONS, ROOT, path_of

CLEAN = {"name": "jinja2", "version": "3.1.6", "vulns": []}
BAD = {"name": "h11", "version": "0.1", "vulns": [{"id": "CVE-2025-43859"}]}
UNKNOWN = {"name": "numpy", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([CLEAN], 0, "1 packages checked; no known vulnerability"),
        ([CLEAN, BAD], 1, "2 packages checked; h11 0.1: CVE-2025-43859"),
        ([BAD, UNKNOWN], 1, "1 packages checked, 1 not known to the service; h11 0.1: CVE-2025-43859"),
        ([UNKNOWN, UNKNOWN], NOT_AUDITED, "NOT AUDITED: the vulnerability service knows none of 2 packages"),
    ],
)
def test_what_is_said_of_a_lock_file(found: list[dict[str, Any]], code: int, said: str):
    assert verdict(json.dumps({"dependencies": found, "fixes": []})) == (code, said)


@pytest.mark.parametrize(
    "complaint",
    [
        "ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed\n"
        "ERROR:pip_audit._cli:Tip: your network may be blocking this service. Try another service with `-s SERVICE`\n",
        'Traceback (most recent call last):\n  File "pypi.py"\nrequests.exceptions.ConnectionError: '
        "HTTPSConnectionPool(host='127.0.0.1', port=9): Max retries exceeded\n",
    ],
)
def test_a_service_that_cannot_be_reached_is_told(complaint: str):
    code, said = verdict("", complaint)
    assert code == NOT_AUDITED and said.startswith("NOT AUDITED: ")


@pytest.mark.parametrize(
    ("answer", "complaint", "said"),
    [
        ("", "Traceback (most recent call last):\n  File \"connect.py\"\nKeyError: 'version'\n", "KeyError: 'version'"),
        ("", "ERROR:pip_audit._cli:disconnected: no such option\n", "no such option"),
        ("", "python: No module named pip_audit\n", "No module named pip_audit"),
        ("{}", "", "it says nothing"),
        ("Traceback", "", "it says nothing"),
    ],
)
def test_a_crash_of_the_audit_is_no_missing_answer(answer: str, complaint: str, said: str):
    code, line = verdict(answer, complaint)
    assert code == 1 and line.startswith("FAILED") and said in line


# In place of pip-audit: asks an index, which is a JSON file: package -> vulnerabilities. No file: not reached.
STAND_IN = """
import json, os, pathlib, re, sys
lock = pathlib.Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text()
index = pathlib.Path(os.environ["INDEX"])
if not index.exists():
    sys.exit("ERROR:pip_audit._cli:Could not connect to the vulnerability feed")
known = json.loads(index.read_text())
rows = []
for name, version in re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock, re.MULTILINE):
    row = {"vulns": [{"id": one} for one in known[name]]} if name in known else {"skip_reason": "not found"}
    rows.append({"name": name, "version": version, **row})
print(json.dumps({"dependencies": rows, "fixes": []}))
"""


@pytest.mark.parametrize(
    ("index", "code", "says"),
    [
        (
            {"numpy": [], "grpcio": []},
            0,
            [r"2 packages checked, \d+ not known to the service; no known vulnerability"] * 3,
        ),
        ({"numpy": [], "grpcio": ["CVE-1"]}, 1, [r"2 packages checked, \d+ not known .*; grpcio \S+: CVE-1"] * 3),
        ({}, NOT_AUDITED, [r"NOT AUDITED: the vulnerability service knows none of \d+ packages"]),
        (None, NOT_AUDITED, ["NOT AUDITED: the vulnerability service cannot be reached"]),
    ],
    ids=["clean", "vulnerable", "of no package", "out of reach"],
)
def test_the_audit_of_all_lock_files_ends_with_what_it_found(
    index: dict[str, list[str]] | None, code: int, says: list[str], tmp_path: Path
):
    (tmp_path / "pip_audit.py").write_text(STAND_IN)
    if index is not None:
        (tmp_path / "index").write_text(json.dumps(index))
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    run = subprocess.run(
        [sys.executable, "-m", "tools.audit"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "INDEX": str(tmp_path / "index")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == code, run.stderr
    lines = run.stdout.splitlines()
    for line, python, said in zip(lines, PYTHONS, says, strict=False):
        assert re.fullmatch(f"audit: {re.escape(str(path_of(python).relative_to(ROOT)))}: {said}", line)
    assert len(lines) == len(says)


@pytest.mark.parametrize("code", [0, 1, 2, NOT_AUDITED])
def test_continuous_integration_goes_on_after_no_answer_and_ends_after_any_other_failure(code: int):
    line = next(one for one in (ROOT / ".ci" / "run").read_text().splitlines() if "tools.audit" in one)
    script = line.replace(".venv/bin/python -m tools.audit", f"(exit {code})")
    assert script != line
    run = subprocess.run(["bash", "-euo", "pipefail", "-c", f"{script}\necho after"], capture_output=True, text=True)
    assert (run.stdout == "after\n") is (code in (0, NOT_AUDITED))
