"""Health, reflection, loading, draining and internal errors, as a supervisor or a proxy sees them."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jlora import cli
from jlora.cache.pool import DevicePool
from jlora.config import ServeConfig
from jlora.errors import InvalidArgument
from jlora.ports import PythonGarbage, System
from jlora.serve import server
from jlora.serve.access.caller import ANYBODY
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.server import SERVICES
from jlora.serve.services import InferenceServicer
from jlora.serve.status import DeadlineExceeded
from tests import port
from tests.serve._server import Served, refused, request, serve, serving, wait_until

CODE = grpc.StatusCode
NOTHING = pb.GetCacheStateRequest()


def test_health_answers_for_the_whole_and_each_service(served: Served):
    assert set(SERVICES) == {"jlora.v1.Inference", "jlora.v1.Adapters", "jlora.v1.Control"}
    wait_until(lambda: served.status() == "SERVING")
    assert [served.status(name) for name in SERVICES] == ["SERVING"] * 3
    with refused(CODE.NOT_FOUND):
        served.status("no.such.Service")


def test_while_loading_the_port_answers_unavailable(served: Served):
    backend = Backend()
    with serving(backend) as early:
        assert early.status() == "NOT_SERVING"
        for call in (
            lambda: early.generate(request()),
            lambda: list(early.inference.GenerateStream(request())),
            lambda: early.adapters.ListAdapters(pb.ListAdaptersRequest()),
            lambda: early.control.GetServerInfo(pb.GetServerInfoRequest()),
        ):
            with refused(CODE.UNAVAILABLE, "loading"):
                call()
        backend.replica = served.replica
        wait_until(lambda: early.status() == "SERVING")
        assert len(early.generate(request()).outputs[0].token_ids) == 8


def test_a_command_asks_for_health_as_a_probe_does(served: Served, capsys: pytest.CaptureFixture[str]):
    backend = Backend()
    with serving(backend) as early:
        assert cli.main(["health", early.address]) == 1
        assert cli.main(["health", early.address, "--live"]) == 0
        backend.replica = served.replica
        wait_until(lambda: cli.main(["health", early.address]) == 0)
        assert capsys.readouterr().out.split()[:2] == ["NOT_SERVING", "SERVING"]
    assert cli.main(["health", early.address]) == 1
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_clients_reach_a_server_past_the_proxy_that_the_environment_names(
    served: Served, monkeypatch: pytest.MonkeyPatch, variable: str
):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.0)
        monkeypatch.setenv(variable, "http://{}:{}".format(*proxy.getsockname()))
        assert cli.main(["health", served.address, "--timeout", "20"]) == 0
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_reflection_lists_the_services(served: Served):
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="jlora.v1.Inference"),
    ]
    listed, file = stub.ServerReflectionInfo(iter(asked))
    names = {service.name for service in listed.list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
    assert file.file_descriptor_response.file_descriptor_proto[0] == pb.DESCRIPTOR.serialized_pb


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_our_own_bug_is_internal_with_an_id_that_the_log_has(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
):
    def broken(*_: object) -> None:
        raise RuntimeError("secret prompt in /secret/path")

    monkeypatch.setattr(served.replica, "submit", broken)
    with caplog.at_level(logging.ERROR, "jlora"), refused(CODE.INTERNAL, "internal error") as error:
        served.generate(request()) if method == "Generate" else list(served.inference.GenerateStream(request()))
    found = re.search(r"internal error ([0-9a-f]{12})", error.value.details())
    assert found and "secret" not in error.value.details()
    record = next(r for r in caplog.records if found[1] in r.getMessage())
    assert f"/jlora.v1.Inference/{method}" in record.getMessage()
    assert record.exc_info and "secret prompt" in str(record.exc_info[1])


def test_what_is_not_a_message_is_the_clients_mistake(served: Served):
    for method in ("Generate", "Tokenize"):
        raw = served.channel.unary_unary(f"/jlora.v1.Inference/{method}")
        with refused(CODE.INVALID_ARGUMENT, "not a valid protobuf message"):
            raw(b"\x1a\xff\xff")
    text_that_is_not_utf8 = b"\x1a\x02\xff\xfe"
    with refused(CODE.INVALID_ARGUMENT):
        list(served.channel.unary_stream("/jlora.v1.Inference/GenerateStream")(text_that_is_not_utf8))
    with refused(CODE.UNIMPLEMENTED):
        served.channel.unary_unary("/jlora.v1.Inference/NoSuchMethod")(b"")


def test_a_deadline_that_has_passed_is_told_at_once(served: Served):
    """A client refuses to send such a call, but a proxy or a slow network may deliver one."""

    class Late:
        caller = ANYBODY

        def time_remaining(self) -> float:
            return -0.001

    with pytest.raises(DeadlineExceeded, match="had passed"):
        asyncio.run(InferenceServicer(served.backend).Generate(request(), Late()))  # type: ignore[arg-type]
    served.check_idle()


def test_an_error_that_finds_its_call_ended_is_told_to_nobody(served: Served, caplog: pytest.LogCaptureFixture):
    """gRPC's library would log it as a failure of the handler."""

    class Gone:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("the call has ended")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(port.abort_call(Gone(), DeadlineExceeded("late"), "m"))  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, "grpc"):
        calls = [served.inference.Generate.future(request("Hello"), timeout=i % 10 / 1000) for i in range(300)]
        assert {call.code() for call in calls} <= {CODE.OK, CODE.DEADLINE_EXCEEDED, CODE.RESOURCE_EXHAUSTED}
        served.check_idle()
    assert not caplog.records


