"""The serving process: its message when it cannot start, and how it starts, drains and ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jlora import config as configuration
from jlora.config import ServeConfig
from jlora.engine.local import LocalReplica
from jlora.errors import ConfigError, InvalidArgument, JloraError
from jlora.serve import flags, launcher
from jlora.serve.access import keys
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.serve.server import GrpcServer
from tests.serve._process import ROOT, process, ready
from tests.serve._server import SMALL, listening, refused, request, wait_until, write_text_model

CODE = grpc.StatusCode


# -- cannot start -------------------------------------------------------------------------------


def started(argv: list[str]) -> str:
    """Serves until the failure that must come; its message, which is one line."""
    port = [] if "--port" in argv else ["--port", "0"]
    with pytest.raises(JloraError) as e:
        asyncio.run(launcher.serve(flags.parse([*port, *argv])))
    assert "\n" not in str(e.value)
    return f"{type(e.value).__name__}: {e.value}"


def test_a_taken_port_is_told_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch):
    read = []
    monkeypatch.setattr(launcher, "load", read.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = started(["--model", "x", "--port", str(port)])
        assert f"cannot listen on 127.0.0.1:{port}" in said and "--port 0 takes a free port" in said
        assert started(["--model", "/no/model", "--port", str(port)]).startswith("NotFound: model.path = '/no/model'")
    assert "serve.port" in started(["--model", "x", "--host", "203.0.113.7", "--insecure"])
    assert not read


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "0.0.0.0", "::"])
def test_a_taken_port_is_one_line(host: str):
    """gRPC's core would write another one."""
    bare = host.strip("[]")
    try:
        taken = socket.create_server((bare, 0), family=socket.AF_INET6 if ":" in bare else socket.AF_INET)
    except OSError as e:
        pytest.skip(f"no {host} here: {e}")
    if host == "localhost":
        family = [info[0] for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
        if socket.AF_INET6 in family:
            pytest.skip("its other address is free")
    with taken:
        argv = ["--model", "x", "--insecure", "--host", host, "--port", str(taken.getsockname()[1])]
        with process(argv) as server:
            said = server.communicate(timeout=60)[1].splitlines()
    assert server.returncode == 1 and "cannot listen on" in said[-1]
    assert [line for line in said if " WARNING " not in line] == said[-1:]


def test_two_servers_cannot_share_a_port():
    """The kernel would allow it, and half of the requests would go to the wrong one."""

    async def both() -> None:
        first, second = GrpcServer(Backend(), ServeConfig()), GrpcServer(Backend(), ServeConfig())
        port = first.bind("127.0.0.1", 0)
        await first.start()
        with pytest.raises(ConfigError, match="serve.port"):
            second.bind("127.0.0.1", port)
        await first.stop(0)

    asyncio.run(both())


def test_a_bad_model_path_is_named(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert "/no/such/dir" in started(["--model", "/no/such/dir"])
    assert "config.json" in started(["--model", str(tmp_path / "empty")])
    (tmp_path / "empty" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    assert "gpt2" in started(["--model", str(tmp_path / "empty")]).lower()


def test_a_model_that_does_not_fit_says_what_it_needs_and_which_key_to_change(text_model: Path):
    said = started(["--model", str(text_model), "--set", "cache.hbm_blocks=1000000000"])
    assert said.startswith("ConfigError: model does not fit")
    assert re.search(r"need [\d.]+ GiB of the [\d.]+ GiB free", said) and "cache.hbm_blocks" in said


@pytest.mark.parametrize("name", ["a b", "a:b", "a\nb", " ", "\u00a0", "a\x00", "x" * 257])
def test_a_name_that_clients_could_not_use_is_refused(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        flags.parse(["--model", "x", "--served-model-name", name])
    assert e.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("jlora serve: model.name = ") and said.count("\n") == 1 and "':'" in said


@pytest.mark.parametrize("name", ["org/model-7b", "/models/llama_3.1", "模型", "x" * 256])
def test_other_names_serve_the_base(name: str):
    assert flags.parse(["--model", "x", "--served-model-name", name]).model.name == name


def test_a_directory_whose_name_clients_could_not_use_needs_another_name(text_model: Path, tmp_path: Path):
    shutil.copytree(text_model, tmp_path / "my model")
    said = started(["--model", str(tmp_path / "my model")])
    assert said.startswith("ConfigError: model.name = 'my model'") and "--served-model-name" in said


def test_a_broken_adapter_is_named_with_the_reason(text_model: Path, tmp_path: Path, quick: list[str]):
    directory = tmp_path / "adapters" / "broken"
    shutil.copytree(text_model.parent / "adapters" / "upper", directory)
    (directory / "adapter_model.safetensors").unlink()
    said = started(["--model", str(text_model), "--adapter-dir", str(tmp_path / "adapters"), *quick])
    assert said.startswith("NotFound: adapter broken: ")


def test_a_failure_is_one_line_and_exit_code_1():
    done = subprocess.run(
        [sys.executable, "-m", "jlora.serve", "--model", "/no/such/dir", "--port", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "jlora serve: cannot start: model.path = '/no/such/dir': is not a directory\n"


# -- start, serve, end --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def quick() -> list[str]:
    """Flags of a small server that compiles only what it needs."""
    settings = {**SMALL, "engine.warmup": False, "serve.compile_cache": "auto"}
    return ["--set", *(f"{key}={value}" for key, value in settings.items())]


def wait_for(stream: IO[str] | None, word: str) -> None:
    """Reads until `word`."""
    assert stream is not None
    text = ""
    while word not in text:
        piece = stream.read(1)
        assert piece, f"ended after {text!r}"
        text += piece


def test_ready_serve_drain_exit(text_model: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch):
    """SIGTERM: running requests end, new ones are refused, the exit code is 0."""
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(f"\0jlora {os.getpid()}")
    systemd.settimeout(60)
    monkeypatch.setenv("NOTIFY_SOCKET", f"@jlora {os.getpid()}")
    argv = ["--model", str(text_model), "--adapter-dir", str(text_model.parent / "adapters"), "--port", "0", *quick]
    with process([*argv, "--served-model-name", "named"]) as server:
        line = ready(server)
        assert (line["model"], line["adapters"]) == ("named", "3") and line["http"] is None
        assert int(line["blocks"]) == SMALL["cache.hbm_blocks"]
        with grpc.insecure_channel(line[1]) as channel:
            inference, health = rpc.InferenceStub(channel), health_pb2_grpc.HealthStub(channel)
            assert inference.Generate(request("Hello", model="named:upper")).outputs[0].text
            stream = inference.GenerateStream(request("Hello", 1500))
            next(stream)
            assert systemd.recv(100).startswith(b"READY=1")
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: health.Check(health_pb2.HealthCheckRequest()).status != 1)
            with refused(CODE.UNAVAILABLE, "draining"):
                inference.Generate(request("Hello"))
            assert rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest()).draining
            assert list(stream)[-1].usage.completion_tokens == 1500
        output, _ = server.communicate(timeout=20)
        assert server.returncode == 0 and output == ""  # the ready line was all
    systemd.close()


def test_http_answers_and_drains_as_grpc_does(text_model: Path, quick: list[str]):
    body = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with process(["--model", str(text_model), "--port", "0", "--http-port", "0", *quick]) as server:
        line = ready(server)
        assert set(listening(server.pid)) == {line[1], line["http"]}  # and no other port
        with httpx.Client(base_url=f"http://{line['http']}", timeout=60) as http:
            wait_until(lambda: http.get("/health").status_code == 200)
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.send_signal(signal.SIGTERM)
                wait_until(lambda: http.get("/health").status_code == 503)
                assert http.get("/live").status_code == 200  # nobody is to start it again
                refusal = http.post("/v1/completions", json={**body, "stream": False})
                assert refusal.status_code == 503 and "draining" in refusal.json()["error"]["message"]
                assert refusal.headers["connection"] == "close"  # the next request had better go elsewhere
                assert [line for line in lines if line][-1] == "data: [DONE]"
        output, errors = server.communicate(timeout=20)
        assert server.returncode == 0 and output == "", errors


def test_a_taken_http_port_is_told_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "load", lambda _: pytest.fail("the model is read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = started(["--model", "x", "--http-port", str(taken.getsockname()[1])])
    assert said.startswith("ConfigError: cannot listen on 127.0.0.1:") and "serve.http_port" in said


@pytest.mark.slow
def test_drain_does_not_wait_longer_than_it_was_told(text_model: Path, quick: list[str]):
    with process(["--model", str(text_model), "--port", "0", *quick, "serve.drain_s=0.2"]) as server:
        with grpc.insecure_channel(ready(server)[1]) as channel:
            stream = rpc.InferenceStub(channel).GenerateStream(request("Hello", 4000))
            next(stream)
            server.send_signal(signal.SIGINT)
            with refused(CODE.UNAVAILABLE, "stopped"):
                list(stream)
        assert server.wait(timeout=20) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once(text_model: Path, quick: list[str]):
    with process(["--model", str(text_model), "--port", "0", *quick]) as server:
        with grpc.insecure_channel(ready(server)[1]) as channel:
            stream = rpc.InferenceStub(channel).GenerateStream(request("Hello", 4000))
            next(stream)
            server.send_signal(signal.SIGTERM)
            health = health_pb2_grpc.HealthStub(channel)
            wait_until(lambda: health.Check(health_pb2.HealthCheckRequest()).status != 1)
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=5) == 128 + signal.SIGTERM


DYING = """
import os, sys
from jlora.serve import launcher

class Dying(launcher.ServerGarbage):
    def after_step(self):
        if os.path.exists(sys.argv[-1]):
            raise SystemExit(0)

launcher.ServerGarbage = Dying
sys.exit(launcher.main(sys.argv[1:-1]))
"""
LOSING = """
import os, sys
from jlora.engine.runner import Runner
from jlora.serve import launcher

dispatch = Runner._dispatch

def failing(self, *args):
    if os.path.exists(sys.argv[-1]):
        self.pool.array.delete()  # as a program does that fails once it runs: the pool was given to it
        raise RuntimeError("the device is gone")
    return dispatch(self, *args)

Runner._dispatch = failing
sys.exit(launcher.main(sys.argv[1:-1]))
"""

COMPILING = """
import sys, time
from jlora.engine.runner import Runner
from jlora.serve import launcher

def compile(self, left):
    print("compiles", file=sys.stderr, flush=True)
    time.sleep(600)  # as a large program does, which nothing can interrupt

Runner.compile = compile
sys.exit(launcher.main(sys.argv[1:]))
"""

BLIND = """
import os, sys
from jlora.serve import launcher
from jlora.serve.access import watched

def look(files):
    if os.path.exists(sys.argv[-1]):
        raise SystemExit(0)

watched.LOOK_S, watched.Watched.look = 0.01, look
sys.exit(launcher.main(sys.argv[1:-1]))
"""


@pytest.mark.slow
def test_a_server_that_still_compiles_ends_when_it_has_drained(text_model: Path):
    settings = [f"{key}={value}" for key, value in {**SMALL, "serve.compile_cache": "auto"}.items()]
    with process(["--model", str(text_model), "--port", "0", "--set", *settings], ["-c", COMPILING]) as server:
        with grpc.insecure_channel(ready(server)[1]) as channel:
            assert rpc.InferenceStub(channel).Generate(request("Hello")).outputs[0].text
        wait_for(server.stderr, "compiles")
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=20)
        assert server.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("script", [DYING, LOSING], ids=["thread", "pool"])
def test_a_dead_engine_ends_the_process_after_its_clients_know(
    text_model: Path, quick: list[str], tmp_path: Path, script: str
):
    end = tmp_path / "end"
    argv = ["--model", str(text_model), "--port", "0", "--http-port", "0", *quick, str(end)]
    body = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with process(argv, ["-c", script]) as server:
        line = ready(server)
        http = httpx.stream("POST", f"http://{line['http']}/v1/completions", json=body, timeout=60)
        with grpc.insecure_channel(line[1]) as channel, http as answer:
            lines = answer.iter_lines()
            next(lines)
            streams = [rpc.InferenceStub(channel).GenerateStream(request("Hello", 4000)) for _ in range(5)]
            for stream in streams:
                next(stream)
            end.touch()
            for stream in streams:
                with refused(CODE.UNAVAILABLE, "the engine has failed"):
                    list(stream)
            last = [said for said in lines if said][-2:]
            assert "the engine has failed" in last[0] and '"error"' in last[0] and last[1] == "data: [DONE]"
        _, errors = server.communicate(timeout=20)
        assert server.returncode == launcher.FAILED and "thread jlora-engine has failed" in errors


def test_a_server_that_no_longer_sees_its_keys_ends_as_one_without_an_engine(
    text_model: Path, quick: list[str], tmp_path: Path
):
    """Otherwise a revoked key would be good for ever."""
    end, file = tmp_path / "end", tmp_path / "keys.toml"
    key, entry = keys.new("a", "admin", ["*"])
    file.write_text(entry)
    argv = ["--model", str(text_model), "--port", "0", "--keys", str(file), *quick, str(end)]
    with process(argv, ["-c", BLIND]) as server:
        with grpc.insecure_channel(ready(server)[1]) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert any(seen.status == health_pb2.HealthCheckResponse.SERVING for seen in watch)
            bearer = (("authorization", f"Bearer {key}"),)
            stream = rpc.InferenceStub(channel).GenerateStream(request("Hello", 4000), metadata=bearer)
            next(stream)
            end.touch()
            with refused(CODE.UNAVAILABLE, "stopped"):
                list(stream)
            assert any(seen.status == health_pb2.HealthCheckResponse.NOT_SERVING for seen in watch)
        _, errors = server.communicate(timeout=20)
        assert server.returncode == launcher.FAILED and "thread jlora-files has failed" in errors


def test_while_loading_the_port_answers_and_a_signal_ends_it(text_model: Path, tmp_path: Path):
    """And the operator sees that it compiles, which is kept from the first program on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = tmp_path / "compiled"  # nothing there yet: seconds of compiling
    settings = [f"{key}={value}" for key, value in {**SMALL, "serve.compile_cache": kept}.items()]
    with process(["--model", str(text_model), "--port", str(port), "--set", *settings]) as server:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with refused(CODE.UNAVAILABLE, "loading"):
                rpc.InferenceStub(channel).Generate(request())
        wait_for(server.stderr, "programs compile before it serves")
        wait_until(lambda: kept.is_dir() and any(kept.iterdir()), timeout_s=60)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=20)
        assert server.returncode == 0 and "stopped while loading" in errors


def test_a_log_that_cannot_be_written_stops_nothing(text_model: Path, quick: list[str]):
    argv = ["--model", str(text_model), "--port", "0", *quick, "serve.log_level=debug"]
    adapter = pb.LoadAdapterRequest(name="new", path=str(text_model.parent / "adapters" / "upper"))
    command = [sys.executable, "-m", "jlora.serve", *argv]
    with Path("/dev/full").open("w") as full:
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True)
    try:
        with grpc.insecure_channel(ready(server)[1]) as channel:
            inference = rpc.InferenceStub(channel)
            before = inference.Generate(request("Hello")).outputs
            rpc.AdaptersStub(channel).LoadAdapter(adapter)
            assert inference.Generate(request("Hello", model="new")).outputs[0].text
            assert inference.Generate(request("Hello")).outputs == before
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=20)
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_a_text_beyond_the_limit_of_the_address_space_is_refused_and_the_server_goes_on(
    quick: list[str], tmp_path: Path
):
    """The tokenizer's library would abort the process."""
    write_text_model(tmp_path, max_len=1 << 18)  # or the text would be refused by its length
    text = "x " * (3 << 19)
    with process(["--model", str(tmp_path), "--port", "0", *quick]) as server:
        with grpc.insecure_channel(ready(server)[1]) as channel:
            inference = rpc.InferenceStub(channel)
            before = inference.Generate(request("Hello")).outputs  # it has compiled
            size = int(Path(f"/proc/{server.pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(server.pid, resource.RLIMIT_AS, (size + (256 << 20), -1))
            for call in (
                lambda: inference.Generate(request(text)),
                lambda: inference.Tokenize(pb.TokenizeRequest(text=text)),
            ):
                with refused(CODE.RESOURCE_EXHAUSTED, "too little memory for a text of 3145728 characters"):
                    call()
                assert inference.Generate(request("Hello")).outputs == before
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=20)
        assert server.returncode == 0, errors


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True)]
)
def test_a_port_that_others_reach_is_warned_of(
    host: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def stop(*_: object) -> None:
        raise InvalidArgument("far enough")

    monkeypatch.setattr(GrpcServer, "bind", lambda *_: 0)
    monkeypatch.setattr(GrpcServer, "start", stop)
    with pytest.raises(InvalidArgument, match="far enough"):
        asyncio.run(launcher.serve(configuration.load(None, {"serve.host": host, "serve.insecure": True})))
    assert ("no authentication" in caplog.text) is warned


def test_without_keys_a_port_that_others_reach_needs_a_word():
    with pytest.raises(ConfigError, match=r"serve\.host = 0\.0\.0\.0: .*--keys.*--insecure"):
        asyncio.run(launcher.serve(configuration.load(None, {"serve.host": "0.0.0.0"})))


def test_a_window_shorter_than_the_models_context_is_served_at_the_length_that_is_set(
    tmp_path: Path, text_model: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tmp_path / "mistral"
    shutil.copytree(text_model, model)
    facts = json.loads((model / "config.json").read_text())
    facts |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
    (model / "config.json").write_text(json.dumps(facts))
    monkeypatch.setattr(LocalReplica, "start", lambda config, **_: config.model.max_model_len)
    config = configuration.load(None, {"model.path": str(model), "model.max_model_len": 32})
    assert launcher.load(config)[0] == 32
    with pytest.raises(InvalidArgument, match="sliding_window"):
        launcher.load(configuration.replace(config, {"model.max_model_len": 0}))
