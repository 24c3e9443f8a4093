"""A machine without the device that jax was installed for is one clear error, not a slow server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from jlora import machine
from jlora.errors import ConfigError
from jlora.model import sharding


@pytest.fixture
def platforms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets what JAX_PLATFORMS says, once the CPU's devices are there."""
    before = jax.devices(), jax.config.jax_platforms
    monkeypatch.delenv("JAX_PLATFORMS")
    yield lambda names: jax.config.update("jax_platforms", names)
    jax.config.update("jax_platforms", before[1])


def _fails(error: Exception) -> Callable[[], Any]:
    def devices() -> Any:
        raise error

    return devices


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "no device, with JAX_PLATFORMS='cuda': there is no such device"),
        (RuntimeError("Unable to initialize backend 'cuda': driver 535\nmore"), "backend 'cuda': driver 535$"),
    ],
)
def test_a_platform_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, platforms: Callable[[str], None], error: Exception, said: str
):
    platforms("cuda")
    monkeypatch.setattr(jax, "devices", _fails(error))
    with pytest.raises(ConfigError, match=said):
        sharding.make_mesh(1)


@pytest.mark.parametrize("plugin", ["jax-cuda13-plugin", "libtpu"])
def test_the_cpu_serves_beside_an_accelerators_plugin_only_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, platforms: Callable[[str], None], plugin: str
):
    monkeypatch.setattr(machine, "version", lambda name: "1.0" if name == plugin else "")
    assert sharding.make_mesh(1).size == 1, "the tests say JAX_PLATFORMS=cpu"
    platforms("")
    with pytest.raises(ConfigError, match=f"no accelerator: {plugin} is installed.*JAX_PLATFORMS=cpu"):
        sharding.make_mesh(1)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert sharding.make_mesh(1).size == 1, "a notebook has followed the advice"
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(machine, "version", lambda name: "")
    assert sharding.make_mesh(1).size == 1, "a CPU's own jax"
