"""Paths that this user may not look at, also where the tests run as root."""

from __future__ import annotations

import errno
import os
from typing import Any


class Closed:
    """In the place of `os.stat`: fails for what lies in a directory, as for a user who may not enter it."""

    def __init__(self, directory: str):
        self.asked = False
        self._directory = directory
        self._stat = os.stat

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._directory):
            self.asked = True
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return self._stat(path, *args, **kwargs)
