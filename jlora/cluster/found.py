"""The adapters of `adapters.paths` and `adapters.dir`, as their files' headers describe them. No replica is needed.

Weights are read by the replica that needs them first; then the registry learns their digest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from jlora.adapters.adapter import Scan
from jlora.adapters.catalogue import Row
from jlora.adapters.names import at_start, check_name, removed
from jlora.adapters.peft import FILES, scan_peft
from jlora.cluster.directory import Version
from jlora.cluster.registry import Registry, info_of
from jlora.config import Config
from jlora.errors import Busy, JloraError, NotFound
from jlora.model.config_json import spec_from_json
from jlora.model.spec import ModelSpec
from jlora.ports import Stamp, System
from jlora.types import AdapterInfo

log = logging.getLogger(__name__)

MOST_REFUSED = 10_000  # directories that are remembered, beside those of `adapters.paths` and `adapters.dir`


class Found:
    """Looks at the disk, as this process sees it. One thread at a time calls `look`."""

    def __init__(self, config: Config, system: System):
        self._adapters = config.adapters
        self._files, self._wall = system.files, system.wall
        self._spec = _spec(config)
        self._refused: dict[str, Stamp | None] = {}  # directories that are no adapters as they are, or were unloaded

    def scan(self, version: Version) -> AdapterInfo:
        """What the headers of a version's files say. Raises JloraError."""
        return replace(info_of(self._row(version, self._scan(version.path))), name=version.key)

    def leave(self, row: Row) -> None:
        """An adapter was unloaded: its directory is found again once its files change."""
        self._refused[row.path] = self._stamp(row.path)

    def first(self, registry: Registry) -> list[Row]:
        """New rows at start. Raises JloraError if an adapter cannot be served and `adapters.lazy` is off."""
        return list(self._rows(registry, tolerant=self._adapters.lazy))

    def look(self, registry: Registry) -> list[Row]:
        """New rows for directories that have come, and for files that have changed before anybody has read them."""
        try:
            return list(self._rows(registry, tolerant=True))
        except JloraError as e:
            log.warning("adapters.dir: %s", e)
            return []

    def gone(self, rows: Iterable[Row]) -> list[Row]:
        """Those of `adapters.dir` that were removed from it."""
        if not self._adapters.dir:
            return []
        known = {row.path: row for row in rows}
        return [known[path] for path in removed(os.path.abspath(self._adapters.dir), known)]

    def is_gone(self, path: str) -> bool:
        """Whether a directory's files are gone; one that cannot be read now is not."""
        try:
            self._files.stamp(path, FILES)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except (OSError, ValueError):
            return False
        return False

    def is_intact(self, row: Row) -> bool:
        """Whether a directory's files are there, and are those that the row was made of, if it knows them."""
        stamp = self._stamp(row.path)
        return stamp is not None and (not row.stamp or stamp == tuple(row.stamp))

    def _rows(self, registry: Registry, tolerant: bool) -> Iterator[Row]:
        found = at_start(self._adapters.paths, self._adapters.dir, self._files, tolerant)
        if len(self._refused) > MOST_REFUSED:
            there = set(map(os.path.abspath, found.values()))
            for path in [path for path in list(self._refused) if path not in there]:
                self._refused.pop(path, None)  # in place: a client may unload one just now
        for name, path in found.items():
            path, stamp = os.path.abspath(path), self._stamp(path)
            known = registry.find(name)
            if known is not None and (known.digest or known.path != path or tuple(known.stamp) == stamp):
                continue
            if path in self._refused and self._refused[path] == stamp:
                continue
            try:
                check_name(name)
                scan = self._scan(path)
            except JloraError as e:
                if not tolerant:
                    raise type(e)(f"adapter {name}: {e} (from {path})") from e
                log.warning("adapter %r is left out as it is: %s", name, e)
                if not isinstance(e, Busy):
                    self._refused[path] = stamp
            else:  # what fails here is the registry, not the adapter: the next look tries again
                yield self._row(Version(name, registry.number(), path), scan)

    def _scan(self, path: str) -> Scan:
        if self._spec is not None:
            return scan_peft(path, self._spec, self._adapters.max_rank, self._files)
        if (stamp := self._stamp(path)) is None:
            raise NotFound(f"{os.path.basename(path)}: has no {' and '.join(FILES)}")
        return Scan("", stamp, "", {}, (), (), {})

    def _row(self, version: Version, scan: Scan) -> Row:
        return Row(
            name=version.name,
            uid=version.number,
            digest="",
            header=scan.header,
            base=scan.base,
            fits="",
            ranks=scan.ranks,
            modules=scan.target_modules,
            bytes=0,
            blocks=0,
            path=version.path,
            stamp=scan.stamp,
            pinned=False,
            alora_tokens=scan.alora_invocation_tokens,
            created=self._wall(),
            last_used=0.0,
        )

    def _stamp(self, path: str) -> Stamp | None:
        try:
            return self._files.stamp(path, FILES)
        except (OSError, ValueError):
            return None


def _spec(config: Config) -> ModelSpec | None:
    """The base's shape; None if only replicas can read it. Then headers are not compared with it."""
    directory = Path(config.model.path)
    if not config.model.path or not (directory / "config.json").is_file():
        return None
    return spec_from_json(directory, directory.name, config.model.dtype, config.model.max_model_len)
