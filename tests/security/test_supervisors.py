"""What starts the server again: the unit of systemd, and the probes of Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jlora import config as configuration
from jlora.config import ServeConfig
from jlora.serve import flags, launcher
from jlora.serve.http import protocol
from jlora.serve.server import CONNECTIONS, LIVE
from jlora.serve.supervisor import PERIOD_S
from tests.cluster.test_manifests import ROOT, pod_specs

UNIT = ROOT / "configs" / "systemd" / "jlora.service"


def settings() -> dict[str, str]:
    """The unit's keys; none is given twice."""
    pairs = re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_the_unit_starts_our_command(tmp_path: Path):
    words = settings()["ExecStart"].split()
    assert words[0].endswith("/jlora") and words[1] == "serve"
    config = tmp_path / "jlora.toml"
    config.write_text('[model]\npath = "m"\n')
    words[words.index("--config") + 1] = str(config)
    parsed = flags.parse(words[2:])
    assert parsed.serve.keys and parsed.serve.compile_cache == "/var/cache/jlora"


def test_the_unit_starts_again_after_the_codes_of_the_server():
    unit = settings()
    never = {*unit["RestartPreventExitStatus"].split(), *unit["SuccessExitStatus"].split()}
    assert unit["Restart"] == "on-failure" and str(launcher.FAILED) not in never and "1" not in never
    assert never == {"2", "130", "143"}
    codes = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "serving.md").read_text(), re.MULTILINE)
    assert {"0", "1", "2", str(launcher.FAILED)} <= set(codes)
    assert float(unit["TimeoutStopSec"]) > ServeConfig().drain_s
    assert unit["Type"] == "notify" and float(unit["WatchdogSec"]) > ServeConfig().heartbeat_s + 10 * PERIOD_S
    assert int(unit["LimitNOFILE"]) > CONNECTIONS + protocol.CONNECTIONS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path):
    unit = tmp_path / "jlora.service"
    unit.write_text(UNIT.read_text().replace("/opt/jlora/bin/jlora", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def serving() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Containers that serve, with their pods. KubeRay gives the head of a RayCluster probes of its own."""
    found = [(spec, container) for spec in pod_specs() for container in spec["containers"]]
    ours = [(spec, one) for spec, one in found if one["name"] != "ray-head"]
    return [(spec, one) for spec, one in ours if any(port["name"] == "grpc" for port in one.get("ports", ()))]


def test_pods_are_ready_when_health_says_so():
    """gRPC's health follows the engine: a port that is open says nothing of it."""
    assert len(serving()) == 4
    for spec, container in serving():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["grpc"] == {"port": ports["grpc"]}, container["name"]
        assert "livenessProbe" in container
        assert spec["terminationGracePeriodSeconds"] > configuration.Config().serve.drain_s


def test_a_replica_whose_engine_stands_is_started_again_and_a_router_without_replicas_is_not():
    for _, container in serving():
        replica = "replica" in container["args"]
        liveness = container["livenessProbe"]
        assert ("grpc" in liveness) is replica, container["name"]
        assert not replica or liveness["grpc"]["service"] == LIVE, "one that drains stays"
        patience = liveness.get("periodSeconds", 10) * liveness.get("failureThreshold", 3)
        assert not replica or patience > ServeConfig().heartbeat_s