@pytest.fixture
def own(text_model: Path) -> Iterator[Served]:
    """A server that the test may break."""
    with serve(text_model, {"engine.warmup": False, "serve.heartbeat_s": 0.5}) as running:
        wait_until(lambda: running.status() == "SERVING")
        yield running


class Failing(PythonGarbage):
    """The engine's thread ends with `error` after a step, once that is set."""

    error: BaseException | None = None

    def after_step(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("device lost"), SystemExit(0)], ids=lambda e: type(e).__name__)
def test_a_dead_engine_is_told_to_its_clients_and_to_health(text_model: Path, error: BaseException):
    machine = Failing()
    settings = {"engine.warmup": False, "serve.heartbeat_s": 600}
    with serve(text_model, settings, System(garbage=machine)) as own:
        wait_until(lambda: own.status() == "SERVING")
        streams = [own.inference.GenerateStream(request("Hello", 3000)) for _ in range(3)]
        waiting = own.inference.Generate.future(request("Hello", 3000))
        for stream in streams:
            next(stream)
        machine.error = error
        for stream in streams:
            with refused(CODE.UNAVAILABLE, "failed"):
                list(stream)
        for call in (waiting.result, lambda: own.generate(request()), lambda: own.control.GetCacheState(NOTHING)):
            with refused(CODE.UNAVAILABLE, "failed"):
                call()
        wait_until(lambda: own.status() == "NOT_SERVING")
        assert own.control.Drain(pb.DrainRequest()).drained
    assert own.replica.failure.result(0) is error


