"""A replica is ready with the largest programs; the others compile beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path

import pytest

from jlora import config
from jlora.cache.pool import DevicePool
from jlora.engine import device
from jlora.engine.batch import Form, Launch
from jlora.engine.compiles import COMPILES
from jlora.engine.plan import StepPlan
from jlora.layout import PoolLayout
from jlora.memory import Memory
from jlora.model.spec import ModelSpec
from jlora.ports import OsThreads, PythonGarbage, System
from jlora.types import Request, SamplingParams
from tests import _make, port
from tests.engine._replica import Running
from tests.engine.test_engine import BASE, GREEDY, TABLES, serve, tokens


class Held(Executor):
    """Runs what was submitted, in order, when a test says so; calls may be made to fail instead."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable, tuple]] = []
        self.memory = 1 << 40  # bytes left

    def submit(self, fn: Callable, /, *args, **kwargs) -> Future:
        self.calls.append((fn, args))
        return Future()

    def run(self, count: int) -> None:
        """On a thread of its own, as a pool would; also calls that these submit."""

        def work() -> None:
            for _ in range(count):
                if self.calls:
                    fn, args = self.calls.pop(0)
                    fn(*args)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.calls.clear()


class HeldThreads(OsThreads):
    def __init__(self) -> None:
        super().__init__()
        self.compiler = Held()

    def pool(self, name: str, size: int) -> Executor:
        return self.compiler if name == "jlora-compile" else super().pool(name, size)


class Counted(PythonGarbage):
    """Counts how often everything counts as loaded."""

    loaded = 0

    def begin(self) -> None:
        self.loaded += 1


Served = tuple[Running, Held]


@pytest.fixture
def served(request: pytest.FixtureRequest, own_programs, tiny_model: Path, tiny_spec, tmp_path: Path):
    path = _make.make_adapter(tmp_path / "a", tiny_spec, seed=9, r=4, targets=("q", "v", "o"))
    threads = HeldThreads()
    sizes = {"engine.max_step_tokens": 64, "model.tp": getattr(request, "param", 1)}
    settings = {**BASE, **sizes, "model.path": str(tiny_model), "adapters.paths.a": str(path)}
    system = System(threads=threads, garbage=Counted(), memory=Memory(lambda: threads.compiler.memory))
    replica = Running(config.load(None, settings), system, warm=False)
    yield replica, threads.compiler
    replica.check_integrity()
    replica.stop()


def traffic(name: str) -> list[Request]:
    """Prompts of every size, with and without an adapter, log-probabilities and penalties."""
    scored = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    kinds: list[SamplingParams] = [GREEDY, scored, TABLES]
    return [
        Request(f"{name}{i}", tuple(range(3, 9 + 7 * i)), kinds[i % 3], adapter="a" if i % 2 else None)
        for i in range(6)
    ]


def answers(replica: Running, name: str) -> list[list[int]]:
    """One after the other, then all at once."""
    alone = [tokens(serve(replica, [r])[r.id]) for r in traffic(name)]
    together = serve(replica, traffic(name + "t"))
    return alone + [tokens(together[r.id]) for r in traffic(name + "t")]


