"""The watch of adapters' files, and what it leaves out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jlora import config
from jlora.adapters.registry import Record
from jlora.cache.tree import AdapterNode
from jlora.engine import watch as watching
from jlora.engine.loading import Compared
from jlora.engine.records import NewAdapter, of_files
from jlora.engine.sources import Reader, read_adapter
from jlora.engine.watch import Watch
from jlora.errors import InvalidArgument, JloraError, ResourceExhausted
from jlora.layout import PoolLayout
from jlora.machine import UNLIMITED
from jlora.memory import Memory, unlimited
from jlora.ports import DiskFiles, System
from tests import _make

SPEC = _make.tiny_spec()


class Adapters:
    """Refuses what comes as long as it has errors."""

    def __init__(self, *errors: JloraError):
        self.errors, self.tried, self.names = list(errors), 0, list[str]()
        self.known, self.told = list[Record](), list[bool]()

    def records(self) -> list[Record]:
        return self.known

    def compared(self, found: list[Compared]) -> None:
        for one in found:
            self.told.append(one.own)
            one.record.node.backed = one.own
            if one.own:
                one.record.stamp = one.stamp or ()

    def register(self, new: NewAdapter) -> None:
        self.tried += 1
        if self.errors:
            raise self.errors.pop()
        self.names.append(new.name)


def watch(directory: Path, adapters: Adapters, blocks: int = 64, memory: Memory | None = None) -> Watch:
    settings = config.load(None, {"adapters.dir": str(directory)})
    built: Any = SimpleNamespace(
        info=SimpleNamespace(config=settings),
        engine=SimpleNamespace(adapters=adapters),
        reader=Reader(
            SPEC,
            PoolLayout.of(SPEC, blocks, 16),
            64,
            (SPEC.name,),
            DiskFiles(),
            lambda: 0.0,
            memory=memory or unlimited(),
        ),
        catalogue=SimpleNamespace(row=lambda name: None),
    )

    def at_once(command: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(command())
        except JloraError as e:
            done.set_exception(e)
        return done

    return Watch(built, System(), at_once)


def test_an_adapter_for_which_there_is_no_room_comes_when_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    _make.make_adapter(tmp_path / "a", SPEC)
    adapters = Adapters(*[ResourceExhausted("pinned adapters would take 9 blocks")] * 2)
    looking = watch(tmp_path, adapters)
    looking.look()
    looking.look()
    assert adapters.names == [] and caplog.text.count("'a' is left out for now") == 1, "the log says so once"
    looking.look()
    assert adapters.names == ["a"]


def test_one_that_the_pool_can_never_hold_is_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _make.make_adapter(tmp_path / "a", SPEC, r=64)
    looking, scans = watch(tmp_path, Adapters(), blocks=4), Counter[str]()
    scan = watching.scan_adapter
    monkeypatch.setattr(watching, "scan_adapter", lambda name, *rest: scans.update([name]) or scan(name, *rest))
    for _ in range(3):
        looking.look()
    assert scans == {"a": 1}


def test_a_round_waits_for_no_memory_and_the_next_one_reads(tmp_path: Path):
    """A round's time decides the pause before the next one, and intact files are no other version's."""
    path, memory, left = _make.make_adapter(tmp_path / "a", SPEC), Memory(lambda: left[0]), [UNLIMITED]
    adapters = Adapters()
    looking = watch(tmp_path, adapters, memory=memory)
    reader = Reader(SPEC, PoolLayout.of(SPEC, 64, 16), 64, (SPEC.name,), DiskFiles(), lambda: 0.0)
    record = of_files(read_adapter("a", str(path), reader), AdapterNode(1, 2), 0.0)
    record.node.backed = True
    adapters.known.append(record)
    (path / "adapter_config.json").touch()
    left[0] = 1000
    with memory.promised(999, "another read"):
        began = time.monotonic()
        looking.look()
        assert time.monotonic() - began < 5
    assert adapters.told == [False], "it stays in memory until it is known what the disk has"
    left[0] = UNLIMITED
    looking.look()
    assert adapters.told == [False, True] and record.stamp == reader.stamp(str(path))


def test_one_that_cannot_be_served_as_it_is_is_not_tried_again(tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    adapters = Adapters(InvalidArgument("rank"))
    looking = watch(tmp_path, adapters)
    for _ in range(3):
        looking.look()
    assert adapters.tried == 1
    (path / "adapter_config.json").touch()
    looking.look()
    assert adapters.names == ["a"]
