"""What an adapter may be called, and which adapters a directory offers.

One rule for every door (launcher, LoadAdapter, notebook): a name is a letter or digit, then
letters, digits, '.', '_' or '-', 128 characters in all, without "..". So a name is safe in a
file path, a metric label, a log line and in `base:adapter`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jlora.errors import ConfigError, InvalidArgument

MAX_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_CHARS - 1}}}")
_RULE = f"letters, digits, '.', '_', '-', starting with a letter or digit, at most {MAX_CHARS}, without '..'"


def check_name(name: str) -> str:
    """Returns `name` if an adapter may be called so.

    Raises:
        InvalidArgument: it breaks the rule.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        shown = name if len(name) <= MAX_CHARS else name[:32] + "…"
        raise InvalidArgument(f"name = {shown!r}: must be {_RULE}")
    return name


def discover(directory: str | Path) -> dict[str, str]:
    """Every subdirectory with an `adapter_config.json`, by its own name, in order of name.

    Raises:
        ConfigError: the directory cannot be read.
        InvalidArgument: a subdirectory's name is not a name for an adapter.
    """
    try:
        entries = sorted(Path(directory).iterdir())
    except OSError as e:
        raise ConfigError(f"adapters.dir = {str(directory)!r}: {e.strerror}") from e
    return {check_name(d.name): str(d) for d in entries if (d / "adapter_config.json").is_file()}


def at_start(paths: Mapping[str, str], directory: str) -> dict[str, str]:
    """The adapters to load at start: those named one by one and those of a directory.

    Raises:
        ConfigError: the directory cannot be read, or has a name that `paths` has too.
        InvalidArgument: a name is not a name for an adapter.
    """
    named = {check_name(name): path for name, path in paths.items()}
    found = discover(directory) if directory else {}
    twice = sorted(set(named) & set(found))
    if twice:
        raise ConfigError(f"adapter {twice[0]!r} is in adapters.paths and in adapters.dir: name it once")
    return named | found
