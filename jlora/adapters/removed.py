"""Whether an adapter was removed from the disk, or the disk only does not show it now."""

from __future__ import annotations

import os
from collections.abc import Collection

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


def removed(directory: str, paths: Collection[str]) -> set[str]:
    """Those of the known adapters in a directory that were removed from it, and so can be forgotten.

    None if all were: a disk that is not mounted leaves an empty directory. A link is there though its target may be on
    such a disk. One listing decides: between two looks, the disk might come back.
    """
    try:
        there = set(os.listdir(directory))
    except OSError:
        return set()
    known = {path for path in paths if os.path.dirname(path) == directory}
    gone = {path for path in known if os.path.basename(path) not in there}
    return gone if gone < known else set()
