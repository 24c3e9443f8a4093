"""Commands, loads and life of the replica in this process."""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jlora import config
from jlora.engine import loaders, local
from jlora.errors import AlreadyExists, DataLoss, NotFound, ResourceExhausted, Unavailable
from jlora.ports import DiskFile, PythonGarbage, System
from jlora.replica import Load
from jlora.types import AdapterInfo, Request, TokenEvent
from tests import _make, port
from tests._disk import Gate
from tests.engine._replica import Running
from tests.engine.test_engine import BASE, GREEDY, running, serve, tokens


class Rounds(PythonGarbage):
    """Counts the rounds of an idle engine."""

    count = 0

    def idle(self) -> None:
        self.count += 1


@pytest.fixture(scope="module")
def disk() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return Rounds()


@pytest.fixture(scope="module")
def replica(tiny_model: Path, disk: Gate, rounds: Rounds) -> Iterator[Running]:
    settings: dict[str, Any] = {**BASE, "model.path": str(tiny_model)}
    one = Running(config.load(None, settings), System(files=disk, garbage=rounds))
    yield one
    one.check_integrity()
    one.stop()


@pytest.fixture
def path(tmp_path: Path, tiny_spec) -> str:
    return str(_make.make_adapter(tmp_path / "a", tiny_spec, seed=9, r=4, targets=("q", "v")))


def test_requests_and_commands_go_on_while_an_adapter_is_read(replica: Running, disk: Gate, path: str):
    disk.shut()
    loading = replica.replica.load_adapter("slow", path)
    assert disk.reached.wait(60)
    assert len(tokens(serve(replica, [Request("x", (3, 4), GREEDY)])["x"])) == 12
    assert replica.stats().live_requests == 0 and replica.adapters() == []
    with pytest.raises(NotFound):
        replica.submit(Request("y", (3, 4), GREEDY, adapter="slow"), lambda events: None)
    disk.open.set()
    assert loading.result(60).name == "slow"
    replica.unload_adapter("slow")


def test_requests_and_commands_go_on_while_an_adapter_is_copied_to_the_host_tier(
    replica: Running, path: str, monkeypatch: pytest.MonkeyPatch
):
    reached, go_on = threading.Event(), threading.Event()
    fill = replica.parts.swapper.fill

    def slow(blocks: tuple[int, ...], data: Any) -> None:
        reached.set()
        assert go_on.wait(60)
        fill(blocks, data)

    monkeypatch.setattr(replica.parts.swapper, "fill", slow)
    loading = replica.replica.load_adapter("slow", path)
    assert reached.wait(60)
    assert len(tokens(serve(replica, [Request("x", (3, 4), GREEDY)])["x"])) == 12
    replica.check_integrity()  # blocks that are being filled have their owner
    go_on.set()
    assert loading.result(60).name == "slow"
    replica.unload_adapter("slow")


def test_of_two_loads_of_one_name_the_second_to_end_is_refused_and_gives_its_blocks_back(
    replica: Running, disk: Gate, path: str
):
    free = replica.cache_state().host.free
    disk.shut()
    loads = [replica.replica.load_adapter("twin", path) for _ in range(2)]
    assert disk.reached.wait(60)
    disk.open.set()
    errors = [load.exception(60) for load in loads]
    assert sorted(map(type, errors), key=str) == sorted([type(None), AlreadyExists], key=str)
    replica.unload_adapter("twin")
    assert replica.cache_state().host.free == free


@pytest.mark.parametrize("stage", ["read", "fill"])
def test_a_load_that_fails_leaves_nothing_behind(
    stage: str, replica: Running, disk: Gate, path: str, monkeypatch: pytest.MonkeyPatch
):
    free = replica.cache_state().host.free
    if stage == "read":
        monkeypatch.setattr(disk, "error", OSError(5, "Input/output error"))
    else:
        monkeypatch.setattr(replica.parts.swapper, "fill", _fail)
    with pytest.raises((NotFound, DataLoss, ResourceExhausted), match="Input/output error|too little memory to read"):
        replica.load_adapter("broken", path)
    assert replica.cache_state().host.free == free and replica.adapters() == []


