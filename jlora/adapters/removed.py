"""Whether an adapter was removed from the disk, or the disk only does not show it now."""

from __future__ import annotations

import os

from jlora.adapters.peft import FILES
from jlora.ports import Files


def is_gone(path: str, files: Files) -> bool:
    """Whether one of an adapter's files is gone. One that cannot be looked at now is not."""
    try:
        files.stamp(path, FILES)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def is_removed(path: str, files: Files) -> bool:
    """Whether an adapter is gone for good, so that it can be forgotten.

    It is not as long as its directory's parent is missing or empty: a disk that is not mounted leaves that behind.
    """
    if not is_gone(path, files):
        return False
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return any(True for _ in entries)
    except OSError:
        return False
