"""The registry of versions: durable, upgraded in place, and clear about a file that it cannot write."""

from __future__ import annotations

import errno
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jlora import config as configuration
from jlora.adapters import catalogue
from jlora.adapters.catalogue import Catalogue, Row
from jlora.adapters.names import check_key, check_name
from jlora.adapters.peft import FILES
from jlora.cluster.found import Found
from jlora.cluster.registry import Registry
from jlora.cluster.secret import Secret
from jlora.cluster.service import controller
from jlora.cluster.table import KEPT, Change, Table
from jlora.config import Config
from jlora.errors import ConfigError, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from jlora.ports import DiskFiles, OsThreads, System
from tests.cluster import _port as port


def row(name: str, uid: int, digest: str = "d") -> Row:
    return Row(
        name=name, uid=uid, digest=digest, header="h", base="b", fits="f", ranks={"layers.0.q": 4}, modules=["q"],
        bytes=8, blocks=1, path=f"/adapters/{name}", stamp=[1, 2], pinned=False, alora_tokens=[7], created=1.0,
        last_used=0.0,
    )  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "adapters.db")


@pytest.fixture
def registry(file: str) -> Iterator[Registry]:
    opened = Registry(file, OsThreads())
    yield opened
    opened.close()


def test_versions_outlive_the_process_and_numbers_never_come_again(file: str):
    first = Registry(file, OsThreads())
    for name in ("b", "a"):
        first.put([row(name, first.number())])
    first.put([row("a", first.number(), "other")])
    first.remove("b")
    first.put([row("c", first.number())])
    first.remove("c")
    first.close()
    second = Registry(file, OsThreads())
    (kept,) = second.versions()
    assert (kept.key, kept.digest, kept.rank, kept.alora_invocation_tokens) == ("a@3", "other", 4, (7,))
    assert second.number() == 5
    second.close()


def test_the_number_of_a_load_that_dies_with_its_process_never_comes_again(file: str):
    """A replica may have read that version: under the same key another one would answer with its weights."""
    first = Registry(file, OsThreads())
    lost = first.number()
    first.close()
    second = Registry(file, OsThreads())
    assert second.number() > lost
    second.close()


def test_the_list_pages_in_order_of_name_and_an_unknown_name_has_near_ones(registry: Registry):
    registry.put([row(name, registry.number()) for name in ("french", "german", "greek")])
    assert [found.name for found in registry.all(after="french", most=1)] == ["german"]
    with pytest.raises(NotFound, match="'french'"):
        registry.get("frnch")
    registry.remove("french")
    assert registry.find("french") is None and len(registry.all()) == 2


def test_a_file_of_schema_1_is_upgraded_in_place(file: str):
    old = sqlite3.connect(file)
    old.execute(catalogue.TABLE)
    old.execute("pragma user_version = 1")
    values = port.encoded(row("kept", 41))
    old.execute(f"insert into adapters values ({', '.join('?' * len(values))})", values)
    old.commit()
    old.close()
    registry = Registry(file, OsThreads())
    assert registry.version("kept").key == "kept@41" and registry.number() == 42
    registry.close()
    again = Catalogue(file, OsThreads())
    assert [astuple(found) for found in again.rows()] == [astuple(row("kept", 41))]
    again.close()


def test_a_file_of_a_later_schema_is_refused(file: str):
    later = sqlite3.connect(file)
    later.execute(f"pragma user_version = {catalogue.SCHEMA + 1}")
    later.close()
    with pytest.raises(ConfigError, match=f"version {catalogue.SCHEMA + 1}, and this jlora reads up to") as kept:
        Registry(file, OsThreads())
    Path(file).unlink()  # by the user, while a notebook keeps the error
    Registry(file, OsThreads()).close()
    assert kept.value.__traceback__


