"""What an adapter and the base may be called, and which adapters a directory offers.

One rule for every door (launcher, LoadAdapter, notebook): a name is a letter or digit, then
letters, digits, '.', '_' or '-', 128 characters in all, without "..". So a name is safe in a
file path, a metric label, a log line and in `base:adapter`. The base's own name may be a hub id or
whatever its directory is called, as long as it has no ':' and no space.
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
    """Returns `name` if an adapter may be called so.

    Raises:
        InvalidArgument: it breaks the rule.
    """
    if not _NAME.fullmatch(check_length(name)) or ".." in name:
        raise InvalidArgument(f"name = {name!r}: must be {_RULE}")
    return name


def check_length(name: str, field: str = "name") -> str:
    """Returns `name` if it is short enough to be looked up: what comes from outside may be of any length.

    Args:
        field: what the caller knows it as.
    Raises:
        InvalidArgument: no adapter's name is so long.
    """
    if len(name) > MAX_CHARS:
        shown, limit = name[:32] + "…", f"an adapter's name has at most {MAX_CHARS} characters"
        raise InvalidArgument(f"{field} = {shown!r}: {limit}, got {len(name)}")
    return name


def check_base_name(name: str) -> str:
    """Returns `name` if the base may be served under it: in `base:adapter` and in the ready line.

    Raises:
        ConfigError: it breaks the rule.
    """
    if not _BASE.fullmatch(name) or not name.isprintable():
        raise ConfigError(
            f"model.name = {name!r}: must be 1 to 256 printable characters without spaces and ':'; "
            "--served-model-name sets it"
        )
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
