"""Compiles for accelerators that are not there: the real TPU compiler, abstract values, no device.

The compiler comes with a package (`libtpu`). Without it these tests are skipped with that reason;
where JLORA_AOT=required is set, as in continuous integration, its absence is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# Read when the compiler is loaded: it must not look for a machine, and may be loaded by several tests at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def need(package: str) -> None:
    """Skips the test, with the reason, where a compiler's package is not installed."""
    if importlib.util.find_spec(package) is None:
        if os.environ.get("JLORA_AOT") == "required":
            pytest.fail(f"{package} is not installed, and JLORA_AOT=required")
        pytest.skip(f"{package} is not installed")


def tpu_mesh(chip: str, tp: int) -> Mesh:
    """The first `tp` chips of a slice of four."""
    need("libtpu")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    return Mesh(np.array(devices[:tp]), ("tp",), axis_types=(AxisType.Auto,))


def placed(tree: Any, mesh: Mesh, specs: Any = None) -> Any:
    """Abstract values with their shardings on the mesh: replicated, one spec for all, or a tree of them."""

    def place(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    if specs is None or isinstance(specs, PartitionSpec):
        return jax.tree.map(lambda x: place(x, specs or PartitionSpec()), tree)
    return jax.tree.map(place, tree, specs)


def compiled(f: Any, args: tuple[Any, ...], mesh: Mesh) -> Any:
    """A jitted function compiled for the mesh's chips."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels ask it which chip they are for
        return f.trace(*args).lower().compile()


def collectives(text: str) -> dict[str, int]:
    """How many of each collective stand in an HLO module; an asynchronous pair counts once."""
    names = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    return {name: names.count(name) for name in sorted(set(names))}