@pytest.mark.parametrize(
    "change, said",
    [
        ("update adapters set ranks = zeroblob(9)", "is damaged"),
        ("update adapters set modules = '5'", "is damaged"),
        ("update adapters set stamp = '[' ", "is damaged"),
        ("update adapters set uid = -1", "is damaged"),
        ("delete from uids", "is damaged"),
        ("drop table adapters", "is damaged"),
        ("bomb", f"more than {catalogue.MOST_RANKS} bytes"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(file: str, change: str, said: str):
    registry = Registry(file, OsThreads())
    registry.put([row("a", registry.number())])
    registry.close()
    table = sqlite3.connect(file)
    if change == "bomb":
        bomb = zlib.compress(b"[" + b" " * catalogue.MOST_RANKS + b"]")
        table.execute("update adapters set ranks = ?", (bomb,))
    else:
        table.execute(change)
    table.commit()
    table.close()
    with pytest.raises(ConfigError, match=f"adapters.registry = '.*adapters.db': .*{said}"):
        Registry(file, OsThreads())


def test_a_locked_file_fails_the_call_that_needs_it_and_nothing_else(file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalogue, "PATIENCE_S", 0.05)
    registry = Registry(file, OsThreads())
    registry.put([row("a", registry.number())])
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("begin immediate")
    for write in (lambda: registry.put([row("b", registry.number())]), lambda: registry.remove("a")):
        with pytest.raises(Unavailable, match="adapters.registry: another process holds the file"):
            write()
    assert [found.name for found in registry.all()] == ["a"]
    other.execute("rollback")
    registry.put([row("b", registry.number())])
    assert [found.name for found in registry.all()] == ["a", "b"]
    other.close()
    registry.close()


def test_an_adapter_that_came_while_the_file_was_locked_is_found_afterwards(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catalogue, "PATIENCE_S", 0.05)
    (tmp_path / "adapters" / "a").mkdir(parents=True)
    for name in FILES:
        (tmp_path / "adapters" / "a" / name).touch()
    found = Found(configuration.load({"adapters.dir": str(tmp_path / "adapters")}), System())
    registry = Registry(file, OsThreads())
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("begin immediate")
    assert found.look(registry) == []
    other.execute("rollback")
    assert [one.name for one in found.look(registry)] == ["a"]
    other.close()
    registry.close()


def test_a_directory_with_a_name_that_is_none_is_left_out_alone(tmp_path: Path, registry: Registry):
    for directory in (".b.tmp", "a b", os.fsdecode(b"a\xff"), "c"):
        (tmp_path / directory).mkdir()
        for name in FILES:
            (tmp_path / directory / name).touch()
    lazy, strict = (
        Found(configuration.load({"adapters.dir": str(tmp_path), "adapters.lazy": lazy}), System())
        for lazy in (True, False)
    )
    assert [one.name for one in lazy.first(registry)] == ["c"] == [one.name for one in strict.look(registry)]
    with pytest.raises(InvalidArgument, match="name = "):
        strict.first(registry)


def test_what_is_no_text_fails_alone(registry: Registry):
    """A change that failed in the middle once took the next one along."""
    with pytest.raises(InvalidArgument, match="adapters.registry: cannot hold what is no Unicode text"):
        registry.put([replace(row("a", registry.number()), base="\ud800")])
    registry.put([row("b", registry.number())])
    assert [found.name for found in registry.all()] == ["b"]


def test_a_full_disk_fails_the_call_that_needs_it_and_nothing_else(registry: Registry):
    registry.put([row("a", registry.number())])
    table = port.table(registry)
    ((pages,),) = table.execute("pragma page_count")
    table.execute(f"pragma max_page_count = {pages}")  # as where the disk has no page left
    with pytest.raises(ResourceExhausted, match="adapters.registry: cannot be written .database or disk is full."):
        registry.put([row(f"more-{i}", registry.number()) for i in range(200)])
    assert [found.name for found in registry.all()] == ["a"]
    table.execute("pragma max_page_count = 100000")
    registry.put([row("b", registry.number())])
    assert [found.name for found in registry.all()] == ["a", "b"]


def test_a_second_process_may_not_write_the_file(registry: Registry, file: str):
    with pytest.raises(ConfigError, match="another server writes it"):
        Registry(file, OsThreads())


@pytest.mark.parametrize("key", ["a@1", f"{'x' * 128}@9223372036854775807"])
def test_a_key_is_a_name_at_replicas_only(key: str):
    assert check_key(key) == key
    with pytest.raises(InvalidArgument, match="name = "):
        check_name(key)


@pytest.mark.parametrize("key", ["a@0", "a@01", "@1", "a@", "a@1@2", "a..b@1", "a@-1", f"{'x' * 129}@1"])
def test_what_is_no_key_is_refused(key: str):
    with pytest.raises(InvalidArgument, match="name = "):
        check_key(key)


def test_a_table_that_begins_anew_gives_no_number_that_replicas_may_know(file: str):
    for above, number in ((1000, 1001), (5, 1002)):  # the file goes on where it was
        opened = Registry(file, OsThreads(), above=above)
        assert opened.number() == number
        opened.close()
    with ExitStack() as stack:
        made, _ = controller(Config(), Secret(), System(wall=lambda: 7.0), stack)
        assert made.registry.number() == 7001


def test_others_read_the_file_while_one_process_writes_it(file: str, registry: Registry):
    with sqlite3.connect(file) as other:
        assert other.execute("pragma journal_mode").fetchone() == ("wal",)
        registry.put([row("a", registry.number())])
        assert other.execute("select name from adapters").fetchall() == [("a",)]


def test_adapters_on_a_disk_that_cannot_be_read_are_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, away = tmp_path / "adapters", tmp_path / "away"
    (folder / "a").mkdir(parents=True)
    for name in FILES:
        (folder / "a" / name).touch()
    files = DiskFiles()
    found = Found(configuration.load({"adapters.dir": str(folder)}), System(files=files))
    rows = [replace(row(name, 1), path=str(folder / name)) for name in ("a", "b")]
    assert [one.name for one in found.gone(rows)] == ["b"]
    folder.rename(away)
    assert found.gone(rows) == []
    folder.mkdir()  # where the disk was mounted
    assert found.gone(rows) == []
    folder.rmdir()
    away.rename(folder)

    (folder / "b").symlink_to(away)  # on a disk that is not mounted
    assert found.gone(rows) == []
    (folder / "b").unlink()
    assert [one.name for one in found.gone(rows)] == ["b"]

    def stale(directory: str) -> NoReturn:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(os, "listdir", stale)
    assert found.gone(rows) == []


@pytest.mark.parametrize("read", ["find", "known", "version"])
def test_an_adapter_that_is_removed_while_a_router_asks_for_changes_is_there_or_gone(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, read: str
):
    registry.put([row(name, registry.number()) for name in ("a", "b")])
    table, real = Table(registry), getattr(registry, read)
    table.changed(["a", "b"])

    def removed_behind(asked: Any) -> Any:
        found = real(asked)
        registry.remove("a")
        return found

    monkeypatch.setattr(registry, read, removed_behind)
    change = table.since(1)
    assert {version.name for version in change.versions} | set(change.gone) == {"a", "b"}
    assert "b" not in change.gone and not change.whole


def test_a_router_that_misses_a_part_of_a_change_gets_the_whole_table(registry: Registry):
    many = [f"a{i}" for i in range(KEPT + 10)]
    registry.put([row(name, registry.number()) for name in many])
    table = Table(registry)
    table.changed(["a0"])
    change = table.since(table.changed(many) - 1)
    assert change.whole and len(change.versions) == len(many)
    last = table.changed(["a1"])
    assert table.since(last - 1) == Change(last, False, tuple(registry.known(["a1"]).values()))
    assert table.since(last).versions == ()


def test_what_was_acknowledged_is_on_the_disk(registry: Registry):
    """In WAL mode, only `full` (2) syncs every commit: a power cut undoes others."""
    assert port.durability(registry) == 2


@pytest.mark.parametrize(("file", "lines"), [("", 1), ("adapters.db", 0)])
def test_a_table_that_replicas_outlive_is_named_also_with_a_directory_of_adapters(
    tmp_path: Path, file: str, lines: int, caplog: pytest.LogCaptureFixture
):
    settings = {"adapters.dir": str(tmp_path), "adapters.registry": file and str(tmp_path / file)}
    with ExitStack() as stack:
        controller(configuration.load({**settings, "cluster.fleet": "static"}), Secret(), System(), stack)
    assert caplog.text.count("adapters.registry is unset") == lines
