"""`jlora cluster`: flags, its errors of one line, the secret of a start, and the table of replicas."""

from __future__ import annotations

import stat
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from jlora import cli as jlora
from jlora import config as configuration
from jlora.cluster import cli
from jlora.cluster.fleet import LocalFleet, StaticFleet
from jlora.errors import ConfigError
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc

MODEL = ["--model", "m"]


def test_flags_are_names_of_keys(tmp_path: Path):
    flags = "--fleet ray --replicas 3 --ray-address 10.0.0.1:6379 --tp 2 --resources CPU=4 GPU=2 --http-port 0"
    config = cli.parse([*MODEL, "--adapter-dir", str(tmp_path), *flags.split()])
    assert (config.cluster.fleet, config.cluster.replicas, config.cluster.ray_address) == ("ray", 3, "10.0.0.1:6379")
    assert config.cluster.resources == {"CPU": 4, "GPU": 2}
    assert (config.model.tp, config.adapters.dir, config.serve.http_port) == (2, str(tmp_path), 0)
    static = cli.parse([*MODEL, "--fleet", "static", "--addresses", "a:1,b:2", "--token-file", "t"])
    assert static.cluster.addresses == ("a:1", "b:2") and static.cluster.token_file == "t"


def test_the_help_names_the_line_that_says_it_is_ready(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    assert "prints `jlora cluster ready grpc=HOST:PORT" in capsys.readouterr().out


def test_a_shipped_file_starts_two_replicas():
    root = Path(__file__).resolve().parents[2]
    config = configuration.load(root / "configs" / "cluster.toml")
    assert config.cluster.replicas == 2 and config.cluster.fleet == "local"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "cluster.replicas = 0"),
        (["--replica", "2"], "the nearest valid one is '--replicas'"),
        (["--fleet", "static"], "cluster.addresses is not set"),
        (["--addresses", "a:1"], "cluster.addresses"),
        (["--set", "cluster.replica=2"], "their number is cluster.replicas"),
        (["--set", "engine.merge=sql"], "engine.merge = 'sql'"),
        (["--resources", "GPU"], "GPU"),
        (["--resources", "GPU=many"], "cluster.resources.GPU = {'GPU': 'many'}: must be a table of NAME = amount"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        cli.parse([*MODEL, *flags])
    said = capsys.readouterr().err
    assert e.value.code == 2 and message in said and said.count("\n") == 1


def test_each_start_has_a_secret_of_its_own():
    config = cli.parse(MODEL)
    with cli.secret(config) as one, cli.secret(config) as other:
        paths = [Path(c.cluster.token_file) for c in (one, other)]
        tokens = {path.read_text() for path in paths}
        assert len(tokens) == 2 and min(map(len, tokens)) >= 32
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert not any(path.exists() for path in paths)
    given = configuration.replace(config, {"cluster.token_file": "given"})
    with cli.secret(given) as kept:
        assert kept == given


def test_the_kind_of_the_fleet():
    assert isinstance(cli.fleet_of(cli.parse(MODEL)), LocalFleet)
    static = cli.fleet_of(cli.parse([*MODEL, "--fleet", "static", "--addresses", "127.0.0.1:1"]))
    assert isinstance(static, StaticFleet)
    with pytest.raises(ConfigError, match="cluster.ray_token_file is not set"):
        cli.fleet_of(cli.parse([*MODEL, "--fleet", "ray", "--ray-address", "127.0.0.1:1"]))


class Router(rpc.ControlServicer):
    """Says what replicas there are."""

    def __init__(self) -> None:
        self.replicas: list[pb.ReplicaStatus] = []

    def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        return pb.ServerInfo(replicas=self.replicas)


def test_status_shows_the_replicas(capsys: pytest.CaptureFixture[str]):
    router = Router()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    rpc.add_ControlServicer_to_server(router, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert jlora.main(["cluster", "status", address]) == 1
        assert "has no replicas, or does not show them" in capsys.readouterr().err
        router.replicas = [pb.ReplicaStatus(name="r0", address="10.0.0.1:7", health="down")]
        assert jlora.main(["cluster", "status", address]) == 1
        router.replicas.append(pb.ReplicaStatus(name="r1", address="10.0.0.2:7", health="up", running=3, blocks=9))
        assert jlora.main(["cluster", "status", address]) == 0
        row = next(text for text in capsys.readouterr().out.splitlines()[::-1] if text.startswith("r1"))
        assert row.split()[:5] == ["r1", "10.0.0.2:7", "up", "0", "3"]
    finally:
        server.stop(0).wait()
