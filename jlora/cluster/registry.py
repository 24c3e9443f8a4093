"""Every adapter of the service with its current version, in the catalogue's SQLite table.

A row's uid is the version's number, so numbers grow with each load and never come again. The table in memory
is what requests see. It changes only when the file has: an adapter that a client was told of outlives the process.
"""

from __future__ import annotations

import bisect
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import NoReturn

from jlora.adapters.catalogue import Catalogue, Connect, Row
from jlora.adapters.near import NearNames
from jlora.cluster.directory import Version
from jlora.errors import NotFound
from jlora.ports import Threads
from jlora.types import AdapterInfo


class Registry:
    """The table. Any thread may call; only `put` and `remove` wait for the disk."""

    def __init__(self, path: str, threads: Threads, connect: Connect = sqlite3.connect, above: int = 0):
        """Opens or makes the file; "" keeps the table in memory. Raises ConfigError.

        `above`: what the numbers of a new table lie above.
        """
        self._catalogue = Catalogue(path, threads, connect=connect)
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}
        self._versions: dict[str, Version] = {}
        self._names: list[str] = []  # in order
        self._near = NearNames()
        self._number = self._catalogue.last_uid or above
        for row in self._catalogue.rows():
            self._set(row)

    @property
    def last(self) -> int:
        """The number of the latest version."""
        return self._number

    def number(self) -> int:
        """Of the next version; no other one ever gets it, also if this process ends meanwhile. Errors as of `put`."""
        with self._lock:
            self._number += 1
            number = self._number
        self._catalogue.reserve(number).result()
        return number

    def find(self, name: str) -> Row | None:
        """The adapter of that name."""
        return self._rows.get(name)

    def get(self, name: str) -> Row:
        """The adapter of that name. Raises NotFound with near names."""
        return self._rows.get(name) or self._unknown(name)

    def version(self, name: str) -> Version:
        """What a request needs to know of it; errors as of `get`."""
        return self._versions.get(name) or self._unknown(name)

    def versions(self) -> list[Version]:
        """All of them, in any order."""
        with self._lock:
            return list(self._versions.values())

    def known(self, names: Iterable[str]) -> dict[str, Version]:
        """The versions of those of these names that it has."""
        with self._lock:
            return {name: self._versions[name] for name in names if name in self._versions}

    def all(self, after: str = "", most: int | None = None) -> list[Row]:
        """In order of name: those behind the name `after`, at most `most`. Takes time by those."""
        with self._lock:
            first = bisect.bisect_right(self._names, after)
            return [self._rows[name] for name in self._names[first : None if most is None else first + most]]

    def put(self, rows: Sequence[Row]) -> None:
        """Adds adapters, or new versions of them. Raises Unavailable, ResourceExhausted; nothing has changed then."""
        self._catalogue.put(rows).result()
        with self._lock:
            for row in rows:
                self._set(row)

    def remove(self, name: str) -> None:
        """Forgets an adapter; errors as of `put`."""
        self._catalogue.remove([name]).result()
        with self._lock:
            if self._rows.pop(name, None) is not None:
                del self._names[bisect.bisect_left(self._names, name)], self._versions[name]
                self._near.remove(name)

    def close(self) -> None:
        self._catalogue.close()

    def _set(self, row: Row) -> None:
        if row.name not in self._rows:
            bisect.insort(self._names, row.name)
            self._near.add(row.name)
        self._rows[row.name] = row
        self._versions[row.name] = Version.of(info_of(row), row.path)

    def _unknown(self, name: str) -> NoReturn:
        with self._lock:
            raise NotFound(f"adapter {name!r} is not loaded", self._near.of(name))


def key_of(row: Row) -> str:
    """Its name at replicas."""
    return Version(row.name, row.uid, row.path).key


def row_of(version: Version, info: AdapterInfo, pinned: bool, now: float) -> Row:
    """A new version as the registry keeps it. What only a replica's own files know stays empty."""
    return Row(
        name=version.name,
        uid=version.number,
        digest=info.digest,
        header="",
        base="",
        fits="",
        ranks=info.ranks,
        modules=info.target_modules,
        bytes=info.bytes,
        blocks=info.blocks,
        path=version.path,
        stamp=(),
        pinned=pinned,
        alora_tokens=info.alora_invocation_tokens,
        created=now,
        last_used=0.0,
    )


def info_of(row: Row) -> AdapterInfo:
    """What the registry knows of an adapter."""
    return AdapterInfo(
        name=row.name,
        uid=row.uid,
        digest=row.digest,
        rank=max(row.ranks.values(), default=0),
        ranks=row.ranks,
        target_modules=tuple(row.modules),
        bytes=row.bytes,
        blocks=row.blocks,
        tier="DISK",
        pinned=row.pinned,
        running=0,
        waiting=0,
        hits=0,
        last_used_s=-1.0,
        load_cost_s=0.0,
        alora_invocation_tokens=tuple(row.alora_tokens),
    )
