"""Every adapter that a replica may serve, in one SQLite table, so that they outlive the process.

    catalogue = Catalogue("adapters.db", threads)     # "" keeps the table in memory
    rows = catalogue.rows()                           # at start
    catalogue.put([row])                              # returns at once; the one writer writes behind
    catalogue.put([row]).result()                     # raises why it is not written

The table is the memory of what was pinned down: an adapter's digest stays what it was when its weights
were first read, through restarts. One process writes a file at a time; others may read it meanwhile (WAL).
An older file is brought to this schema when it is opened.
"""

from __future__ import annotations

import fcntl
import json
import logging
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import IO, Annotated, Any

import msgspec

from jlora.errors import ConfigError, InvalidArgument, JloraError, ResourceExhausted, Unavailable
from jlora.ports import Threads

log = logging.getLogger(__name__)

Connect = Callable[..., sqlite3.Connection]  # as `sqlite3.connect`
MOST_RANKS = 1 << 20  # bytes of an adapter's ranks as JSON: some thousand modules
Uid = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
# What reading a file raises that no catalogue has written. sqlite3's own messages may hold bytes that are no text.
DAMAGE = (sqlite3.Error, zlib.error, ValueError, TypeError, RecursionError, MemoryError)
PATIENCE_S = 5.0  # that a write waits for a process that holds the file
TABLE = """
create table adapters (
    name text primary key,
    uid integer not null unique,
    digest text not null,
    header text not null,
    base text not null,
    fits text not null,
    ranks blob not null,
    modules text not null,
    bytes integer not null,
    blocks integer not null,
    path text not null,
    stamp text not null,
    pinned integer not null,
    alora_tokens text not null,
    created real not null,
    last_used real not null
) strict
"""
# What brings a file to the next schema, from that of the list's index on. Schema 2 remembers the largest uid ever
# given, so that the uid of an adapter that is unloaded never comes again.
UPGRADES = (
    (TABLE,),
    (
        "create table uids (last integer not null) strict",
        "insert into uids select coalesce(max(uid), 0) from adapters",
    ),
)
SCHEMA = len(UPGRADES)


@dataclass(frozen=True, slots=True)
class Row:
    """One registered adapter.

    Attributes:
        uid: of its registration; a reload under the same name has another.
        digest: sha256 of its content, hexadecimal; "" until its weights were read once.
        header: sha256 of its configuration and of its weight file's header.
        base: what it calls its base.
        fits: of the model and pool that its header was checked against, and `bytes` and `blocks` are of.
        ranks: module -> rank; compressed, since the modules' names are long and many.
        modules: the projections that it changes.
        bytes, blocks: of its packed form in this server's pool.
        stamp: the identities of its files (`jlora.ports.Stamp`).
        created, last_used: seconds since 1970; 0: never used.
    """

    name: str
    uid: Uid
    digest: str
    header: str
    base: str
    fits: str
    ranks: Mapping[str, int]
    modules: Sequence[str]
    bytes: int
    blocks: int
    path: str
    stamp: Sequence[int]
    pinned: bool
    alora_tokens: Sequence[int]
    created: float
    last_used: float


COLUMNS = tuple(field.name for field in fields(Row))
JSON = frozenset({"modules", "stamp", "alora_tokens"})


