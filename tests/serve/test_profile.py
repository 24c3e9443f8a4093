"""`Control.Profile` and `/debug/profile`: a trace of some steps into a directory that the operator allows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jlora.engine.profiling import LONGEST_S, MOST_STEPS
from jlora.serve.proto import jlora_pb2 as pb
from tests import port
from tests.serve import _server
from tests.serve._server import Served, refused, request

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def profiled(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that may write traces, and where."""
    directory = tmp_path_factory.mktemp("traces")
    with _server.serve(text_model, {"serve.profile_dir": str(directory)}) as served:
        yield served, directory


def beside_steps(served: Served, call: Callable[[], Any]) -> Any:
    """What the call returns, while the engine has something to do."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(call)
        while not made.done():
            served.generate(request("Hello", 8))
    return made.result()


@pytest.mark.slow
def test_a_trace_of_some_steps(profiled: tuple[Served, Path]):
    served, directory = profiled
    made = beside_steps(served, lambda: served.control.Profile(pb.ProfileRequest(steps=5), timeout=LONGEST_S))
    url = f"{served.http}/debug/profile?steps=3"
    answer = beside_steps(served, lambda: httpx.post(url, headers=JSON, timeout=LONGEST_S))
    assert made.steps >= 5 and answer.status_code == 200 and answer.json()["steps"] >= 3, answer.text
    for name in (made.name, answer.json()["name"]):
        assert list((directory / "plugins" / "profile" / name).glob("*.xplane.pb"))
    assert str(directory) not in answer.text
    served.check_idle()


def test_one_at_a_time(profiled: tuple[Served, Path]):
    served, _ = profiled
    first = threading.Thread(target=lambda: served.control.Profile(pb.ProfileRequest(steps=3), timeout=LONGEST_S))
    first.start()  # it waits for steps: nothing runs
    _server.wait_until(lambda: port.profiling(served.replica))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "a profile is being made"):
        served.control.Profile(pb.ProfileRequest(steps=3), timeout=20)
    while first.is_alive():
        served.generate(request("Hello", 8))
    first.join()


def test_a_trace_that_cannot_be_written_names_its_directorys_setting(profiled: tuple[Served, Path], tmp_path: Path):
    """The first one finds a file where its directory was; the next is made as ever."""
    served, directory = profiled
    first = served.control.Profile.future(pb.ProfileRequest(steps=3), timeout=LONGEST_S)
    _server.wait_until(lambda: port.profiling(served.replica))
    kept = directory.rename(tmp_path / "kept")
    directory.write_text("in its way")
    try:
        while not first.done():
            served.generate(request("Hello", 8))
    finally:
        directory.unlink()
        kept.rename(directory)
    assert first.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "serve.profile_dir" in first.details()
    assert str(directory) not in first.details()
    again = beside_steps(served, lambda: served.control.Profile(pb.ProfileRequest(steps=3), timeout=LONGEST_S))
    assert (directory / "plugins" / "profile" / again.name).is_dir()


def test_a_replica_that_has_stopped_is_unavailable(text_model: Path, tmp_path: Path):
    with _server.serve(text_model, {"serve.profile_dir": str(tmp_path)}) as served:
        served.replica.close()
        with refused(grpc.StatusCode.UNAVAILABLE, "the server has stopped"):
            served.control.Profile(pb.ProfileRequest(steps=3), timeout=20)


@pytest.mark.parametrize("steps", [0, -1, MOST_STEPS + 1])
def test_the_number_of_steps_is_checked(profiled: tuple[Served, Path], steps: int):
    served, _ = profiled
    with refused(grpc.StatusCode.INVALID_ARGUMENT, f"steps = {steps}: must be in [1, {MOST_STEPS}]"):
        served.control.Profile(pb.ProfileRequest(steps=steps), timeout=20)
    answer = httpx.post(f"{served.http}/debug/profile?steps={steps}", headers=JSON, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "steps", answer.text


def test_a_server_that_is_no_router_has_no_replica_to_name(profiled: tuple[Served, Path]):
    served, _ = profiled
    with refused(grpc.StatusCode.NOT_FOUND, "replica = 'r0': this server is one replica"):
        served.control.Profile(pb.ProfileRequest(steps=3, replica="r0"), timeout=20)
    answer = httpx.post(f"{served.http}/debug/profile?steps=3&replica=r0", headers=JSON, timeout=20)
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "replica", answer.text


def test_without_a_directory_it_is_refused(served: Served):
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "serve.profile_dir"):
        served.control.Profile(pb.ProfileRequest(steps=3), timeout=20)
    answer = httpx.post(f"{served.http}/debug/profile?steps=3", headers=JSON, timeout=20)
    assert answer.status_code == 400 and "serve.profile_dir" in answer.json()["error"]["message"]
    assert httpx.get(f"{served.http}/debug/profile?steps=3", timeout=20).status_code == 405
