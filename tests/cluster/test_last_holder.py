"""The process that alone had an adapter is killed, and the adapter's files are gone."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import grpc
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.cluster._processes import STOP_S, Stream, service
from tests.cluster._wait import gone, until
from tests.serve import _server

pytestmark = pytest.mark.slow


def test_its_requests_fail_by_name_until_the_files_are_back_and_others_go_on(tiny_model: Path, tmp_path: Path):
    spec = _make.tiny_spec()
    files = _make.make_adapter(tmp_path / "own", spec, 1, 4)
    kept = _make.make_adapter(tmp_path / "kept", spec, 2, 4)
    with service(tiny_model, {"kept": kept}, "--replicas", "1") as running:

        def ask(model: str) -> list[list[int]]:
            asked = _server.request(range(5, 25), 40, temperature=0.9, seed=17)
            asked.model = model
            return Stream(running.inference, asked).result()

        running.adapters.LoadAdapter(pb.LoadAdapterRequest(name="own", path=str(files)), timeout=STOP_S)
        expected = {model: ask(model) for model in ("own", "kept")}
        shutil.move(files, tmp_path / "away")
        assert ask("own") == expected["own"], "it is in memory"

        pid = running.pid("r0")
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid) and not running.up(), "the router has lost it")
        until(lambda: running.up() == {"r0"}, "another process serves")
        with _server.refused(grpc.StatusCode.NOT_FOUND, "own"):
            ask("own")
        assert ask("kept") == expected["kept"]
        shutil.move(tmp_path / "away", files)
        assert ask("own") == expected["own"]
