"""Ray's driver while Ray does not answer. A module that stands in for Ray waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jlora import config as configuration
from jlora.cluster.child import flags_of
from jlora.cluster.ray_process import RayFleet, environment
from jlora.cluster.scratch import Scratch
from jlora.config import Config
from jlora.errors import ConfigError, Unavailable
from tests.cluster._wait import until

RAY = {
    "__init__": "import os, pathlib, time\nfrom ray import util\ndef init(**_):\n"
    "    pathlib.Path(os.environ['IN_INIT']).touch()\n    time.sleep(600)\ndef is_initialized(): return False\n",
    "exceptions": "class RayError(Exception): pass\n",
    "util/__init__": "placement_group = placement_group_table = remove_placement_group = None\n",
    "util/scheduling_strategies": "PlacementGroupSchedulingStrategy = None\n",
}


@pytest.fixture
def in_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once the driver is inside `ray.init`."""
    for name, text in RAY.items():
        file = tmp_path / "ray" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(root))))
    monkeypatch.setenv("IN_INIT", str(tmp_path / "in_init"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of these tests")
    return tmp_path / "in_init"


def config(**cluster: object) -> Config:
    return configuration.load({"model": {"path": "m"}, "cluster": cluster})


@pytest.mark.parametrize("own", [False, True])
def test_ray_asks_for_a_token_whatever_the_operators_environment_says(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """CVE-2023-48022: whoever reaches a Ray without one runs any code."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="ray_token_file is not set"):
        RayFleet(config(ray_address="10.0.0.1:6379"))
    (tmp_path / "given").write_text("of these tests")
    section = config(**({} if own else {"ray_address": "10.0.0.1:6379", "ray_token_file": str(tmp_path / "given")}))
    scratch = Scratch() if own else None
    try:
        given = environment(section.cluster, scratch)
        token = Path(given["RAY_AUTH_TOKEN_PATH"])
        assert given["RAY_AUTH_MODE"] == "token" and len(token.read_text()) >= 14
        assert not own or token.stat().st_mode & 0o077 == 0
    finally:
        if scratch is not None:
            scratch.close()


def test_a_ray_that_does_not_answer_is_one_error(in_init: Path):
    fleet = RayFleet(config(ray_address="10.0.0.1:6379", place_s=0.5))
    with pytest.raises(
        Unavailable, match=r"ray_address = 10.0.0.1:6379: Ray has not answered .* cluster.place_s = 0.5 s"
    ):
        fleet.start(lambda addresses: None)
    assert in_init.exists()


@pytest.mark.parametrize("own", [False, True])
def test_a_driver_without_its_router_ends_also_inside_ray(in_init: Path, tmp_path: Path, own: bool):
    folder = tmp_path / "folder"
    folder.mkdir()
    flags = flags_of(config(ray_address="" if own else "10.0.0.1:6379"))
    command = [sys.executable, "-m", "jlora.cluster.ray_process", str(folder) if own else "", "m", *flags]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    try:
        until(lambda: in_init.exists() or driver.poll() is not None, "the driver is inside ray.init")
        assert driver.poll() is None and driver.stdin is not None
        driver.stdin.close()
        assert driver.wait(60) != 0
    finally:
        driver.kill()
        driver.wait()
    assert folder.exists() is not own


UP, ENDED = ["up", "h:1"], ["ended", "killed by signal 9"]


@pytest.mark.parametrize(
    "script, says, does",
    [
        pytest.param(
            {"there": ["s-r0", "s-r1"], "actors": {"s-r0": [UP], "s-r1": [ENDED, ENDED, UP]}, "state": "CREATED"},
            [{"addresses": {"r0": "h:1"}}, {"addresses": {"r0": "h:1", "r1": "h:1"}}],
            [],
            id="one starts again just now",
        ),
        pytest.param(
            {"there": ["s-r0"], "actors": {"s-r0": [UP], "s-r1": [ENDED]}, "state": "CREATED"},
            [{"error": "killed by signal 9"}],
            ["stop s-r1", "kill s-r1"],
            id="a new one does not start",
        ),
        pytest.param(
            {"there": ["s-r0", "s-r1"], "actors": {"s-r0": [UP], "s-r1": [UP]}, "state": "CREATED", "breaks": 2},
            [{"addresses": {"r0": "h:1", "r1": "h:1"}}, {"error": "the head is lost"}],
            [],
            id="Ray fails later",
        ),
        pytest.param(
            {"there": ["s-r0", "s-r1"], "actors": {"s-r0": [UP], "s-r1": [UP]}, "state": "RESCHEDULING"},
            [{"addresses": {"r0": "h:1", "r1": "h:1"}}],
            [],
            id="a node is lost",
        ),
        pytest.param(
            {"there": [], "actors": {"s-r0": [UP], "s-r1": [ENDED]}, "state": None},
            [{"error": "killed by signal 9"}],
            ["stop s-r0", "stop s-r1", "kill s-r0", "kill s-r1", "remove the group"],
            id="a whole new service does not start",
        ),
    ],
)
def test_a_driver_ends_no_replica_that_ran_before(script: dict[str, Any], says: list[Any], does: list[str]):
    """It may serve another router, or the one before this driver."""
    flags = flags_of(config(name="s", replicas=2, ray_address="10.0.0.1:6379", ray_token_file="t"))
    command = [sys.executable, "-m", "tests.cluster._scripted_ray", json.dumps({"breaks": None} | script), *flags]
    pipe = subprocess.PIPE
    driver = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0)
    try:
        assert driver.stdin is not None and driver.stdout is not None and driver.stderr is not None
        assert [json.loads(driver.stdout.readline()) for _ in says] == says
        if "error" in says[-1]:
            assert driver.wait(60) == 1
            assert json.loads(driver.stderr.readlines()[-1]) == does
    finally:
        driver.kill()
        driver.communicate()
