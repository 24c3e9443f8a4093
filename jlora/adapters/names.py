"""Names of adapters and of the base, and the adapters in a directory.

Every front uses one rule: an adapter's name starts with a letter or digit, continues with letters,
digits, '.', '_' or '-', has at most 128 characters and no "..". Such a name is safe in a file path,
a metric label, a log line and in `base:adapter`. The base's name may also be a hub id; it has no
':' and no space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jlora.errors import ConfigError, InvalidArgument

MAX_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_CHARS - 1}}}")
_RULE = f"letters, digits, '.', '_', '-', starting with a letter or digit, at most {MAX_CHARS}, without '..'"
_BASE = re.compile(r"[^\s:]{1,256}")


def check_name(name: str) -> str:
    """Returns `name` if it is a valid adapter name.

    Raises:
        InvalidArgument: it is not.
    """
    if not _NAME.fullmatch(check_length(name)) or ".." in name:
        raise InvalidArgument(f"name = {name!r}: must be {_RULE}")
    return name


def check_length(name: str, field: str = "name") -> str:
    """Returns `name` if it is short enough to look up; clients may send any length.

    Args:
        field: the field's name in the error message.
    Raises:
        InvalidArgument: the name is longer than any adapter's name.
    """
    if len(name) > MAX_CHARS:
        shown, limit = name[:32] + "…", f"an adapter's name has at most {MAX_CHARS} characters"
        raise InvalidArgument(f"{field} = {shown!r}: {limit}, got {len(name)}")
    return name


def check_base_name(name: str) -> str:
    """Returns `name` if it is a valid name for the base.

    Raises:
        ConfigError: it is not.
    """
    if not _BASE.fullmatch(name) or not name.isprintable():
        raise ConfigError(
            f"model.name = {name!r}: must be 1 to 256 printable characters without spaces and ':'; "
            "--served-model-name sets it"
        )
    return name


def discover(directory: str | Path) -> dict[str, str]:
    """Name -> path of every subdirectory with an `adapter_config.json`, in order of name.

    Raises:
        ConfigError: the directory cannot be read.
        InvalidArgument: a subdirectory's name is not a valid adapter name.
    """
    try:
        entries = sorted(Path(directory).iterdir())
    except OSError as e:
        raise ConfigError(f"adapters.dir = {str(directory)!r}: {e.strerror}") from e
    return {check_name(d.name): str(d) for d in entries if (d / "adapter_config.json").is_file()}


def at_start(paths: Mapping[str, str], directory: str) -> dict[str, str]:
    """The adapters to load at start: those of `paths` and those in `directory`.

    Raises:
        ConfigError: the directory cannot be read, or both have the same name.
        InvalidArgument: a name is not a valid adapter name.
    """
    named = {check_name(name): path for name, path in paths.items()}
    found = discover(directory) if directory else {}
    twice = sorted(set(named) & set(found))
    if twice:
        raise ConfigError(f"adapter {twice[0]!r} is in adapters.paths and in adapters.dir: name it once")
    return named | found
