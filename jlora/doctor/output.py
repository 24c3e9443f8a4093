"""Where results go. No jax."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jlora.errors import FailedPrecondition


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written in here is one clear line: a FailedPrecondition."""
    try:
        yield
    except OSError as e:
        raise FailedPrecondition(f"{path}: cannot be written ({e.strerror or e})") from e


def ready(folder: Path) -> None:
    """Makes the folder and tries it, before a measurement that it could lose. Raises FailedPrecondition."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def write(path: Path, text: str) -> Path:
    """A reader never sees half of a file. Raises FailedPrecondition."""
    partial = path.with_suffix(".partial")
    with writing(path):
        partial.write_text(text)
        return partial.replace(path)
