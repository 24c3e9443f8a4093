"""Compiles for accelerators that are not there: the real TPU compiler, abstract values, no device.

The compiler comes with a package (`libtpu`). Without it these tests are skipped with that reason;
where JLORA_AOT=required is set, as in continuous integration, its absence is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jlora.layout import PoolLayout
from jlora.model import sharding, step
from jlora.pallas.cases import LLAMA3_8B

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# Read when the compiler is loaded: it must not look for a machine, and may be loaded by several tests at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
MIB = 2**20
COPIED = PoolLayout.of(LLAMA3_8B, 1, 32).block_bytes  # of one block; a pool is whole blocks


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler said of a program: its HLO; bytes of temporaries, of arguments updated in place, of results.

    Attributes:
        stages: seconds of tracing, lowering and compiling.
    """

    text: str
    temp: int
    alias: int
    output: int
    stages: tuple[float, float, float]

    @property
    def seconds(self) -> float:
        return sum(self.stages)

    @property
    def vmem(self) -> int:
        """Most bytes of a TPU's vector memory that one of its kernels takes; 0: none, or no TPU."""
        sizes = re.findall(r'"used_scoped_memory_configs":\[{"memory_space":"1","offset":"0","size":"(\d+)"', self.text)
        return max(map(int, sizes), default=0)

    def row(self, what: str, chip: str, devices: int) -> list[str]:
        """For the table at the end of a test run (`conftest`)."""
        sizes = (f"{size / MIB:,.1f}" for size in (self.alias, self.temp))
        vmem = f"{self.vmem / MIB:.1f}" if self.vmem else ""
        return [what, chip, str(devices), f"{self.seconds:.1f}", *sizes, vmem]


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


def compiled(f: Any, args: tuple[Any, ...], mesh: Mesh) -> Compiled:
    """A jitted function compiled for the mesh's chips."""
    times = [time.monotonic()]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels ask it which chip they are for
        traced = f.trace(*args)
        times.append(time.monotonic())
        lowered = traced.lower()
        times.append(time.monotonic())
        program = lowered.compile()
    times.append(time.monotonic())
    memory = program.memory_analysis()
    traced_s, lowered_s, compiled_s = (later - before for before, later in pairwise(times))
    stages = (traced_s, lowered_s, compiled_s)
    sizes = memory.temp_size_in_bytes, memory.alias_size_in_bytes, memory.output_size_in_bytes
    return Compiled(program.as_text(), *sizes, stages)


def compiled_copy(name: str, mesh: Mesh) -> Compiled:
    """`write_blocks`, `write_layers` or `read_blocks` of 64 blocks, the most that swapping copies at a time.

    The pool has 8 GiB per device.

    Of all layers of Llama-3-8B, or of one group of them, as a streamed launch takes them.
    """
    spec, tp, streamed = LLAMA3_8B, mesh.devices.size, name == "write_layers"
    layout = PoolLayout.of(spec, tp * 8 * 2**30 // COPIED, 32, tp)
    programs = step.build(spec, layout, mesh, True)
    layers = spec.layers // step.layer_groups(spec.layers) if streamed else spec.layers
    pool, data = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (layout.shape, (64, layers, *layout.shape[1:])))
    ids, first = placed((np.zeros(64, np.int32), np.int32(0)), mesh)
    args = (placed(pool, mesh, sharding.POOL), ids, placed(data, mesh, sharding.BLOCKS), first)
    takes = {"write_blocks": 3, "write_layers": 4, "read_blocks": 2}[name]
    return compiled(getattr(programs, name), args[:takes], mesh)


def collectives(text: str) -> dict[str, int]:
    """How many of each collective stand in an HLO module; an asynchronous pair counts once."""
    names = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    return {name: names.count(name) for name in sorted(set(names))}
