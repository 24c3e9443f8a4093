"""Ray's driver while Ray does not answer (a module that stands in for Ray waits for ever), or as a script says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jlora import config as configuration
from jlora.cluster.child import ENV, Child, flags_of
from jlora.cluster.fleet import replica_config
from jlora.cluster.ray_process import RayFleet, environment
from jlora.cluster.scratch import Scratch
from jlora.config import Config
from jlora.errors import ConfigError, Unavailable
from tests.cluster._wait import until

RAY = {
    "__init__": "import os, pathlib, time\nfrom ray import util\ndef init(**_):\n"
    "    pathlib.Path(os.environ['IN_INIT']).touch()\n    time.sleep(600)\ndef is_initialized(): return False\n",
    "exceptions": "class RayError(Exception): pass\nclass ActorDiedError(RayError): pass\n",
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
    return configuration.load({"model": {"path": "m"}, "cluster": {"fleet": "ray", **cluster}})


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


@contextmanager
def driver(script: dict[str, Any], **cluster: object) -> Iterator[Any]:
    """A process of the driver over a scripted Ray; killed at the end."""
    flags = flags_of(config(ray_address="10.0.0.1:6379", ray_token_file="t", **cluster))
    command = [sys.executable, "-m", "tests.cluster._scripted_ray", json.dumps({"breaks": None} | script), *flags]
    pipe, env = subprocess.PIPE, {**os.environ, ENV: json.dumps(cluster.get("env", {}))}
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


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
    with driver(script, name="s", replicas=2) as process:
        assert [json.loads(process.stdout.readline()) for _ in says] == says
        if "error" in says[-1]:
            assert process.wait(60) == 1
            assert told(process)["done"] == does


def test_a_replica_whose_actor_does_not_answer_stays_where_it_was_and_one_that_is_dead_does_not():
    words = [UP, UP, ["silent", ""], ["up", "h:2"], ["silent", ""], ["dead", ""], ["silent", ""], ["up", "h:3"]]
    script = {"there": ["s-r0", "s-r1"], "actors": {"s-r0": [UP], "s-r1": words}, "state": "CREATED"}
    with driver(script, name="s", replicas=2) as process:
        said = [json.loads(process.stdout.readline())["addresses"].get("r1") for _ in range(4)]
    assert said == ["h:1", "h:2", None, "h:3"]


def test_a_replica_that_ran_before_with_other_settings_is_told():
    """It serves on with them: only an end of the service changes that."""
    given = config(name="s", replicas=2, ray_address="10.0.0.1:6379", ray_token_file="t")
    same, other = (flags_of(replica_config(given, name, "127.0.0.1"), env=True) for name in ("r0", "r1"))
    other = [word.replace("model.path=m", "model.path=n") for word in other] + ["--set", "cluster.env.X=1"]
    script = {"there": ["s-r0", "s-r1"], "state": "CREATED"}
    with driver(
        script | {"actors": {"s-r0": [[*UP, *same]], "s-r1": [[*UP, *other]]}}, name="s", replicas=2
    ) as process:
        assert json.loads(process.stdout.readline()) == {"addresses": {"r0": "h:1", "r1": "h:1"}}
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0
        said = [line for line in process.stderr if line.startswith("jlora cluster: ")]
    assert len(said) == 1 and "replica r1 runs on" in said[0] and "differs in cluster.env.X, model.path;" in said[0]


def test_no_command_line_has_the_replicas_environment(monkeypatch: pytest.MonkeyPatch):
    """Every user of the machine may read it; the driver has the values from its own environment."""
    secret = {"HF_TOKEN": "of these tests", "RAY_x": "1"}
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], env: dict[str, str], **_: Any) -> None:
        started.append((command, env))
        raise OSError("seen")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", popen)
        with pytest.raises(Unavailable, match="seen"):
            RayFleet(config(ray_address="h:1", ray_token_file="t", env=secret)).start(lambda addresses: None)
        with pytest.raises(OSError, match="seen"):
            Child(config(env=secret))
    (driver_words, driver_env), (words, env) = started
    assert not any("HF_TOKEN" in word or "of these tests" in word for word in (*driver_words, *words))
    assert json.loads(driver_env[ENV]) == secret and secret.items() <= env.items()


def test_a_replica_gets_its_environment_and_ray_only_what_is_rays():
    secret = {"HF_TOKEN": "of these tests", "RAY_x": "1", "PYTHONPATH": "/p"}
    with driver(FRESH, name="s", replicas=2, env=secret) as process:
        assert json.loads(process.stdout.readline()) == {"addresses": {"r0": "h:1", "r1": "h:1"}}
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0
        seen = told(process)["env"]
    assert seen == {name: [{"RAY_x": "1", "PYTHONPATH": "/p"}, secret] for name in ("s-r0", "s-r1")}


def told(process: Any) -> dict[str, Any]:
    """What a driver says at its end."""
    return json.loads(process.stderr.readlines()[-1])


FRESH = {"there": [], "actors": {"s-r0": [UP], "s-r1": [UP]}, "state": None}


@pytest.mark.parametrize(
    "resources, bundle",
    [
        pytest.param({}, {"CPU": 1}, id="nothing said"),
        pytest.param({"CPU": 0.5}, {"CPU": 0.5}, id="CPU"),
        pytest.param({"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}, id="GPU"),
        pytest.param({"CPU": 4, "TPU": 4}, {"CPU": 4, "TPU": 4}, id="TPU"),
    ],
)
def test_ray_sets_aside_for_each_replica_what_it_takes(resources: dict[str, float], bundle: dict[str, float]):
    with driver(FRESH, name="s", replicas=2, resources=resources) as process:
        assert json.loads(process.stdout.readline()) == {"addresses": {"r0": "h:1", "r1": "h:1"}}
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0
        asked = told(process)
    assert asked["bundles"] == [bundle, bundle]
    taken = {"CPU": 0, "GPU": 0} | bundle
    assert asked["took"] == {"s-r0": [0, taken], "s-r1": [1, taken]}, "each is in a bundle of its own"


@pytest.mark.parametrize(
    "resources, has, free, says",
    [
        ({"CPU": 4}, {"CPU": 6}, {"CPU": 5}, "CPU 4 each * CPU 6 (5 free)"),
        ({"CPU": 4, "GPU": 1}, {"CPU": 8}, {"CPU": 8}, "CPU 4, GPU 1 each * CPU 8 (8 free), GPU 0 (0 free)"),
        (
            {"CPU": 4, "TPU": 4},
            {"CPU": 8, "GPU": 1, "TPU": 4},
            {"CPU": 8, "GPU": 1},
            "CPU 4, TPU 4 each * CPU 8 (8 free), GPU 1 (1 free), TPU 4 (0 free)",
        ),
    ],
    ids=["CPU", "GPU", "TPU"],
)
def test_without_room_the_error_says_what_a_replica_needs_and_what_ray_has(
    resources: dict[str, float], has: dict[str, float], free: dict[str, float], says: str
):
    with driver(FRESH | {"short": [has, free]}, name="s", replicas=2, resources=resources, place_s=0.1) as process:
        want, have = says.split(" * ")
        assert json.loads(process.stdout.readline())["error"] == (
            f"cluster.replicas = 2: Ray finds no room for so many with {want} within cluster.place_s = 0.1 s; "
            f"it has {have}"
        )
        assert process.wait(60) == 1
        asked = told(process)
    assert asked["bundles"] == [resources] * 2 and asked["took"] == {} and asked["done"] == ["remove the group"]
