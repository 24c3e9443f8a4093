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


@pytest.mark.parametrize("answer", ["", "Traceback", "{}"])
def test_no_answer_is_told(answer: str):
    code, said = verdict(answer)
    assert code == 0 and said.startswith(SKIPPED)
