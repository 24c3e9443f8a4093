"""Mesh and shardings. The axis `tp` is always present, so one code path serves any number of devices."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jlora import machine
from jlora.errors import ConfigError
from jlora.model.llama import MESH_AXES, Params, abstract, stack_layers
from jlora.model.spec import ModelSpec

POOL = PartitionSpec(None, None, "tp")  # [rows, B, 2K, H]: whole (K, V) head pairs per shard
BLOCKS = PartitionSpec(None, None, None, "tp")  # [n, L, B, 2K, H]
REPLICATED = PartitionSpec()


def make_mesh(tp: int) -> Mesh:
    """The first `tp` local devices.

    Raises:
        ConfigError: this process sees fewer, or none of those that the installed jax is for.
    """
    devices = all_devices()
    if tp > len(devices):
        raise ConfigError(f"model.tp = {tp}: this process sees {len(devices)} {devices[0].platform} devices")
    return Mesh(np.array(devices[:tp]), ("tp",), axis_types=(AxisType.Auto,))


def all_devices() -> list[Any]:
    """What jax computes on. jax takes the CPU without a word where it finds no accelerator, and is slow then.

    Raises ConfigError if there is nothing, or no accelerator although jax was installed for one.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as e:  # an old driver; a chip of another process; none of this platform
        reason = str(e).partition("\n")[0] or "there is no such device"
        raise ConfigError(f"no device, with JAX_PLATFORMS={jax.config.jax_platforms or ''!r}: {reason}") from e
    made_for = [name for name in (*machine.PLUGINS, "libtpu") if machine.version(name)]
    # jax has read the environment when it was imported; in a notebook, it may say more by now.
    asked = (jax.config.jax_platforms, *map(os.environ.get, ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")))
    if devices[0].platform == "cpu" and made_for and not any("cpu" in (names or "") for names in asked):
        raise ConfigError(
            f"no accelerator: {made_for[0]} is installed, and jax finds only the CPU; see that the driver is loaded, "
            "that this container may use the device, and that no other process has it, or set JAX_PLATFORMS=cpu"
        )
    return devices


def param_specs(spec: ModelSpec) -> Params:
    """A PartitionSpec per weight, from the logical axes of the model's definition."""
    _, axes = abstract(spec)
    return jax.tree.map(
        lambda names: PartitionSpec(*(MESH_AXES[n] for n in names)), axes, is_leaf=lambda x: isinstance(x, tuple)
    )


def stacked_specs(specs: Params) -> Params:
    """The same for layers as one stacked tree [L, ...]."""
    layer = jax.tree.map(lambda s: PartitionSpec(None, *s), specs["layers"][0])
    return {**specs, "layers": layer}


def shardings(spec: ModelSpec, mesh: Mesh) -> Params:
    """A NamedSharding per weight, layers as a list."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), param_specs(spec))


def placed(spec: ModelSpec, mesh: Mesh, stacked: bool) -> Params:
    """Every weight as it lies on its devices: a `jax.ShapeDtypeStruct` with its sharding."""
    shapes, specs = abstract(spec)[0], param_specs(spec)
    if stacked:
        shapes, specs = jax.eval_shape(stack_layers, shapes), stacked_specs(specs)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)), shapes, specs
    )
