"""What a process holds, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path


def rss(pid: int) -> int:
    """Bytes of resident memory. Raises OSError if the process has ended."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
