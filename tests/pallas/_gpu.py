"""NVIDIA kernels without a GPU: run in the interpreter, or compiled by the real compiler for an H200.

The interpreter finds wrong results, missing waits and wrong barrier counts. It does not know
tiles, alignment, registers or the size of shared memory: that is what the compiler finds. So every
kernel is tested both ways.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from tests.pallas._aot import need

TARGET = Path(__file__).with_name("h200.txtpb")


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels traced inside run in the interpreter, which looks for races."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert not gpu_callbacks.get_races().races_found


def need_compiler() -> None:
    """Skips the test, with the reason, where nothing can be compiled for CUDA."""
    need("jax_cuda13_plugin")
    need("jax_cuda13_plugin" if compiler_folder() else "nvidia-cuda-nvcc")


def compiler_folder() -> Path | None:
    """Where pip put ptxas: as new as what this jax emits, which the system's may not be."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations if spec else None) or ()
    found = [path for root in roots for path in Path(root).glob("*/bin/ptxas")]
    return found[0].parent if found else None


@functools.cache
def device() -> Any:
    """An H200 that exists for the compiler only."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    folder = str(compiler_folder())
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
    topology = topologies.get_topology_desc("h200", platform="cuda", topology="1x1x1", target_config=TARGET.read_text())
    return topology.devices[0]


def compiled(f: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """f compiled for one H200; `args` are trees of abstract values."""
    need_compiler()
    mesh = Mesh(np.array([device()]), ("x",), axis_types=(AxisType.Auto,))
    placed = SingleDeviceSharding(device())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f, donate_argnums=donate).trace(*args).lower().compile()
