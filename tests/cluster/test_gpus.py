"""Which GPUs each replica of this machine takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jlora import config as configuration
from jlora import machine
from jlora.cluster import fleet, gpus
from jlora.cluster.child import Child
from jlora.cluster.fleet import LocalFleet
from jlora.config import Config
from jlora.errors import ConfigError, Unavailable


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four GPUs, where jax has CUDA's plugin."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(machine, "version", {"jax-cuda13-plugin": "0.12.0"}.get)
    for name in (gpus.VISIBLE, "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def config(replicas: int, tp: int = 1, **env: str) -> Config:
    return configuration.load({"model": {"path": "m", "tp": tp}, "cluster": {"replicas": replicas, "env": env}})


def taken(system: Path, replicas: int, tp: int = 1, **env: str) -> list[str | None]:
    return [share.get(gpus.VISIBLE) for share in gpus.shares(config(replicas, tp, **env), system)]


def test_each_replica_takes_gpus_of_its_own(system: Path, monkeypatch: pytest.MonkeyPatch):
    assert taken(system, 3) == ["0", "1", "2"]
    assert taken(system, 2, tp=2) == ["0,1", "2,3"]
    assert taken(system, 2, JAX_PLATFORMS="cuda,cpu") == ["0", "1"]
    monkeypatch.setenv(gpus.VISIBLE, "3, GPU-5a")
    assert taken(system, 2) == ["3", "GPU-5a"]
    assert taken(system, 2, CUDA_VISIBLE_DEVICES="1,1") == ["1", "1"], "as asked: both share one"


def test_too_few_gpus_are_one_clear_error(system: Path):
    for asked in ({"replicas": 5}, {"replicas": 1, "tp": 5}, {"replicas": 2, "CUDA_VISIBLE_DEVICES": "2"}):
        with pytest.raises(ConfigError, match=r"need [25] GPUs, there are [14]: lower cluster\.replicas"):
            taken(system, **asked)


def test_replicas_that_do_not_use_gpus_are_left_alone(
    system: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    assert taken(system, 9, JAX_PLATFORMS="cpu") == taken(system, 9, CUDA_VISIBLE_DEVICES="") == [None] * 9
    assert taken(tmp_path_factory.mktemp("none"), 9) == [None] * 9
    monkeypatch.setattr(machine, "version", lambda package: "")
    assert taken(system, 9) == [None] * 9


def test_a_replicas_process_gets_its_gpus(system: Path, monkeypatch: pytest.MonkeyPatch):
    found, shares = dict[str, str](), gpus.shares

    def noted(config: Config, module: str) -> Child:
        found[config.cluster.replica] = config.cluster.env[gpus.VISIBLE]
        raise OSError("seen")

    monkeypatch.setattr(fleet, "Child", noted)
    monkeypatch.setattr(gpus, "shares", lambda config: shares(config, system))
    made = LocalFleet(config(2, tp=2, OMP_NUM_THREADS="1"))
    with pytest.raises(Unavailable, match="seen"):
        made.start(lambda addresses: None)
    assert found and set(found.items()) <= {("r0", "0,1"), ("r1", "2,3")}
