"""Where the compilers are required, a skipped compile test is a failed one; what was compiled is listed at the end."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

HEAD = ("program", "chip", "devices", "compile s", "in place MiB", "temp MiB", "VMEM MiB")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    compiles = item.get_closest_marker("aot_tpu") or item.get_closest_marker("aot_cuda")
    if report.skipped and compiles and os.environ.get("JLORA_AOT") == "required":
        report.outcome = "failed"
        report.longrepr = f"skipped, and JLORA_AOT=required: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A table of what was compiled ahead of time and passed: per device, one line for equal programs."""
    passed = terminalreporter.stats.get("passed", [])
    rows = [tuple(value) for report in passed for key, value in report.user_properties if key == "compiled"]
    if not rows:
        return
    terminalreporter.section("compiled ahead of time")
    terminalreporter.write_line("| " + " | ".join(HEAD) + " |")
    terminalreporter.write_line("|" + "---|" * len(HEAD))
    for row in sorted(set(rows)):
        terminalreporter.write_line("| " + " | ".join(row) + " |")
