"""Looks at processes from outside: memory, threads and descriptors, as Linux tells them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.soak.verdict import Sample


def look(at_s: float, processes: Mapping[str, int]) -> list[Sample]:
    """A sample of each process, by name. Raises OSError if one has ended."""
    return [_sample(at_s, name, pid) for name, pid in processes.items()]


def _sample(at_s: float, name: str, pid: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()

    def number(key: str) -> int:
        found = re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE)
        assert found, f"{name}: {key} is missing"
        return int(found[1])

    rss, anon = number("VmRSS") / 1024, number("RssAnon") / 1024
    return Sample(at_s, name, rss, anon, number("Threads"), len(os.listdir(f"/proc/{pid}/fd")))
