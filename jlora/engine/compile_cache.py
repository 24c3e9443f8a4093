"""Where compiled programs are kept between starts, and which of them are complete.

jax writes an entry in place, so a process that is killed meanwhile leaves an incomplete file. jax then
compiles the program at every start and never writes the entry again, because the file exists.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import jax

log = logging.getLogger(__name__)

FACTS = "compiled-for.json"
STAMP = ".jlora-checked"  # its time of change: entries that have not changed since are whole
ENTRY = 4096  # bytes that must have room
ZSTD = b"\x28\xb5\x2f\xfd"  # how a stream of zstd begins; jax takes zlib where it finds no zstd


def use(where: str) -> Path | None:
    """Keeps compiled programs in a directory, which it returns; `auto` is in the user's cache, "" keeps none."""
    if not where:
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    directory = home / "jlora" / "xla" if where == "auto" else Path(where)
    least_s = 0.0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        clean(directory)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(ENTRY))
    except OSError as e:  # a cache that cannot be written still serves
        told = "serve.compile_cache: %s cannot be written, so every start compiles again what is not in it: %s"
        log.warning(told, directory, e.strerror or e)
        if not directory.is_dir():
            return None
        least_s = math.inf  # jax only reads: it would warn of each entry that it cannot write
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_s)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return directory


def seal(directory: Path, facts: Mapping[str, object]) -> None:
    """Writes into the directory what its programs were compiled for."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{FACTS}.partial"
    partial.write_text(json.dumps(facts, indent=1) + "\n")
    partial.replace(directory / FACTS)


def differences(directory: Path | None, facts: Mapping[str, object]) -> list[str]:
    """How a sealed directory differs from what is needed here; none for one that `seal` never wrote."""
    file = None if directory is None else directory / FACTS
    if file is None or not file.is_file():
        return []
    try:
        made = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return [f"{FACTS} is damaged: what the programs were compiled for is unknown"]
    here = json.loads(json.dumps(facts))
    return [f"{key} is {value}, it was {made.get(key)}" for key, value in here.items() if made.get(key) != value]


def clean(directory: Path) -> list[str]:
    """Removes entries that are not whole, among those that changed since the last call; their names.

    Raises:
        OSError: the directory cannot be read or written.
    """
    if not directory.is_dir():
        return []
    stamp, removed = directory / STAMP, []
    # Before the entries are looked at: one that is written meanwhile is checked next time. Replicas start together.
    opened, began = tempfile.mkstemp(prefix=STAMP, dir=directory)
    os.close(opened)
    try:
        since = stamp.stat().st_mtime_ns if stamp.exists() else 0
        for entry in _changed(directory, since):
            with suppress(FileNotFoundError):  # another replica has removed it
                if not _whole(entry.read_bytes()):
                    entry.unlink()
                    removed.append(entry.name)
                    log.warning("the compile cache's entry %s is damaged: its program is compiled again", entry.name)
        os.replace(began, stamp)
    finally:
        Path(began).unlink(missing_ok=True)
    return removed


def _changed(directory: Path, since: int) -> Iterator[Path]:
    with os.scandir(directory) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # as above
                if entry.name.endswith("-cache") and entry.stat().st_mtime_ns >= since:
                    yield Path(entry.path)


def _whole(data: bytes) -> bool:
    """Whether the compressed stream comes to its end."""
    decompress = _zstd() if data.startswith(ZSTD) else zlib.decompress
    if decompress is None:  # then jax cannot read it either, and another environment may
        return True
    try:
        return bool(decompress(data))
    except Exception:  # each library has an error of its own
        return False


def _zstd() -> Callable[[bytes], bytes] | None:
    for module in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(module).decompress
        except ImportError:
            log.debug("no %s", module)
    return None