@pytest.mark.slow
@pytest.mark.parametrize("served", [1, 2], indirect=True, ids=["one device", "two devices"])
def test_the_largest_programs_serve_everything_until_the_others_are_there(served: Served):
    replica, compiler = served
    left = replica.stats().programs_left
    assert left > 1 and not port.streams(replica.manager)

    first = answers(replica, "before")
    compiler.run(left // 2)
    assert replica.stats().programs_left == replica.local.programs_left == left - left // 2
    assert answers(replica, "between") == first
    garbage = port.system(replica.local).garbage
    assert isinstance(garbage, Counted) and garbage.loaded == 1
    compiler.run(left)
    assert replica.local.warm().result(60) and port.streams(replica.manager)
    assert garbage.loaded == 2, "what the programs left behind is kept out of later collections"
    assert answers(replica, "after") == first

    stats = replica.stats()
    assert stats.programs_left == 0 and stats.compiles_after_warmup == 0


def test_a_program_that_a_step_compiles_is_counted(served: Served):
    """Otherwise 0 elsewhere would say nothing, for example once jax gives its event another name."""
    replica, compiler = served
    for left in replica.built.runner.left:
        replica.built.runner.admit(left)  # nobody has compiled it
    compiler.calls.clear()
    assert replica.stats().compiles_after_warmup == 0
    assert len(answers(replica, "x")) == 12
    assert replica.stats().compiles_after_warmup > 0


def test_a_program_that_does_not_compile_is_left_to_a_larger_one(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    replica, compiler = served
    left = replica.stats().programs_left
    with monkeypatch.context() as patched:
        patched.setattr(replica.built.runner, "compile", lambda left: 1 / 0)
        compiler.run(left + 1)
    assert replica.local.warm().result(60) and not port.streams(replica.manager), "no program runs a group of layers"
    assert caplog.text.count("does not compile; a larger form stands in") == left
    assert len(answers(replica, "x")) == 12 and replica.stats().compiles_after_warmup == 0


def test_no_program_compiles_where_memory_is_short(served: Served, caplog: pytest.LogCaptureFixture):
    replica, compiler = served
    left, said = replica.stats().programs_left, "a larger form stands in for it: less than 256 MiB of memory are left"
    compiler.memory = 1 << 20
    compiler.run(left + 1)
    assert replica.local.warm().result(60) and caplog.text.count(said) == left and "Traceback" not in caplog.text
    assert len(answers(replica, "x")) == 12 and replica.stats().compiles_after_warmup == 0


def test_a_replica_whose_groups_do_not_open_is_warm(served: Served, monkeypatch, caplog: pytest.LogCaptureFixture):
    """Once it waited for ever, for example when a rehearsal failed."""
    replica, compiler = served
    monkeypatch.setattr(replica.manager, "stream", lambda: 1 / 0)
    compiler.run(replica.stats().programs_left + 1)
    assert replica.local.warm().result(60) and not port.streams(replica.manager)
    assert "ZeroDivisionError" in caplog.text and len(answers(replica, "x")) == 12


@pytest.mark.slow
def test_a_request_of_the_base_runs_without_adapters_from_the_first_step_where_such_programs_are(
    own_programs, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU, where the others compile for minutes."""
    monkeypatch.setattr(device, "has_bare", lambda platform: True)
    settings = {**BASE, "model.path": str(tiny_model)}
    replica = Running(config.load(None, settings), System(threads=HeldThreads()), warm=False)
    decoded: list[Form] = []
    builder = replica.parts.runner.builder
    launches = builder.launches

    def noted(plan: StepPlan) -> list[Launch]:
        made = launches(plan)
        decoded.extend(launch.form for launch in made if launch.form.chunk == 1)
        return made

    monkeypatch.setattr(builder, "launches", noted)
    try:
        assert len(tokens(serve(replica, [Request("x", (3, 4, 5), GREEDY)])["x"])) == GREEDY.max_tokens
        assert set(decoded) == {Form(4, 1, bare=True)} and replica.stats().compiles_after_warmup == 0
    finally:
        replica.stop()


@pytest.mark.parametrize(("tp", "ahead"), [(1, True), (2, True), (1, False)])
def test_copies_compile_before_there_is_a_pool_and_not_again(own_programs, tiny_spec: ModelSpec, tp: int, ahead: bool):
    layout = PoolLayout.of(tiny_spec, 300, 16, tp)
    prepared = device.prepare(config.load(None, {"model.tp": tp}), tiny_spec, layout, lambda uid: ())
    if ahead:
        compiler = Held()
        prepared.ahead.begin(prepared.builder, compiler)
        compiler.run(3)
    pool = DevicePool(layout, prepared.mesh, prepared.ahead.programs, prepared.groups)
    before = COMPILES.count
    pool.warm_up()
    assert (COMPILES.count == before) == ahead and pool.pieces == (16, 4, 1)
