"""Every test runs on the CPU with four host devices, so that tensor parallelism is real."""

from __future__ import annotations

import os

# Read once, when jax is first imported; so before any import that may bring jax in.
os.environ["JAX_PLATFORMS"] = "cpu"
FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=4".strip()

import functools  # noqa: E402
import inspect  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

from jlora.engine.compile_cache import use  # noqa: E402
from jlora.layout import PoolLayout  # noqa: E402
from jlora.model import step  # noqa: E402
from jlora.model.spec import ModelSpec  # noqa: E402
from jlora.pallas.ops import Ops  # noqa: E402
from jlora.pallas.reference import CPU, XLA  # noqa: E402
from tests import _make  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a run in a shell's background, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skips what has not begun by `JLORA_TESTS_UNTIL` (seconds since the epoch), for a machine that lacks the time."""
    if time.time() > float(os.environ.get("JLORA_TESTS_UNTIL", "inf")):
        pytest.skip("no time left")


@pytest.fixture(scope="session", autouse=True)
def compile_cache(request: pytest.FixtureRequest) -> None:
    """Programs of the same shapes compile once: for all workers and the processes they start, and for the next run."""
    os.environ["XDG_CACHE_HOME"] = str(request.config.cache.mkdir("home"))
    use("auto")


@pytest.fixture(scope="session", autouse=True)
def shared_programs() -> Iterator[None]:
    """Engines of one shape have the same jitted programs: a worker traces, lowers and loads each once."""
    build, made = step.build, {}

    @functools.wraps(build)
    def shared(
        spec: ModelSpec,
        layout: PoolLayout,
        mesh: jax.sharding.Mesh,
        stacked: bool,
        ops: Ops = XLA,
        making: step.Making = step.PLAIN,
    ):
        if ops not in (XLA, CPU):  # kernels
            return build(spec, layout, mesh, stacked, ops, making)
        key = repr((replace(spec, name=""), layout)), mesh, stacked, ops, making.host_waits, making.adapted
        return made.get(key) or made.setdefault(key, build(spec, layout, mesh, stacked, ops, making))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "build", shared)
        yield


@pytest.fixture
def own_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test have no program that another engine has compiled."""
    monkeypatch.setattr(step, "build", inspect.unwrap(step.build))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama (`_make.TINY`) in Hugging Face format; read it, do not change it."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    _make.make_model(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    """The shape of `tiny_model`."""
    return _make.tiny_spec()


@pytest.fixture(scope="session")
def tiny_adapters(tmp_path_factory: pytest.TempPathFactory, tiny_spec: ModelSpec) -> dict[str, Path]:
    """Three loud adapters of `tiny_model`: unequal ranks, unequal targets."""
    root = tmp_path_factory.mktemp("adapters")
    targets = {"small": (2, ("q",)), "middle": (4, ("q", "v", "o")), "large": (8, tuple(_make.MODULES))}
    return {
        name: _make.make_adapter(root / name, tiny_spec, seed=10 + i, r=r, targets=which)
        for i, (name, (r, which)) in enumerate(targets.items())
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)
