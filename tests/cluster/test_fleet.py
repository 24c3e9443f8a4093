"""Fleets: addresses that change are told, a replica that ends starts again, and nothing outlives its fleet."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from jlora import config as configuration
from jlora.cluster import fleet as fleets
from jlora.cluster import worker
from jlora.cluster.child import flags_of
from jlora.cluster.fleet import LocalFleet, StaticFleet, replica_config, resolve
from jlora.cluster.ray_process import RayFleet
from jlora.config import Config
from jlora.errors import Unavailable
from jlora.serve import flags, launcher
from tests.cluster import _port as port
from tests.cluster._wait import gone, until

FAKE = "tests.cluster._fake_replica"
ROOT = Path(__file__).resolve().parents[2]


class Seen:
    """A watch that keeps every mapping that it was told."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, str]] = []

    def __call__(self, addresses: Mapping[str, str]) -> None:
        self.told.append(addresses)

    @property
    def now(self) -> Mapping[str, str]:
        return self.told[-1] if self.told else {}


def config(replicas: int = 2, **env: str) -> Config:
    return configuration.load({"model": {"path": "m"}, "cluster": {"replicas": replicas, "env": env}})


@pytest.fixture
def local():
    made = LocalFleet(config(), FAKE)
    seen = Seen()
    made.start(seen)
    yield made, seen
    pids, told = list(made.pids.values()), len(seen.told)
    made.stop()
    made.stop()  # does nothing
    assert all(map(gone, pids)) and not made.pids
    assert len(seen.told) == told, "the watch hears nothing of the stop"


def test_a_local_fleet_tells_addresses_and_ends_its_processes(local: tuple[LocalFleet, Seen]):
    fleet, seen = local
    assert sorted(seen.now) == ["r0", "r1"] == sorted(fleet.pids)
    for address in seen.now.values():
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port))).close()


@pytest.mark.slow
def test_a_killed_replica_starts_again_elsewhere(local: tuple[LocalFleet, Seen]):
    fleet, seen = local
    before, pid = dict(seen.now), fleet.pids["r0"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: len(seen.now) == 2 and fleet.pids.get("r0") not in (None, pid), "r0 serves again")
    assert {"r1": before["r1"]} in seen.told, "its end was told"
    assert seen.now["r1"] == before["r1"] and gone(pid)


@pytest.mark.slow
def test_a_replica_that_cannot_start_is_one_error_with_its_reason():
    seen = Seen()
    fleet = LocalFleet(config(3, FAKE_FAILS="no such model"), FAKE)
    with pytest.raises(Unavailable, match=r"replica r\d: ended with code 1 before it was ready: no such model"):
        fleet.start(seen)
    assert not fleet.pids and not seen.told


def test_a_fleet_that_starts_can_be_stopped():
    fleet, ended = LocalFleet(config(2, FAKE_LOADS="1"), FAKE), []

    def start() -> None:
        with pytest.raises(Unavailable):
            fleet.start(Seen())
        ended.append(True)

    starting = threading.Thread(target=start)
    starting.start()
    until(lambda: len(fleet.pids) == 2, "both processes load")
    pids = list(fleet.pids.values())
    fleet.stop()
    starting.join(60)
    assert ended and all(map(gone, pids)) and not fleet.pids


