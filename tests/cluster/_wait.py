"""Waiting for states, and processes that must be gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 280.0  # a test has a limit of 600


def until(true: Callable[[], bool], what: str) -> None:
    """Waits until `true()`; fails after a long time."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