def cancel_when(
    reached: threading.Event, replica: Running, path: str, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    """Loads an adapter and cancels that once it has come so far; returns when the load has ended."""
    seam, ended = port.loads(replica.local), threading.Event()
    load = getattr(*seam)

    def watched(*args: Any) -> AdapterInfo:
        try:
            return load(*args)
        finally:
            ended.set()

    monkeypatch.setattr(*seam, watched)
    loading = replica.replica.load_adapter("unwanted", path)
    assert reached.wait(60)
    assert loading.cancel()
    go_on.set()
    assert ended.wait(60)


@pytest.mark.parametrize("stage", ["read", "fill"])
def test_a_load_that_its_caller_cancels_is_not_published_and_gives_its_blocks_back(
    stage: str, replica: Running, disk: Gate, path: str, monkeypatch: pytest.MonkeyPatch
):
    free = replica.cache_state().host.free
    fill, reached, go_on = replica.parts.swapper.fill, disk.reached, disk.open
    if stage == "fill":
        reached, go_on = threading.Event(), threading.Event()

        def slow(blocks: tuple[int, ...], data: Any) -> None:
            reached.set()
            assert go_on.wait(60)
            fill(blocks, data)

        monkeypatch.setattr(replica.parts.swapper, "fill", slow)
    else:
        disk.shut()
    cancel_when(reached, replica, path, monkeypatch, go_on)
    assert replica.cache_state().host.free == free and replica.adapters() == []
    replica.check_integrity()


def test_a_load_that_its_caller_cancels_reads_no_more_of_its_file(
    replica: Running, path: str, monkeypatch: pytest.MonkeyPatch
):
    weights = (Path(path) / "adapter_model.safetensors").stat().st_size
    reached, go_on = threading.Event(), threading.Event()
    read, pieces = DiskFile.read, list[int]()

    def slow(file: DiskFile, size: int) -> Any:
        if file.size == weights:
            pieces.append(size)
            if sum(pieces) > weights / 2:
                reached.set()
                assert go_on.wait(60)
        return read(file, size)

    monkeypatch.setattr(loaders, "PIECE", weights // 8)
    monkeypatch.setattr(DiskFile, "read", slow)
    cancel_when(reached, replica, path, monkeypatch, go_on)
    assert weights / 2 < sum(pieces) < weights and replica.adapters() == []


def test_a_load_whose_adapter_is_unloaded_before_the_answer_describes_what_it_loaded(replica: Running, path: str):
    adapters = replica.built.engine.adapters
    publish = adapters.publish

    def gone_at_once(*args: Any) -> AdapterInfo:
        info = publish(*args)
        adapters.remove(info.name)
        return info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "publish", gone_at_once)
        info = replica.load_adapter("brief", path)
    assert (info.name, info.rank) == ("brief", 4)
    assert replica.adapters() == []
    uid = replica.load_adapter("brief", path).uid
    assert uid > info.uid
    assert port.settled(replica.local, info).result(60) == info  # the name stands for another version
    replica.unload_adapter("brief")


def _fail(blocks: tuple[int, ...], data: Any) -> None:
    raise MemoryError("no memory")


def test_a_command_that_its_caller_cancels_first_does_not_run(replica: Running):
    with replica.paused():
        submitted = replica.replica.submit(Request("late", (3, 4), GREEDY), lambda events: None)
        assert submitted.cancel()
    assert replica.stats().live_requests == 0


def test_a_drain_refuses_at_once_and_ends_with_the_last_request(tiny_model: Path):
    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    with running(tiny_model, {}) as replica:
        replica.submit(Request("x", (3, 4), replace(GREEDY, max_tokens=60)), inbox.put)
        assert not replica.replica.drain(timeout_s=0).result(60)
        with pytest.raises(Unavailable, match="draining"):
            replica.submit(Request("y", (3, 4), GREEDY), inbox.put)
        assert replica.replica.drain().result(60)
        assert replica.stats().live_requests == 0


def test_a_drain_with_a_huge_timeout_ends_with_the_last_request(tiny_model: Path):
    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    with running(tiny_model, {}) as replica:
        replica.submit(Request("x", (3, 4), replace(GREEDY, max_tokens=60)), inbox.put)
        drains = [replica.replica.drain(seconds) for seconds in (1e10, 1e300, math.inf, math.nan)]
        assert all(drain.result(60) for drain in drains)
        assert replica.stats().live_requests == 0 and not replica.replica.failure.done()


def test_an_engine_that_fails_ends_requests_commands_and_waits(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    replica = Running(config.load(None, {**BASE, "model.path": str(tiny_model), "engine.warmup": False}))
    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    with replica.paused():
        replica.replica.submit(Request("x", (3, 4), GREEDY), inbox.put)
        monkeypatch.setattr(replica.parts.scheduler, "plan", _die)
    assert replica.replica.drain().result(60)  # while it waits, or afterwards: nothing is live any more
    assert [type(event.error) for event in inbox.get(timeout=60)] == [Unavailable]
    assert "failed" in str(replica.replica.state().exception(60))
    replica.stop()


def test_closing_ends_loads_that_wait_and_refuses_later_ones(tiny_model: Path, path: str):
    disk = Gate()
    replica = Running(
        config.load(None, {**BASE, "model.path": str(tiny_model), "engine.warmup": False}), System(files=disk)
    )
    disk.shut()
    loads = [replica.replica.load_adapter(f"a{i}", path) for i in range(6)]  # more than are read at once
    assert disk.reached.wait(60)
    replica.stop()
    disk.open.set()
    assert {type(load.exception(60)) for load in loads} == {Unavailable}
    assert isinstance(replica.replica.load_adapter("late", path).exception(60), Unavailable)


def _die(now: float) -> None:
    raise RuntimeError("a planted failure")


def test_a_step_that_compiles_is_alive_and_one_that_hangs_is_not(replica: Running):
    with replica.paused():
        while replica.replica.heartbeat_age() < 0.05:
            pass
        replica.parts.runner.compiling = True
        assert replica.replica.heartbeat_age() == 0
        replica.parts.runner.compiling = False
        assert replica.replica.heartbeat_age() >= 0.05


def test_weights_change_between_two_steps_without_a_compilation(tmp_path: Path):
    """The answers are those of an engine that was started with the other weights."""
    paths = []
    for seed in (1, 2):
        _make.make_model(tmp_path / str(seed), seed=seed)
        paths.append(tmp_path / str(seed))
    requests = [Request(f"r{i}", (3, 4 + i, 5), GREEDY, bypass_prefix_cache=True) for i in range(3)]
    answers = []
    for path in paths:
        with running(path, {}, engine__max_seqs=4) as replica:
            answers.append({name: tokens(events) for name, events in serve(replica, requests).items()})
            if path == paths[0]:
                continue
            runner = replica.parts.runner
            first, other = runner.weights, Running(config.load(None, {**BASE, "model.path": str(paths[0])}))
            with replica.paused():
                swapped = runner.swap_weights(other.parts.runner.weights.params)
            got = {name: tokens(events) for name, events in serve(replica, requests).items()}
            with replica.paused():
                runner.swap_weights(first.params)
            again = {name: tokens(events) for name, events in serve(replica, requests).items()}
            with pytest.raises(ValueError, match="params"):
                runner.swap_weights({})
            other.stop()
            assert (first.version, swapped.version, runner.weights.version) == (0, 1, 2)
    assert answers[0] != answers[1] and (got, again) == (answers[0], answers[1])


def test_commands_leave_room_for_steps(replica: Running, rounds: Rounds, monkeypatch: pytest.MonkeyPatch):
    """They run in order, for a limited time in each round of the engine, and at least one."""
    monkeypatch.setattr(local, "COMMANDS_S", 0.0)
    ran: list[tuple[int, int]] = []
    with replica.paused():
        burst = [replica.local.between_steps(lambda i=i: ran.append((i, rounds.count))) for i in range(20)]
    for command in burst:
        command.result(20)
    assert [i for i, _ in ran] == list(range(20))
    assert max(Counter(count for _, count in ran).values()) == 1


def test_what_waits_for_the_engine_goes_when_its_caller_cancels(replica: Running):
    with replica.paused():
        waiting = port.commands(replica.local)
        request = Request("c", (3, 4), GREEDY)
        submitted = [replica.replica.submit(replace(request, id=f"c{i}"), lambda _: None) for i in range(50)]
        assert port.commands(replica.local) == waiting + 50
        assert all(future.cancel() for future in submitted)
        assert port.commands(replica.local) == waiting
        assert not any(replica.abort(f"c{i}") for i in range(50)), "their names are free again"
    assert replica.stats().live_requests == 0


def test_a_live_request_has_one_abort_under_way(replica: Running):
    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    with replica.paused():
        submitted = replica.replica.submit(Request("x", (3, 4), replace(GREEDY, max_tokens=60)), inbox.put)
        waiting = port.commands(replica.local)
        assert all(replica.replica.abort_named("x").result(60) for _ in range(100))
        assert port.commands(replica.local) == waiting + 1
    submitted.result(60)
    assert inbox.get(timeout=60)[-1].finish_reason == "abort"
    assert not replica.abort("x") and replica.stats().live_requests == 0


def test_a_load_that_its_caller_cancels_before_a_loader_takes_it_never_starts(
    replica: Running, disk: Gate, path: str, monkeypatch: pytest.MonkeyPatch
):
    started, seam = [], port.loads(replica.local)
    load = getattr(*seam)

    def watched(answer: Any, wanted: Load) -> AdapterInfo:
        started.append(wanted.name)
        return load(answer, wanted)

    monkeypatch.setattr(*seam, watched)
    disk.shut()
    loads = [replica.replica.load_adapter(f"busy{i}", path) for i in range(loaders.LOADERS)]
    assert disk.reached.wait(60)
    unwanted = [replica.replica.load_adapter(f"unwanted{i}", path) for i in range(20)]
    assert all(answer.cancel() for answer in unwanted)
    last = replica.replica.load_adapter("last", path)
    disk.open.set()
    for answer in (*loads, last):
        replica.unload_adapter(answer.result(60).name)
    assert sorted(started) == sorted([*(f"busy{i}" for i in range(loaders.LOADERS)), "last"])


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
def test_a_program_that_does_not_compile_is_dropped_whatever_the_error(
    replica: Running, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    dropped, runner = [], replica.parts.runner

    def compile_it(form: object) -> None:
        raise error

    monkeypatch.setattr(runner, "compile", compile_it)
    monkeypatch.setattr(runner, "drop", dropped.append)
    form: Any = object()
    port.compile_beside(replica.local, form).result(60)
    replica.stats()
    replica.local.between_steps(lambda: None).result(60)
    assert dropped == [form] and not replica.replica.failure.done()
