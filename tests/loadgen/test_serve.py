"""`jlora bench serve` against a gRPC server in this process: what it keeps when the server or the disk fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora.cli import main as jlora
from jlora.loadgen import cli, report
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

INFO = pb.ServerInfo(max_model_len=128, vocab=100, block_tokens=4)


@dataclass
class Service(rpc.ControlServicer, rpc.AdaptersServicer, rpc.InferenceServicer):
    """Answers soon. After `silent_after` looks at the cache, the next one fails, or does not return if it `hangs`."""

    names: list[str] = field(default_factory=list)
    silent_after: int = 1 << 30
    hangs: bool = False
    failing: bool = False
    looks: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def GetServerInfo(self, request: Any, context: grpc.ServicerContext) -> pb.ServerInfo:
        return INFO

    def ListAdapters(self, request: Any, context: grpc.ServicerContext) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=[pb.AdapterInfo(name=name, blocks=1) for name in self.names])

    def FlushCache(self, request: Any, context: grpc.ServicerContext) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse()

    def GetCacheState(self, request: Any, context: grpc.ServicerContext) -> pb.CacheState:
        self.looks += 1
        if self.looks > self.silent_after:
            if self.hangs:
                self.ended.wait(30)
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        return pb.CacheState(adapter_lookups=self.looks, adapter_hits=self.looks)

    def GenerateStream(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if self.failing:
            context.abort(grpc.StatusCode.INTERNAL, f"fault {request.session}")
        for left in range(request.stopping.max_tokens, 0, -1):
            time.sleep(0.001)
            usage = pb.Usage(prompt_tokens=1) if left == 1 else None
            yield pb.GenerateResponse(outputs=[pb.Output(token_ids=[7])], usage=usage)


@pytest.fixture(autouse=True)
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than a run."""

    def draw(record: object, path: Path) -> None:
        pass

    monkeypatch.setattr(report, "draw", draw)


@pytest.fixture
def service() -> Service:
    return Service(["sql", "a1"])


@pytest.fixture
def server(service: Service) -> Iterator[str]:
    """HOST:PORT."""
    made = grpc.server(ThreadPoolExecutor(16))
    rpc.add_ControlServicer_to_server(service, made)
    rpc.add_AdaptersServicer_to_server(service, made)
    rpc.add_InferenceServicer_to_server(service, made)
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    yield f"127.0.0.1:{port}"
    service.ended.set()
    made.stop(None).wait()


@pytest.fixture
def argv(server: str, tmp_path: Path) -> list[str]:
    """Of a run of a few requests; a later flag of a test says which."""
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    return ["bench", "serve", "--target", f"here={server}", *folders]


SOME = ["--rate", "40", "--seconds", "1", "--shrink", "16"]


def results(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("*.json"))]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_that_is_gone_at_the_end_leaves_the_figures_of_its_answers(
    hangs: bool,
    service: Service,
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(cli, "CONTROL_S", 0.5)
    service.silent_after, service.hangs = 1, hangs
    assert jlora([*argv, *SOME]) == 0
    (found,) = results(tmp_path)
    sample = found["rounds"][0]["here"]
    assert sample["status"]["OK"] == found["facts"]["requests"] and sample["ttft_s"] > 0
    assert sample["cache"]["adapter_hits"] is sample["cache"]["bytes_in"] is None
    assert "here: after 1 of 1 runs the server did not say what its cache had done." in capsys.readouterr().out


def test_a_server_that_hangs_before_a_run_is_not_waited_for(
    service: Service, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "CONTROL_S", 0.5)
    service.silent_after, service.hangs = 2, True
    assert jlora([*argv, *SOME, "--rounds", "2"]) == 1
    assert "the server failed: DEADLINE_EXCEEDED" in capsys.readouterr().err
    service.silent_after = 1 << 30
    assert jlora([*argv, *SOME, "--rounds", "2"]) == 0
    assert service.looks == 5, "the first round is not measured again"


def test_all_failures_are_counted_and_the_other_kinds_are_told(
    service: Service, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    service.failing = True
    assert jlora([*argv, *SOME]) == 0
    (found,) = results(tmp_path)
    out, count = capsys.readouterr().out, found["facts"]["requests"]
    assert count > 20 and out.count("failed 1 x INTERNAL: fault") == 20
    assert f"here: failed {count - 20} x: {count - 20} more kinds of errors" in out
    head, row = next((a, b) for a, b in zip(out.splitlines(), out.splitlines()[1:], strict=False) if "failed" in a)
    assert row.split()[head.split().index("failed")] == str(count)


def test_results_that_cannot_be_written_are_known_before_the_run(
    service: Service, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "out").write_text("a file")
    assert jlora([*argv, *SOME]) == 1
    assert f"--out {tmp_path / 'out'}: File exists" in capsys.readouterr().err and service.looks == 0


def test_what_was_measured_is_kept_until_it_is_written(
    service: Service, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(record: object, path: Path) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(report, "draw", full)
        jlora([*argv, *SOME])
    assert list((tmp_path / "work").glob("serve-*.jsonl")) and service.looks == 2
    assert jlora([*argv, *SOME]) == 0
    assert service.looks == 2 and not list((tmp_path / "work").glob("serve-*.jsonl"))


def test_another_setting_writes_another_file_and_the_same_one_its_own(argv: list[str], tmp_path: Path):
    for flags in (SOME, [*SOME, "--speed", "2"], SOME):
        assert jlora([*argv, *flags]) == 0
    assert sorted(found["settings"]["pace"]["speed"] for found in results(tmp_path)) == [1, 2]
    assert len(list((tmp_path / "out").glob("serve-W7-*.json"))) == 2


def test_the_base_model_alone_is_measured(service: Service, argv: list[str], tmp_path: Path):
    service.names.clear()
    (tmp_path / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,20,4\n0.1,10,3\n")
    assert jlora([*argv, "--trace", str(tmp_path / "mine.csv")]) == 0
    (found,) = results(tmp_path)
    assert found["rounds"][0]["here"]["status"] == {"OK": 2} and found["settings"]["adapters"] == []


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--rounds", "-1"], "--rounds -1: must be at least 0"),
        (["--warmup", "-1"], "--warmup -1: must be at least 0"),
        (["--warmup", "2"], "--warmup 2: must be at most 0."),
        (["--timeout", "inf"], "--timeout inf: must be above 0, and finite"),
        (["--speed", "inf"], "--speed inf: must be above 0, and finite"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--users", "900"], "--users 900: must be at most "),
    ],
)
def test_a_wrong_number_is_told_before_the_run(
    flags: list[str], says: str, service: Service, argv: list[str], capsys: pytest.CaptureFixture[str]
):
    assert jlora([*argv, *SOME, *flags]) == 1
    assert says in capsys.readouterr().err and service.looks == 0
