"""Replica processes that meet a limit of their memory while they load an adapter, or the model."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.cluster import _processes
from tests.cluster._processes import STOP_S, Service, Stream, service
from tests.cluster._wait import until
from tests.serve import _server

pytestmark = pytest.mark.slow

SPARE = 20 << 20  # bytes: the steps of what is there go on with them, and the large adapter does not fit
# Every array of some size is memory that the system gives, and takes back: so a limit is one.
EXACT = ["cluster.env.MALLOC_MMAP_THRESHOLD_=131072", "cluster.env.MALLOC_ARENA_MAX=2"]
WIDE = {"width": 512, "mlp": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "layers": 4}  # rank 256 has 30 MB
ROOM = {**_processes.SMALL, "cache.hbm_blocks": 1500, "cache.host_blocks": 1500}


def limit(pid: int, spare: int | None) -> None:
    """The process, and those that it starts from now on, get so many bytes more than it has; None: all there are."""
    size = resource.RLIM_INFINITY if spare is None else psutil.Process(pid).memory_info().data + spare
    resource.prlimit(pid, resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


def request(model: str, session: str, tokens: int) -> pb.GenerateRequest:
    made = _server.request(range(5, 25), tokens)
    made.model, made.session = model, session
    return made


def ask(running: Service, model: str, session: str) -> list[int]:
    answer: pb.GenerateResponse = running.inference.Generate(request(model, session, 8), timeout=STOP_S)
    return list(answer.outputs[0].token_ids)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(_processes, "SMALL", ROOM)
    spec = _make.make_model(tmp_path / "model", max_len=512, **WIDE)
    adapters = {
        "small": _make.make_adapter(tmp_path / "small", spec, 1, 4),
        "large": _make.make_adapter(tmp_path / "large", spec, 2, 256, tuple(_make.MODULES)),
    }
    with service(tmp_path / "model", adapters, "--replicas", "2", "--set", *EXACT) as made:
        until(lambda: made.up() == {"r0", "r1"}, "both replicas are up")
        yield made


def test_a_replica_without_memory_loses_neither_requests_nor_the_service(running: Service):
    stream = Stream(running.inference, request("small", "one", 300))
    until(lambda: stream.has(1), "it runs")
    here = running.busiest()
    (there,) = {"r0", "r1"} - {here}
    pid = running.pid(here)

    limit(pid, SPARE)  # of an adapter's load; the steps of what runs may meet it, too
    moved = Stream(running.inference, request("large", "one", 100))
    until(lambda: moved.has(1), "it runs")
    assert running.replicas()[there].sent, "the session's own replica has no room for the adapter"
    large, whole = moved.result()[0][:8], stream.result()
    with suppress(ProcessLookupError):  # its engine had no memory for a step
        limit(pid, None)
    until(lambda: running.up() == {here, there}, "both serve")
    assert ask(running, "large", "one") == large

    limit(running.process.pid, 3 * SPARE)  # of the model's load: the fleet tries again and again
    stream = Stream(running.inference, request("small", "one", 300))
    until(lambda: stream.has(1), "it runs")
    pid = running.pid(here)
    os.kill(pid, signal.SIGKILL)
    failed: set[int] = set()

    def tries() -> bool:
        with suppress(AssertionError):  # between two
            failed.add(running.pid(here))
        return len(failed - {pid}) >= 2

    until(tries, "one has failed, and another one starts")
    assert stream.result() == whole and running.up() == {there}
    limit(running.process.pid, None)
    until(lambda: running.up() == {here, there}, "there is memory again")
    assert ask(running, "large", "two") == large