class Catalogue:
    """The table. Every method returns at once but `rows`, `last_uid` and `close`.

    A write that fails is logged and lost. Its future fails with Unavailable if another process holds the file, and
    with ResourceExhausted if the disk is full.
    """

    def __init__(self, path: str, threads: Threads, fits: str = "", connect: Connect = sqlite3.connect):
        """Opens or makes the file; `fits` as of the rows of this process. Raises ConfigError."""
        self.fits, self._path = fits, path
        try:
            with ExitStack() as failed:  # the error may be kept, as in a notebook, and the file must be free then
                self._lock = failed.enter_context(_locked(f"{path}.lock")) if path else None
                self._table = connect(
                    path or ":memory:", timeout=PATIENCE_S, check_same_thread=False, isolation_level=None
                )
                failed.callback(self._table.close)
                self._prepare()
                failed.pop_all()
        except (OSError, *DAMAGE) as e:
            raise ConfigError(f"adapters.registry = {path!r}: {getattr(e, 'strerror', None) or e}") from e
        self._writer = threads.pool("jlora-catalogue", 1)

    def rows(self) -> list[Row]:
        """All adapters, in order of name. Raises ConfigError if the file is damaged."""
        try:
            found = self._table.execute(f"select {', '.join(COLUMNS)} from adapters order by name")
            shared: dict[bytes, Mapping[str, int]] = {}  # most adapters have the same modules and ranks
            return [_row(dict(zip(COLUMNS, row, strict=True)), shared) for row in found]
        except DAMAGE as e:
            raise self._damaged(e) from e

    def row(self, name: str) -> Row | None:
        """The adapter of that name, if there is one. Raises ConfigError if the file is damaged; Unavailable."""
        try:
            found = self._table.execute(f"select {', '.join(COLUMNS)} from adapters where name = ?", (name,)).fetchone()
            return None if found is None else _row(dict(zip(COLUMNS, found, strict=True)), {})
        except sqlite3.ProgrammingError as e:
            raise Unavailable("the registry of adapters is closed") from e
        except DAMAGE as e:
            raise self._damaged(e) from e

    @property
    def last_uid(self) -> int:
        """The largest uid that any adapter ever had. Raises ConfigError if the file is damaged."""
        try:
            ((last,),) = self._table.execute("select last from uids")
            return msgspec.convert(last, Uid)
        except DAMAGE as e:
            raise self._damaged(e) from e

    def put(self, rows: Iterable[Row]) -> Future[None]:
        """Adds adapters, or takes the places of those of the same names."""
        rows = list(rows)
        places = ", ".join("?" * len(COLUMNS))
        return self._write(
            (f"insert or replace into adapters values ({places})", [_encoded(row) for row in rows]),
            ("update uids set last = max(last, ?)", [(max((row.uid for row in rows), default=0),)]),
        )

    def reserve(self, uid: int) -> Future[None]:
        """No adapter gets this uid from now on but by `put`."""
        return self._write(("update uids set last = max(last, ?)", [(uid,)]))

    def remove(self, names: Iterable[str]) -> Future[None]:
        return self._write(("delete from adapters where name = ?", [(name,) for name in names]))

    @property
    def bytes(self) -> int:
        """What the table takes."""
        ((pages,),) = self._table.execute("pragma page_count")
        ((size,),) = self._table.execute("pragma page_size")
        return pages * size

    def close(self) -> None:
        """Returns when all is written."""
        self._writer.shutdown(wait=True)
        self._table.close()
        if self._lock is not None:
            self._lock.close()

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(f"adapters.registry = {self._path!r}: is damaged ({str(error)[:200]}); restore or remove it")

    def _prepare(self) -> None:
        for pragma in ("journal_mode = wal", "synchronous = full"):  # what was acknowledged outlives a power cut
            self._table.execute(f"pragma {pragma}")
        ((version,),) = self._table.execute("pragma user_version")
        if version > SCHEMA:
            raise sqlite3.DatabaseError(f"its schema has version {version}, and this jlora reads up to {SCHEMA}")
        if version < SCHEMA:  # all steps or none
            statements = [statement for step in UPGRADES[version:] for statement in step]
            for statement in ("begin immediate", *statements, f"pragma user_version = {SCHEMA}", "commit"):
                self._table.execute(statement)

    def _write(self, *changes: tuple[str, list[tuple[Any, ...]]]) -> Future[None]:
        def write() -> None:
            try:
                self._table.execute("begin immediate")
                for statement, values in changes:
                    self._table.executemany(statement, values)
                self._table.execute("commit")
            except sqlite3.ProgrammingError as e:
                raise Unavailable("the registry of adapters is closed") from e
            except (sqlite3.Error, ValueError) as e:
                log.exception("the registry of adapters was not written")
                if self._table.in_transaction:  # otherwise the next change could not begin its own
                    self._table.execute("rollback")
                raise _refusal(e) from e

        try:
            return self._writer.submit(write)
        except RuntimeError:  # the process ends, and its pools have ended before it: nobody else writes
            return _answered(write)


def _answered(write: Callable[[], None]) -> Future[None]:
    """Calls it now."""
    answer: Future[None] = Future()
    try:
        answer.set_result(write())
    except JloraError as e:
        answer.set_exception(e)
    return answer


def _refusal(error: sqlite3.Error | ValueError) -> JloraError:
    """The error for a caller, who does not see the path."""
    if not isinstance(error, sqlite3.Error):  # of a path, for example, whose bytes are no UTF-8
        return InvalidArgument(f"adapters.registry: cannot hold what is no Unicode text ({type(error).__name__})")
    if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Unavailable(f"adapters.registry: another process holds the file ({error}); try again later")
    return ResourceExhausted(f"adapters.registry: cannot be written ({error}); make room on its disk, and try again")


def _locked(path: str) -> IO[str]:
    """A file that this process holds locked as long as it is open."""
    file = open(path, "a", encoding="utf-8")  # it is open as long as the catalogue
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        file.close()
        raise OSError(e.errno, "another server writes it; give every server a file of its own") from e
    return file


def _encoded(row: Row) -> tuple[Any, ...]:
    values = {name: getattr(row, name) for name in COLUMNS}
    values |= {name: json.dumps(values[name], separators=(",", ":")) for name in JSON}
    values["ranks"] = zlib.compress(json.dumps(dict(row.ranks), separators=(",", ":")).encode())
    return tuple(values.values())


def _row(values: dict[str, Any], shared: dict[bytes, Mapping[str, int]]) -> Row:
    """The inverse of `_encoded`; equal ranks are decoded once. Raises one of `DAMAGE`."""
    values |= {name: json.loads(values[name]) for name in JSON}
    packed = values["ranks"]
    if packed not in shared:
        shared[packed] = _ranks(values["name"], packed)
    return replace(msgspec.convert(values | {"ranks": {}, "pinned": bool(values["pinned"])}, Row), ranks=shared[packed])


def _ranks(name: str, packed: bytes) -> Mapping[str, int]:
    inflating = zlib.decompressobj()
    ranks = inflating.decompress(packed, MOST_RANKS)
    if not inflating.eof:
        raise ValueError(f"the ranks of {name!r} have more than {MOST_RANKS} bytes, or no end")
    return msgspec.convert(json.loads(ranks), dict[str, int])
