"""Programs that an earlier process traced, kept as StableHLO beside the compiled ones.

    traced = Traced(directory, site)
    program = jax.jit(traced("forward", function))      # reads what was traced, or traces and keeps it

Tracing a step and lowering it hold Python's lock, which threads do not shorten. An entry's name is a
digest of all that decides the program: the source of these packages, the versions, jax's settings, the
caller's facts, and the arguments' shapes. So an entry of another program is never found. An entry
begins with a digest of its content: a damaged one is traced again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import jax
from jax import export
from jaxlib import version as jaxlib

log = logging.getLogger(__name__)

FOLDER = "traced"
DIGEST = 32  # bytes of a sha256
ROOT = Path(__file__).parents[1]
SOURCES = ("layout.py", "model/*.py", "pallas/*.py", "pallas/*.json")
PLACES = "jax_compilation_cache_dir", "jax_persistent_cache", "jax_log"  # settings that decide no program


def _sources() -> bytes:
    """A digest of all source that decides a program."""
    sources = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return _digest(b"".join(path.read_bytes() for path in sources))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


LOADED = _sources()  # of the code that runs; the files may change under a process that lives on


class Traced:
    """Wraps functions for `jax.jit`. Any thread may trace them.

    Args:
        directory: of compiled programs; its folder `traced` is made when it is needed.
        facts: whatever else decides the programs; each must have a complete `repr`.
    """

    def __init__(self, directory: Path, *facts: object):
        self._directory = directory / FOLDER
        self._about = _digest(repr((_environment(), facts)).encode()).hex()
        self._keeps = _sources() == LOADED
        self._told = self._full = False

    def __call__(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of arrays, which calls what was traced for arguments of the same shapes."""
        if not self._keeps:
            return function

        def program(*args: Any) -> Any:
            arrays, tree = jax.tree.flatten(args)
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
            about = repr((self._about, name, str(tree), [(x.shape, x.dtype.name) for x in arrays]))
            path = self._directory / f"{name}-{_digest(about.encode()).hex()}"
            found = _read(path)
            if found is None:
                try:
                    # Of a flat list, so that an entry does not depend on the arguments' classes.
                    found = export.export(jax.jit(lambda *flat: function(*jax.tree.unflatten(tree, flat))))(*shapes)
                    self._keep(path, found)
                except Exception as e:  # it calls back into Python, or MLIR cannot express it for an older reader
                    self._tell(name, e)
                    return function(*args)  # a fault of its own is raised again here
            return found.call(*arrays)

        return program

    def _keep(self, path: Path, traced: export.Exported) -> None:
        """Writes an entry; a cache that cannot be written still serves."""
        content = bytes(traced.serialize())
        try:
            _write(path, content)
        except OSError as e:
            level, self._full = logging.DEBUG if self._full else logging.WARNING, True
            told = "%s cannot be written, so every start traces and compiles again what is not in it: %s"
            log.log(level, told, path.parent, e.strerror or e)

    def _tell(self, name: str, error: Exception) -> None:
        """Says once that programs are not kept: what one meets, the others often meet, too."""
        level, self._told = logging.INFO if self._told else logging.WARNING, True
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.log(level, "the program %s cannot be kept, so every start traces it again: %s", name, what)


def _environment() -> list[object]:
    """What decides a program beside its own facts: sources, versions, devices, settings."""
    # How many are there decides nothing: an image may be made beside one, and run beside eight.
    devices = sorted({(d.platform, d.device_kind, d.client.platform_version) for d in jax.devices()})
    settings = sorted((k, str(v)) for k, v in jax.config.values.items() if not k.startswith(PLACES))
    versions = jax.__version__, jaxlib.__version__, os.environ.get("XLA_FLAGS", "")
    return [LOADED.hex(), devices, settings, versions]


def _read(path: Path) -> export.Exported | None:
    """The entry, or None if there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:DIGEST], data[DIGEST:]
    if _digest(content) == digest:
        try:
            return export.deserialize(bytearray(content))
        except Exception as e:  # jax's readers raise whatever they stumble on
            log.warning("jax cannot read the traced program %s: %s", path.name, e)
    log.warning("the traced program %s is damaged: it is traced again", path.name)
    return None


def _write(path: Path, content: bytes) -> None:
    """Writes an entry; a reader sees all of it or nothing."""
    new = path.with_suffix(f".{os.getpid()}-{get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_bytes(_digest(content) + content)
    new.replace(path)
