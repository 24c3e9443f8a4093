"""Faults within a step: the guilty request ends, a shortage costs the youngest its place, others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jlora import config
from jlora.cache import inspect, residency
from jlora.cache.transfer import Copy
from jlora.cache.tree import AdapterNode
from jlora.engine import faults, shares
from jlora.engine.ports import Undone
from jlora.errors import ResourceExhausted, Unavailable
from jlora.types import Request, TokenEvent
from tests import port
from tests.engine._replica import Running
from tests.engine.test_engine import BASE, GREEDY, SEEDED, mixed, serve, tokens

BAD = "bad"  # the guilty request


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tiny_adapters: dict[str, Path]) -> Iterator[Running]:
    paths = {f"adapters.paths.{name}": str(path) for name, path in tiny_adapters.items()}
    one = Running(config.load(None, {**BASE, "model.path": str(tiny_model), **paths}), blocks=40)
    yield one
    one.stop()


@pytest.fixture
def replica(shared: Running) -> Iterator[Running]:
    """It lives after each test, and nothing is lost."""
    yield shared
    shared.check_integrity()
    state = shared.cache_state()
    assert state.hbm.running_kv == 0 and not shared.stats().live_requests
    assert not shared.replica.failure.done()


def wrapped(monkeypatch: pytest.MonkeyPatch, thing: object, name: str, before: Callable[..., None]) -> None:
    """Calls `before` with the arguments of each call of a method; it may raise."""
    real = getattr(thing, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        return real(*args, **kwargs)

    monkeypatch.setattr(thing, name, call)


def every(count: int, error: Callable[[], Exception]) -> Callable[..., None]:
    """Raises at every so many calls."""
    calls = iter(range(1, 1_000_000))

    def trouble(*_: object) -> None:
        if next(calls) % count == 0:
            raise error()

    return trouble


def short() -> MemoryError:
    return MemoryError("planted")


def _raise(error: Exception) -> None:
    raise error


def exhausted() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")


def same(replica: Running, expected: dict[str, list[int]], *more: Request) -> dict[str, Exception | None]:
    """Serves the mixed requests and these; all others answer as always. How each of `more` ended."""
    got = serve(replica, [*mixed(), *more])
    assert {name: tokens(got[name]) for name in expected} == expected
    return {request.id: got[request.id][-1].error for request in more}


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [short, exhausted])
@pytest.mark.parametrize("program", ["forward", "sample"])
def test_a_launch_that_finds_no_memory_is_dispatched_again(
    replica: Running,
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    error: Callable[[], Exception],
):
    """Whichever launch of a step it is: no token is drawn twice, and none from a wrong state."""
    before, seam = replica.stats().preemptions, port.programs(replica.parts.runner)
    programs = getattr(*seam)
    trouble, real = every(5, error), getattr(programs, program)

    def call(*args: Any) -> Any:
        trouble()
        return real(*args)

    monkeypatch.setattr(*seam, programs._replace(**{program: call}))
    same(replica, expected)
    assert replica.stats().preemptions > before


def test_memory_for_a_few_sequences_serves_them_few_by_few(
    replica: Running,
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
):
    widths = []

    def narrow(plan: Any, _: Any) -> None:
        if len({work.sequence for work in plan.work}) > 2:
            raise Undone(None, plan.work, None) from short()
        widths.append(len(plan.work))

    wrapped(monkeypatch, replica.parts.runner, "run", narrow)
    same(replica, expected)
    assert set(widths) == {1, 2}


def test_a_request_that_finds_no_memory_alone_ends_and_the_others_go_on(
    replica: Running,
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
):
    def greedy(plan: Any, _: Any) -> None:
        guilty = [work.sequence for work in plan.work if work.sequence.request.id == BAD]
        if guilty:
            raise Undone(None, plan.work, guilty[0]) from short()

    wrapped(monkeypatch, replica.parts.runner, "run", greedy)
    ended = same(replica, expected, Request(BAD, tuple(range(3, 60)), GREEDY))
    assert isinstance(ended[BAD], ResourceExhausted)


@pytest.mark.parametrize(
    ("where", "method"),
    [("leases", "grow"), ("leases", "acquire"), ("leases", "streams"), ("manager", "take_copies"), ("cells", "take")],
)
def test_a_plan_that_finds_no_memory_is_made_again(
    replica: Running,
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    method: str,
):
    manager = replica.manager
    thing = {"leases": manager.leases, "manager": manager, "cells": inspect.cells(manager).device}[where]
    wrapped(monkeypatch, thing, method, every(7, short))
    same(replica, expected)


@pytest.mark.parametrize(
    ("where", "count"),
    [*((where, count) for where in ("grow", "acquire", "take", "plan") for count in (1, 2, 3))]
    + [*((where, count) for where in ("streams", "take_copies", "tend", "check_integrity") for count in (2, 3))],
)
def test_shortages_in_a_row_end_requests_at_most(
    replica: Running, expected: dict, monkeypatch: pytest.MonkeyPatch, where: str, count: int
):
    """Each request answers as always, or says that memory was too short for it."""
    manager, scheduler = replica.manager, replica.parts.scheduler
    thing, method = {
        "grow": (manager.leases, "grow"),
        "acquire": (manager.leases, "acquire"),
        "streams": (manager.leases, "streams"),
        "take": (inspect.cells(manager).device, "take"),
        "take_copies": (manager, "take_copies"),
        "tend": (manager, "tend"),
        "plan": port.makes_room(scheduler),
        "check_integrity": (faults.inspect, "check_integrity"),
    }[where]
    with monkeypatch.context() as patch:
        wrapped(patch, thing, method, every(count, short))
        if where == "check_integrity":
            wrapped(patch, manager.leases, "grow", every(3, short))
        for name, events in serve(replica, mixed()).items():
            if events[-1].error is None:
                assert tokens(events) == expected[name]
            else:
                assert isinstance(events[-1].error, ResourceExhausted)
    replica.check_integrity()
    same(replica, expected)


@pytest.mark.parametrize("method", ["take_copies", "tend"])
def test_a_second_shortage_right_after_the_first_ends_nothing(
    replica: Running, expected: dict, monkeypatch: pytest.MonkeyPatch, method: str
):
    calls = iter(range(1_000_000))
    wrapped(monkeypatch, replica.manager, method, lambda *_: _raise(short()) if next(calls) % 10 in (3, 4, 5) else None)
    same(replica, expected)


@pytest.mark.parametrize("where", ["enqueue", "insort"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_submission_that_finds_no_memory_leaves_nothing_behind(
    replica: Running, expected: dict, monkeypatch: pytest.MonkeyPatch, where: str, count: int
):
    """Whichever of its completions it was at."""
    request = Request(BAD, (3, 4, 5), replace(SEEDED, n=4))
    thing = replica.parts.scheduler.queue if where == "enqueue" else shares.bisect
    with replica.paused(), monkeypatch.context() as patch:
        wrapped(patch, thing, where, every(count, short))
        with pytest.raises(MemoryError):
            replica.built.engine.submit(request)
        assert replica.parts.scheduler.waiting == replica.parts.scheduler.live == 0
        inspect.check_integrity(replica.manager)
    assert same(replica, expected, request)[BAD] is None


def test_events_that_nobody_waits_for_are_dropped_and_their_request_ends(replica: Running, expected: dict):
    with replica.paused():
        replica.built.engine.submit(Request(BAD, (3, 4, 5), SEEDED))
    same(replica, expected)


# -- a guilty request ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["sampling", "plan", "admission", "commit"])
def test_what_one_request_breaks_ends_that_request(
    replica: Running,
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
):
    error, leases = RuntimeError("planted"), replica.manager.leases
    guilty = Request(BAD, tuple(range(100, 140)), SEEDED)
    thing, method, is_guilty = {
        "sampling": (*port.sets_up(replica.parts.runner), lambda s: s.request.id == BAD),
        "plan": (leases, "grow", lambda lease, _: lease is lease_of(replica)),
        "admission": (leases, "acquire", lambda origin, prompt, *_: tuple(prompt[:40]) == guilty.prompt),
        "commit": (leases, "publish", lambda lease, *_: lease is lease_of(replica)),
    }[where]

    def trouble(*args: Any) -> None:
        if is_guilty(*args):
            raise error

    wrapped(monkeypatch, thing, method, trouble)
    assert same(replica, expected, guilty)[BAD] is error


def lease_of(replica: Running) -> Any:
    running = (s for s in replica.parts.scheduler.running if s.request.id == BAD)
    return next((s.lease for s in running), object())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_copy_that_fails_ends_the_requests_that_wait_for_it(
    replica: Running,
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
):
    """Whatever the copies carry: adapters, prefixes, prefetches."""
    for _ in range(2):  # with prefixes on the host, too
        failed = 0
        with monkeypatch.context() as broken:
            wrapped(broken, replica.parts.runner.pool, "stage", every(count, lambda: RuntimeError("planted")))
            got = serve(replica, mixed())
        for name, events in got.items():
            if events[-1].error is None:
                assert tokens(events) == expected[name]
            else:
                assert str(events[-1].error) == "planted"
                failed += 1
        assert failed
        replica.check_integrity()
        same(replica, expected)


def test_a_copy_without_memory_is_made_again(replica: Running, expected: dict, monkeypatch: pytest.MonkeyPatch):
    replica.flush_cache()
    wrapped(monkeypatch, replica.parts.runner.pool, "stage", every(3, exhausted))
    for request in mixed():
        assert tokens(serve(replica, [request])[request.id]) == expected[request.id]


@pytest.mark.parametrize("at", [1, 2])
def test_a_step_that_follows_a_copy_without_memory_is_taken_back(
    replica: Running, monkeypatch: pytest.MonkeyPatch, at: int
):
    """Whether or not a part of the copy has come, and the launch of some layers gone out."""
    request = Request("a", tuple(range(3, 12)), GREEDY, adapter="large", bypass_prefix_cache=True)
    others = mixed()[:3]
    expected = serve(replica, [request, *others])
    meter = replica.parts.scheduler.manager.policy.meter
    monkeypatch.setattr(meter, "token_s", 1.0)  # a step may follow any copy, however short
    monkeypatch.setattr(residency, "STREAM_FROM_S", 0.0)
    serve(replica, [Request(f"p{i}", tuple(range(3 + i, 100 + i)), GREEDY) for i in range(8)])
    assert replica.adapter("large").tier == "HOST"
    failed: list[object] = []

    def trouble(*_: object) -> None:
        failed.append(_)
        if len(failed) == at:
            raise exhausted()

    wrapped(monkeypatch, replica.parts.runner.pool, "stage", trouble)
    undone: list[object] = []
    wrapped(monkeypatch, replica.parts.scheduler, "undo", undone.extend)
    got = serve(replica, [request, *others])
    assert {name: tokens(events) for name, events in got.items()} == {n: tokens(e) for n, e in expected.items()}
    assert len(failed) > at and undone
    assert got["a"][-1].timing.cold_start == "wait", "it follows no copy again"


def test_no_step_follows_a_failed_copy_that_stays_while_others_move():
    none: Any = None
    copy = Copy("in", AdapterNode(1, 1), (AdapterNode(1, 1),), (1,), (1,), demand=True, streams=True)
    failing, lost = [(copy, short())], iter([False, True])
    told: list[Copy] = []

    def fail_copy(copy: Copy, error: Exception, now: float) -> list[TokenEvent]:
        told.append(copy)
        return []

    swapper = SimpleNamespace(failed=lambda: [failing.pop()] if failing else [])
    scheduler: Any = SimpleNamespace(fail_copy=fail_copy, manager=SimpleNamespace(lost=lambda copy: next(lost)))
    parts: Any = SimpleNamespace(scheduler=scheduler, swapper=swapper, runner=none, clock=lambda: 0.0)
    trouble = faults.Faults(parts)
    trouble.copies()
    assert not copy.streams
    trouble.copies()
    trouble.copies()
    assert told == [copy, copy], "until its blocks are taken back"


def test_a_prefix_whose_copy_finds_no_memory_is_computed_again(replica: Running, monkeypatch: pytest.MonkeyPatch):
    def ask(name: str, first: int) -> list[TokenEvent]:
        return serve(replica, [Request(name, tuple(range(first, first + 60)), GREEDY)])[name]

    replica.flush_cache()
    expected = tokens(ask("first", 3))
    for other in range(4, 30):
        ask(f"other{other}", other)  # until the prefix is on the host alone
    assert replica.cache_state().host.history_kv > 0
    tried: list[object] = []

    def never(ids: object, _: object) -> None:
        tried.append(ids)
        raise exhausted()

    wrapped(monkeypatch, replica.parts.runner.pool, "stage", never)
    assert tokens(ask("again", 3)) == expected and len(tried) == 1


@pytest.mark.parametrize("where", ["gather", "write"])
def test_a_copy_to_the_host_that_fails_ends_nothing(
    replica: Running,
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
):
    thing = replica.parts.runner.pool if where == "gather" else replica.parts.swapper.host
    wrapped(monkeypatch, thing, where, every(2, lambda: OSError("planted")))
    for _ in range(3):
        same(replica, expected)


def test_a_failed_copy_of_a_pinned_adapter_unpins_it(replica: Running, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as broken:
        serve(replica, [Request(f"p{i}", tuple(range(3 + i, 100 + i)), GREEDY) for i in range(8)])
        assert replica.adapter("small").tier == "HOST"
        wrapped(broken, replica.parts.runner.pool, "stage", every(1, lambda: RuntimeError("planted")))
        assert not replica.pin_adapter("small", True).pinned
    assert replica.pin_adapter("small", True).tier == "HBM"
    replica.pin_adapter("small", False)


# -- what cannot go on --------------------------------------------------------------------------


def test_a_lost_pool_or_an_inconsistent_cache_ends_the_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    for what in ("pool", "cache"):
        replica = Running(config.load(None, {**BASE, "model.path": str(tiny_model), "engine.warmup": False}))

        def trouble(*_: object, what: str = what, replica: Running = replica) -> None:
            if what == "pool":
                replica.parts.runner.pool.array.delete()
            else:
                inspect.cells(replica.manager).device.used[0] += 1
            raise short()

        wrapped(monkeypatch, replica.parts.runner.builder, "launches", trouble)
        event = serve(replica, [Request("x", (3, 4), GREEDY)])["x"][-1]
        assert isinstance(event.error, Unavailable) and replica.replica.failure.done()
        port.end_threads(replica.local)
        replica.parts.swapper.close()