def test_a_replica_that_loads_too_long_is_killed():
    short = configuration.replace(config(1, FAKE_LOADS="1"), {"cluster.start_timeout_s": 0.5})
    fleet = LocalFleet(short, FAKE)
    with pytest.raises(Unavailable, match=r"cluster.start_timeout_s = 0.5 s"):
        fleet.start(Seen())
    assert not fleet.pids


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_replicas_die_with_a_killed_parent():
    code = f"""
import time
from tests.cluster.test_fleet import FAKE, config, LocalFleet
fleet = LocalFleet(config(), {FAKE!r})
fleet.start(lambda addresses: None)
print(*fleet.pids.values(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
        assert len(pids) == 2
    until(lambda: all(map(gone, pids)), "the replicas die")


def test_flags_carry_a_whole_configuration(tmp_path: Path):
    roots = [str(tmp_path / name) for name in "ab"]
    for root in roots:
        Path(root).mkdir()
    given = configuration.load(
        {
            "model": {"path": str(tmp_path), "tp": 2},
            "adapters": {"roots": roots, "lazy": True},
            "serve": {"drain_s": 1.5, "host": "::1"},
            "cluster": {"fleet": "static", "addresses": ["a:1", "b:2"], "env": {"X": "a=b c"}, "resources": {"GPU": 1}},
        }
    )
    assert flags.parse(flags_of(given, env=True)) == given
    assert flags.parse(flags_of(given)) == configuration.replace(given, {"cluster.env": {}})
    assert flags.parse(flags_of(replica_config(given, "r7", "127.0.0.1"))).cluster.replica == "r7"


def test_a_replica_gets_neither_the_keys_nor_the_adapters_of_its_router():
    given = configuration.load(
        {
            "model": {"path": "m"},
            "adapters": {"dir": "d", "paths": {"a": "b"}, "registry": "r"},
            "serve": {"keys": "k", "http_port": 8000, "port": 1},
        }
    )
    replica = replica_config(given, "r0", "10.0.0.1")
    assert (replica.adapters, replica.serve.keys) == (Config().adapters, "")
    assert (replica.serve.host, replica.serve.port, replica.serve.http_port) == ("10.0.0.1", 0, -1)


def test_a_static_replica_reads_the_file_of_the_router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It leaves the router's part of it alone, and other machines may reach it with the token."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    shared = [
        "adapters.registry=/nowhere/a.db", "serve.keys=/nowhere/keys", "serve.http_port=8000",
        "serve.host=0.0.0.0", "serve.port=0", f"adapters.dir={tmp_path}",
    ]  # fmt: skip
    loaded = []

    async def load(config: Config) -> NoReturn:
        loaded.append(config)
        raise Unavailable("as far as this test goes")

    monkeypatch.setattr(launcher, "ENGINE", dataclasses.replace(launcher.ENGINE, load=load))
    assert worker.main(["--model", "m", "--token-file", str(token), "--set", *shared]) == 1
    assert [c.adapters for c in loaded] == [Config().adapters]
    assert [(c.serve.keys, c.serve.http_port, c.serve.host) for c in loaded] == [("", -1, "0.0.0.0")]


def test_a_static_fleet_follows_dns(monkeypatch: pytest.MonkeyPatch):
    hosts = {"replicas": ["10.0.0.1", "10.0.0.2"]}

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in hosts[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(fleets, "RESOLVE_S", 0.01)
    section = configuration.load(
        {"cluster": {"fleet": "static", "addresses": ["replicas:50051", "elsewhere:50051"]}}
    ).cluster
    seen, fleet = Seen(), StaticFleet(section)
    fleet.start(seen)
    assert sorted(seen.now) == ["10.0.0.1:50051", "10.0.0.2:50051"]
    hosts["replicas"] = ["10.0.0.2", "10.0.0.3"]
    until(lambda: sorted(seen.now) == ["10.0.0.2:50051", "10.0.0.3:50051"], "the change is told")
    del hosts["replicas"]  # DNS fails: what ran, runs on
    hosts["elsewhere"] = ["10.0.1.1"]
    until(lambda: len(seen.now) == 3, "the other name resolves")
    fleet.stop()
    assert "10.0.0.3:50051" in seen.now


def test_one_machine_is_one_replica_on_both_stacks():
    assert resolve("localhost:50051") == ("127.0.0.1:50051",)
    assert resolve("[::1]:50051") == ("[::1]:50051",)


@pytest.mark.parametrize("kind", [LocalFleet, RayFleet])
def test_a_fleet_that_is_stopped_before_it_starts_does_not_wait(kind: type):
    made, ended = kind(config(), FAKE), threading.Event()
    made.stop()

    def start() -> None:
        with pytest.raises(Unavailable, match="the fleet stops"):
            made.start(Seen())
        ended.set()

    threading.Thread(target=start, daemon=True).start()
    assert ended.wait(20)


def test_a_bug_at_a_replicas_start_is_the_fleets_error(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> NoReturn:
        raise KeyError("a bug")

    monkeypatch.setattr(fleets, "Child", broken)
    fleet, ended = LocalFleet(config(1), FAKE), threading.Event()

    def start() -> None:
        with pytest.raises(Unavailable, match="replica r0: 'a bug'"):
            fleet.start(Seen())
        ended.set()

    threading.Thread(target=start, daemon=True).start()
    assert ended.wait(20)


def test_a_name_that_is_none_resolves_to_nothing():
    fleet = StaticFleet(dataclasses.replace(config().cluster, addresses=(f"{'x' * 80}.example:1",)))
    assert not port.resolved(fleet)
