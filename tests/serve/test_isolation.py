"""An error at any place of a step, behind the real server: it ends the guilty request, or everyone is told at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora.engine.runner import Dispatched
from jlora.serve.proto import jlora_pb2 as pb
from tests import port
from tests.serve._server import Served, refused, request, serve, wait_until

CODE = grpc.StatusCode
GUILTY = tuple(range(100, 140))  # its prompt
SMALL = {"engine.warmup": False, "engine.one_row": "off"}


def parts(served: Served) -> Any:
    return port.parts(served.replica)


def place(served: Served, where: str) -> tuple[Any, str]:
    """The object and the method that a step reaches there."""
    p = parts(served)
    manager = p.scheduler.manager
    return {
        "sampling": port.sets_up(p.runner),
        "plan": (manager.leases, "grow"),
        "admission": (manager.leases, "acquire"),
        "publication": (manager.leases, "publish"),
        "landed copies": (p.swapper, "landed"),
        "deadlines": (p.scheduler, "expire"),
        "start of copies": (p.swapper, "start"),
        "commit": (p.scheduler, "commit"),
        "versions": (p.registry, "purge"),
        "launch": (p.runner, "run"),
        "read": (Dispatched, "read"),
    }[where]


def is_guilty(served: Served, where: str, args: tuple[Any, ...]) -> bool:
    if where == "sampling":
        return args[0].request.prompt == GUILTY
    if where == "admission":
        return tuple(args[1][: len(GUILTY)]) == GUILTY
    return any(args[0] is one.lease and one.request.prompt == GUILTY for one in parts(served).scheduler.running)


def broken(patch: pytest.MonkeyPatch, found: tuple[Any, str], error: Exception, when: Callable[..., bool]) -> None:
    thing, name = found
    real = getattr(thing, name)

    def call(*args: Any, **named: Any) -> Any:
        if when(*args):
            raise error
        return real(*args, **named)

    patch.setattr(thing, name, call)


def neighbours() -> list[pb.GenerateRequest]:
    """63 requests, most of which wait for a place while the guilty one runs."""
    asked = [request(range(5 + i, 20 + 3 * i), 24, temperature=i % 2, seed=i) for i in range(63)]
    for one, model in zip(asked, ("", "upper", "wide") * 21, strict=True):
        one.model = model
    return asked


@pytest.fixture(scope="module")
def shared(text_model: Path) -> Iterator[Served]:
    paths = {f"adapters.paths.{name}": str(text_model.parent / "adapters" / name) for name in ("upper", "wide")}
    with serve(text_model, {**SMALL, **paths}) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(shared: Served) -> list[Any]:
    return [shared.generate(one).outputs[0].token_ids for one in neighbours()]


@pytest.mark.parametrize("where", ["sampling", "plan", "admission", "publication"])
def test_a_guilty_request_ends_alone(
    shared: Served, undisturbed: list[Any], where: str, monkeypatch: pytest.MonkeyPatch
):
    """Its neighbours' tokens are those of a server that nothing disturbs."""
    broken(monkeypatch, place(shared, where), RuntimeError("planted"), lambda *args: is_guilty(shared, where, args))
    calls = [shared.inference.Generate.future(one, timeout=60) for one in neighbours()]
    with refused(CODE.INTERNAL, "internal error") as error:
        shared.streamed(request(GUILTY, 24))
    assert "planted" not in error.value.details()
    assert [call.result().outputs[0].token_ids for call in calls] == undisturbed
    shared.check_idle()
    assert shared.status() == "SERVING"


def test_a_device_without_memory_costs_the_youngest_its_place_and_nobody_an_answer(
    shared: Served, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
):
    before, launches = shared.stats().preemptions, iter(range(1_000_000))
    seam = port.programs(parts(shared).runner)
    programs = getattr(*seam)

    def forward(*args: Any) -> Any:
        if next(launches) % 7 == 3:
            raise MemoryError("planted")
        return programs.forward(*args)

    monkeypatch.setattr(*seam, programs._replace(forward=forward))
    calls = [shared.inference.Generate.future(one, timeout=60) for one in neighbours()]
    assert [call.result().outputs[0].token_ids for call in calls] == undisturbed
    assert shared.stats().preemptions > before
    shared.check_idle()


@pytest.mark.parametrize(
    "where", ["landed copies", "deadlines", "start of copies", "commit", "versions", "launch", "read"]
)
def test_an_error_of_nobody_is_told_to_all_at_once(text_model: Path, where: str, monkeypatch: pytest.MonkeyPatch):
    """The launcher ends the process with code 70 then, see `test_a_dead_engine_ends_the_process`."""
    now = threading.Event()
    with serve(text_model, SMALL) as own:
        wait_until(lambda: own.status() == "SERVING")
        streams = [own.inference.GenerateStream(request("Hello", 3000)) for _ in range(3)]
        for stream in streams:
            next(stream)
        waits = own.inference.Generate.future(request("Hello", 3000))
        error = RuntimeError("planted")
        broken(monkeypatch, place(own, where), error, lambda *_: now.is_set())
        now.set()
        for ended in (*(lambda stream=stream: list(stream) for stream in streams), waits.result):
            with refused(CODE.UNAVAILABLE, "the engine has failed"):
                ended()
        wait_until(lambda: own.status() == "NOT_SERVING")
        with refused(CODE.UNAVAILABLE, "the engine has failed"):
            own.generate(request())
        assert own.replica.failure.result(0) is error