def test_a_copy_that_fails_is_told_to_its_own_client_and_the_log(
    served: Served, text_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The adapter's copy to the device fails: requests for it end, a stream beside them goes on."""
    stage, broken = DevicePool.stage, threading.Event()

    def fails(pool: DevicePool, *args: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("a planted failure of the link")
        return stage(pool, *args)

    monkeypatch.setattr(DevicePool, "stage", fails)
    neighbour = served.inference.GenerateStream(request("Hello", 3000))
    next(neighbour)
    broken.set()
    path = str(text_model.parent / "adapters" / "upper")
    served.adapters.LoadAdapter(pb.LoadAdapterRequest(name="cold", path=path))
    with caplog.at_level(logging.ERROR, "jlora"), refused(CODE.INTERNAL, "internal error") as error:
        served.generate(request("Hello", model="cold"))
    found = re.search(r"internal error ([0-9a-f]{12})", error.value.details())
    assert found and "planted" not in error.value.details()
    record = next(r for r in caplog.records if found[1] in r.getMessage())
    assert record.exc_info and "planted" in str(record.exc_info[1])
    broken.clear()
    assert len(served.generate(request("Hello", model="cold")).outputs[0].token_ids) == 8
    next(neighbour)
    neighbour.cancel()
    served.adapters.UnloadAdapter(pb.UnloadAdapterRequest(name="cold"))
    served.check_idle()
    assert served.status() == "SERVING"


class Panic(BaseException):
    """What a panic in a tokenizer written in Rust looks like."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), SystemExit(0), MemoryError()], ids=repr)
def test_a_tokenizer_that_panics_ends_its_own_call(served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception):
    def panic(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(type(served.backend.tokenizer), "encode", panic)
        for text in ("Hello", "Hello" * 2000):  # on the event loop, and on a thread
            with refused(CODE.INTERNAL, "internal error"):
                served.inference.Tokenize(pb.TokenizeRequest(text=text), timeout=10)
            with refused(CODE.INTERNAL, "internal error"):
                list(served.inference.GenerateStream(request(text), timeout=10))
    assert len(served.generate(request("Hello")).outputs[0].token_ids) == 8


class Stuck(PythonGarbage):
    """The engine's thread waits for `free` before its next step."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def after_step(self) -> None:
        self.free.wait()


@pytest.mark.slow
def test_a_compilation_keeps_health_serving_and_a_stuck_engine_does_not(text_model: Path):
    """Without warm-up the first requests compile, for longer than the heartbeat."""
    machine, seen = Stuck(), set()
    settings = {"engine.warmup": False, "serve.heartbeat_s": 0.3, "cache.hbm_blocks": 701}  # a shape of its own
    with serve(text_model, settings, System(garbage=machine)) as own:
        wait_until(lambda: own.status() == "SERVING")
        call = own.inference.Generate.future(request("Hello", 8))
        while not call.done():
            seen.add(own.status())
        assert seen == {"SERVING"} and len(call.result().outputs[0].token_ids) == 8
        stream = own.inference.GenerateStream(request("Hello", 3000))
        next(stream)
        watch = own.health.Watch(health_pb2.HealthCheckRequest(service="jlora.v1.Inference"), timeout=20)
        machine.free.clear()
        assert any(seen.status == health_pb2.HealthCheckResponse.NOT_SERVING for seen in watch)
        assert own.status() == own.status(server.LIVE) == "NOT_SERVING" and not own.backend.live
        assert httpx.get(f"{own.http}/live", timeout=20).status_code == 503
        machine.free.set()
        assert any(seen.status == health_pb2.HealthCheckResponse.SERVING for seen in watch)
        watch.cancel()
        stream.cancel()


def test_a_client_that_watches_health_holds_up_no_end():
    """Clients with health checks of their own watch for as long as they are connected."""
    asked = health_pb2.HealthCheckRequest(service=server.LIVE)

    async def watched() -> tuple[list[int], float]:
        own = server.GrpcServer(Backend(), ServeConfig())
        port = own.bind("127.0.0.1", 0)
        await own.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            said: Any = aiter(health_pb2_grpc.HealthStub(channel).Watch(asked))
            told, began = [(await anext(said)).status], time.monotonic()
            stopping = asyncio.create_task(own.stop(20.0))
            told += [each.status async for each in said]  # it ends without an error
            await stopping
            return told, time.monotonic() - began

    told, took = asyncio.run(watched())
    assert told == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING] and took < 15


def test_time_in_which_the_process_was_stopped_is_no_stall(text_model: Path, monkeypatch: pytest.MonkeyPatch):
    """Loop and engine stand still together, as between SIGSTOP and SIGCONT, and the health watch wakes first."""
    machine = Stuck()
    heartbeat_s = 1.2
    settings = {"engine.warmup": False, "serve.heartbeat_s": heartbeat_s}
    with serve(text_model, settings, System(garbage=machine)) as own:
        stream = own.inference.GenerateStream(request("Hello", 3000))
        next(stream)
        wait_until(lambda: own.status() == "SERVING")

        def stopped(*_: object) -> None:
            time.sleep(1.5 * heartbeat_s)
            raise InvalidArgument("model: was stopped")

        monkeypatch.setattr(Backend, "adapter_of", stopped)
        machine.free.clear()
        with refused(CODE.INVALID_ARGUMENT, "was stopped"):
            own.generate(request())
        assert own.status() == "SERVING"
        wait_until(lambda: own.status() == "NOT_SERVING")  # the engine is stuck all the same
        machine.free.set()
        wait_until(lambda: own.status() == "SERVING")
        info = own.control.GetServerInfo(pb.GetServerInfoRequest())
        assert info.longest_loop_gap_s > heartbeat_s and info.longest_engine_gap_s > heartbeat_s
        stream.cancel()


def test_health_turns_at_the_next_look(served: Served, monkeypatch: pytest.MonkeyPatch):
    assert server.PERIOD_S <= 0.05, "a tenth of a second is promised, with a look under way"
    backend, seen = Backend(served.replica), []

    def noted(gap: float) -> None:  # once in each round of the watch
        seen.append((backend.draining, backend.serving))

    monkeypatch.setattr(backend.gaps, "note", noted)
    with serving(backend) as front:
        wait_until(lambda: front.status() == "SERVING")
        backend.draining = True
        wait_until(lambda: front.status() == "NOT_SERVING")
        assert front.status(server.LIVE) == "SERVING"
    assert seen.count((True, True)) <= 1


def test_drain_refuses_new_requests_and_waits_for_live_ones(own: Served):
    stream = own.inference.GenerateStream(request("Hello", 800))
    next(stream)
    assert not own.control.Drain(pb.DrainRequest(timeout_s=0)).drained
    with refused(CODE.UNAVAILABLE, "draining"):
        own.generate(request())
    wait_until(lambda: own.status() == "NOT_SERVING", timeout_s=5)
    assert own.control.GetServerInfo(pb.GetServerInfoRequest()).draining
    waiting = own.control.Drain.future(pb.DrainRequest())
    assert list(stream)[-1].usage.completion_tokens == 800
    assert waiting.result(timeout=10).drained
