"""Threads that end, commands and files that fail: who is told, and what goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from jlora import config
from jlora.engine.ports import Undone
from jlora.errors import Unavailable
from jlora.ports import DiskFiles, Folder, OsThreads, PythonGarbage, System
from jlora.types import Request, TokenEvent
from tests import _make, port
from tests.engine._replica import Running
from tests.engine.test_engine import BASE, GREEDY, serve, tokens

LONG = replace(GREEDY, max_tokens=100)
Inbox = queue.SimpleQueue[list[TokenEvent]]


class Machine(PythonGarbage, DiskFiles):
    """Calls `trouble` after each step and before a directory is opened."""

    def __init__(self) -> None:
        PythonGarbage.__init__(self)
        DiskFiles.__init__(self)
        self.after: Callable[[], None] = lambda: None
        self.reading: Callable[[], None] = lambda: None

    def after_step(self) -> None:
        self.after()

    def folder(self, directory: str) -> AbstractContextManager[Folder]:
        self.reading()
        return super().folder(directory)


def ends(error: BaseException) -> Callable[..., Any]:
    def end(*_: object) -> None:
        raise error

    return end


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def replica(tiny_model: Path, machine: Machine) -> Iterator[Running]:
    settings = {**BASE, "model.path": str(tiny_model), "engine.warmup": False}
    one = Running(config.load(None, settings), System(garbage=machine, files=machine))
    yield one
    one.stop()


@pytest.fixture
def path(tmp_path: Path, tiny_spec) -> str:
    return str(_make.make_adapter(tmp_path / "a", tiny_spec, seed=9, r=4, targets=("q", "v")))


def running(replica: Running, name: str) -> Inbox:
    """Submits a long request and waits for its first token."""
    inbox: Inbox = queue.SimpleQueue()
    replica.submit(Request(name, (3, 4, 5), LONG), inbox.put)
    assert inbox.get(timeout=60)[0].token_id is not None
    return inbox


def last(inbox: Inbox) -> TokenEvent:
    while (event := inbox.get(timeout=60)[-1]).finish_reason is None:
        pass
    return event


def has_failed(replica: Running, inbox: Inbox, error: BaseException) -> None:
    """Everyone is told at once, and nothing waits."""
    assert replica.replica.failure.result(60) is error
    assert isinstance(last(inbox).error, Unavailable)
    assert replica.replica.heartbeat_age() == inf
    refused = [
        replica.replica.state(),
        replica.replica.adapters(),
        replica.replica.unload_adapter("a"),
        replica.replica.submit(Request("late", (3, 4), GREEDY), lambda events: None),
    ]
    assert {type(future.exception(60)) for future in refused} == {Unavailable}
    assert replica.replica.drain().result(60)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("step", RuntimeError("device lost")),  # in a command or a wait, it is the caller's affair
        ("step", SystemExit(3)),
        ("command", SystemExit(3)),
        ("wait", SystemExit(3)),
    ],
    ids=repr,
)
def test_whatever_ends_the_engines_thread_is_told_to_all(
    replica: Running, machine: Machine, where: str, error: BaseException
):
    inbox = running(replica, "x")
    if where == "step":
        machine.after = ends(error)
    elif where == "command":
        assert isinstance(replica.local.between_steps(ends(error)).exception(60), Unavailable)
    else:
        assert isinstance(port.when(replica.local, ends(error)).exception(60), Unavailable)
    has_failed(replica, inbox, error)


@pytest.mark.parametrize("half", [False, True])
def test_a_command_that_nobody_reads_may_fail_and_ends_the_engine_if_it_is_left_half_done(
    replica: Running, monkeypatch: pytest.MonkeyPatch, half: bool
):
    inbox = running(replica, "x")
    thing, name = (replica.manager.leases, "release") if half else (replica.parts.scheduler, "abort")
    monkeypatch.setattr(thing, name, ends(RuntimeError("planted")))
    assert replica.abort("x")
    if half:
        assert isinstance(replica.replica.failure.result(60), AssertionError)
        assert isinstance(last(inbox).error, Unavailable)
    else:
        assert last(inbox).finish_reason == "length" and not replica.replica.failure.done()


def test_a_preemption_that_is_left_half_done_ends_the_engine(replica: Running, monkeypatch: pytest.MonkeyPatch):
    inboxes = [running(replica, name) for name in ("x", "y")]

    def lacks_memory(plan: Any, _: Any) -> None:
        raise Undone(None, plan.work, None) from MemoryError("planted")

    monkeypatch.setattr(replica.manager.leases, "release", ends(MemoryError("planted")))
    monkeypatch.setattr(replica.parts.runner, "run", lacks_memory)
    assert isinstance(replica.replica.failure.result(60), AssertionError)
    assert all(isinstance(last(inbox).error, Unavailable) for inbox in inboxes)


def test_a_lane_that_dies_is_told_to_all(replica: Running, path: str, monkeypatch: pytest.MonkeyPatch):
    error = SystemExit(3)
    inbox = running(replica, "x")
    monkeypatch.setattr(replica.parts.runner.pool, "stage", ends(error))
    assert isinstance(replica.replica.load_adapter("a", path).exception(60), Unavailable)  # its copy never lands
    has_failed(replica, inbox, error)


def test_an_idle_engine_whose_lane_dies_is_told_at_once(replica: Running, path: str, monkeypatch: pytest.MonkeyPatch):
    error = SystemExit(3)
    monkeypatch.setattr(replica.parts.runner.pool, "stage", ends(error))
    replica.replica.load_adapter("a", path)
    assert replica.replica.failure.result(60) is error and replica.replica.heartbeat_age() == inf


def test_a_load_that_panics_is_that_loads_affair(replica: Running, machine: Machine, path: str):
    machine.reading = ends(SystemExit(3))
    failed = [replica.replica.load_adapter(f"a{i}", path) for i in range(6)]  # more than there are loaders
    assert {type(load.exception(60)) for load in failed} == {RuntimeError}
    machine.reading = lambda: None
    assert replica.load_adapter("a", path).name == "a"
    assert len(tokens(serve(replica, [Request("x", (3, 4), GREEDY, adapter="a")])["x"])) == 12


def test_a_thread_that_ends_by_itself_is_no_failure():
    threads, told = OsThreads(), []
    threads.watch(lambda name, error: told.append((name, error)))
    threads.start("fine", lambda: None).join()
    error = SystemExit(3)
    threads.start("broken", ends(error)).join()
    assert told == [("broken", error)]


def test_what_asks_for_the_state_or_ends_a_request_waits_for_no_step(replica: Running, machine: Machine):
    """Nor does a drain's time-out: a step may compile for minutes, or hang."""
    inbox = running(replica, "x")
    hangs, go_on = threading.Event(), threading.Event()
    real = replica.parts.runner.run

    def run(plan: Any, swapper: Any) -> Any:
        hangs.set()
        assert go_on.wait(60)
        return real(plan, swapper)

    replica.parts.runner.run = run
    try:
        assert hangs.wait(60)
        waits: Inbox = queue.SimpleQueue()
        submitted = replica.replica.submit(Request("waits", (3, 4), LONG), waits.put)
        state = replica.replica.state().result(10)
        assert state.stats.running == state.stats.live_requests == 1 and state.cache.hbm.running_kv > 0
        assert [replica.replica.abort_named(name).result(10) for name in ("x", "waits", "no")] == [True, True, False]
        assert not replica.replica.drain(timeout_s=0.05).result(10)
        assert not submitted.done()
    finally:
        go_on.set()
    assert last(inbox).finish_reason == "abort"
    assert isinstance(submitted.exception(60), Unavailable)  # the drain came first
    assert replica.replica.drain(timeout_s=60).result(60)
    assert replica.stats().live_requests == 0
