"""Names of adapters and of the base, and the adapters in a directory.

An adapter's name is safe in a file path, a metric label, a log line and in `base:adapter`. The base's
name may also be a hub id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from jlora.errors import ConfigError, InvalidArgument
from jlora.ports import Files

MAX_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_CHARS - 1}}}")
_KEY = re.compile(rf"{_NAME.pattern}@[1-9][0-9]{{0,18}}")  # a version's name at replicas
_RULE = f"letters, digits, '.', '_', '-', starting with a letter or digit, at most {MAX_CHARS}, without '..'"
_BASE = re.compile(r"[^\s:]{1,256}")


def check_name(name: str) -> str:
    """Returns `name` if it is a valid adapter name; otherwise raises InvalidArgument."""
    if not _NAME.fullmatch(check_length(name)) or ".." in name:
        raise InvalidArgument(f"name = {name!r}: must be {_RULE}")
    return name


def is_key(name: str) -> bool:
    """Whether it is the key of a version."""
    return _KEY.fullmatch(name) is not None and ".." not in name


def check_key(name: str) -> str:
    """As `check_name`, also for the key of a version: NAME@NUMBER, as replicas of a cluster know it."""
    return name if is_key(name) else check_name(name)


def check_length(name: str, field: str = "name") -> str:
    """Returns `name` if it is no longer than an adapter's name or key may be; otherwise raises InvalidArgument."""
    if len(name) > MAX_CHARS and not _KEY.fullmatch(name):
        shown, limit = name[:32] + "…", f"an adapter's name has at most {MAX_CHARS} characters"
        raise InvalidArgument(f"{field} = {shown!r}: {limit}, got {len(name)}")
    return name


def check_base_name(name: str) -> str:
    """Returns `name` if it is a valid name for the base; otherwise raises ConfigError."""
    if not _BASE.fullmatch(name) or not name.isprintable():
        raise ConfigError(
            f"model.name = {name!r}: must be 1 to 256 printable characters without spaces and ':'; "
            "--served-model-name sets it"
        )
    return name


def _discover(directory: str, files: Files) -> dict[str, str]:
    """Name -> path of every subdirectory with an `adapter_config.json`, in order of name."""
    try:
        with files.folder(directory):  # also an empty one must be below `adapters.roots`
            entries = sorted(Path(directory).iterdir())
    except InvalidArgument as e:
        raise InvalidArgument(f"adapters.dir = {directory!r}: {str(e).removeprefix('path: ')}") from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"adapters.dir = {directory!r}: {getattr(e, 'strerror', None) or 'is no path'}") from e
    # Not `Path.is_file`, which raises for a directory that this user may not enter, as a disk's `lost+found`.
    found = {d.name: str(d) for d in entries if os.path.isfile(d / "adapter_config.json")}
    if not found and os.path.isfile(os.path.join(directory, "adapter_config.json")):
        raise ConfigError(
            f"adapters.dir = {directory!r}: is an adapter itself; name the directory that holds it, or give it a name: "
            "--adapter NAME=PATH"
        )
    return found


def at_start(paths: Mapping[str, str], directory: str, files: Files, tolerant: bool = False) -> dict[str, str]:
    """The adapters to load at start: those of `paths` and those in `directory`.

    With `tolerant`, the caller checks the names of those in `directory`, each by itself.

    Raises:
        ConfigError, InvalidArgument: `directory` cannot be read, or `files` may not read there; a name is wrong.
    """
    named = {check_name(name): path for name, path in paths.items()}
    found = _discover(directory, files) if directory else {}
    for name in () if tolerant else found:
        check_name(name)
    twice = sorted(set(named) & set(found))
    if twice:
        raise ConfigError(f"adapter {twice[0]!r} is in adapters.paths and in adapters.dir: name it once")
    return named | found


def removed(directory: str, paths: Collection[str]) -> set[str]:
    """Those of the known adapters in a directory that were removed from it, and so can be forgotten.

    None if all were: a disk that is not mounted leaves an empty directory. A link counts as there:
    its target may be on such a disk. One listing decides: between two looks, the disk might come back.
    """
    try:
        there = set(os.listdir(directory))
    except OSError:
        return set()
    known = {path for path in paths if os.path.dirname(path) == directory}
    gone = {path for path in known if os.path.basename(path) not in there}
    return gone if gone < known else set()
