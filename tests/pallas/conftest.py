"""Where the compilers are required, a skipped compile test is a failed one."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    compiles = item.get_closest_marker("aot_tpu") or item.get_closest_marker("aot_cuda")
    if report.skipped and compiles and os.environ.get("JLORA_AOT") == "required":
        report.outcome = "failed"
        report.longrepr = f"skipped, and JLORA_AOT=required: {report.longrepr}"
    return report
