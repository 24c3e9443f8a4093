"""The watch of adapters' files, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jlora import config
from jlora.engine.records import NewAdapter
from jlora.engine.sources import Reader
from jlora.engine.watch import Watch
from jlora.errors import InvalidArgument, JloraError, ResourceExhausted
from jlora.layout import PoolLayout
from jlora.ports import DiskFiles, System
from tests import _make

SPEC = _make.tiny_spec()


class Adapters:
    """Refuses what comes as long as it has errors."""

    def __init__(self, *errors: JloraError):
        self.errors, self.tried, self.names = list(errors), 0, list[str]()

    def records(self) -> list[Any]:
        return []

    def register(self, new: NewAdapter) -> None:
        self.tried += 1
        if self.errors:
            raise self.errors.pop()
        self.names.append(new.name)


def watch(directory: Path, adapters: Adapters) -> Watch:
    settings = config.load(None, {"adapters.dir": str(directory)})
    built: Any = SimpleNamespace(
        info=SimpleNamespace(config=settings),
        engine=SimpleNamespace(adapters=adapters),
        reader=Reader(SPEC, PoolLayout.of(SPEC, 64, 16), 64, (SPEC.name,), DiskFiles(), lambda: 0.0),
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
    assert adapters.names == [] and caplog.text.count("'a' is left out") == 1, "the log says so once"
    looking.look()
    assert adapters.names == ["a"]


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
