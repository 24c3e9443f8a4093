"""An audit says what it has checked: an answer about no package is no clean bill."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.audit import SKIPPED, verdict

CLEAN = {"name": "jinja2", "version": "3.1.6", "vulns": []}
BAD = {"name": "h11", "version": "0.1", "vulns": [{"id": "CVE-2025-43859"}]}
UNKNOWN = {"name": "numpy", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([CLEAN], 0, "1 packages checked; no known vulnerability"),
        ([CLEAN, BAD], 1, "2 packages checked; h11 0.1: CVE-2025-43859"),
        ([BAD, UNKNOWN], 1, "1 packages checked, 1 not known to the service; h11 0.1: CVE-2025-43859"),
        ([UNKNOWN, UNKNOWN], 0, f"{SKIPPED}: the vulnerability service knows none of 2 packages"),
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
    assert code == 0 and said.startswith(SKIPPED)


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
