"""NVIDIA kernels without a GPU: run in the interpreter, or compiled by the real compiler for an H200.

The interpreter finds wrong results, missing waits and wrong barrier counts. It does not know
tiles, alignment, registers or the size of shared memory: that is what the compiler finds. So every
kernel is tested both ways.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from tests.pallas import _aot
from tests.pallas._aot import Compiled, need

TARGET = Path(__file__).with_name("h200.txtpb")


@contextmanager
def compiled_quickly() -> Iterator[None]:
    """An interpreted kernel is a program of callbacks: XLA's optimizations are a third of its time and gain nothing."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextmanager
def interpreted(devices: int = 1) -> Iterator[None]:
    """Kernels traced inside run in the interpreter, which looks for races; on so many devices at once.

    On several devices it does not: there it reports races of a kernel that it finds none in on one device.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory

    check, ended = GPUSharedMemory.assert_no_barriers_allocated, threading.Barrier(devices)

    def when_all_have_ended(memory: GPUSharedMemory) -> None:
        """The check is of all devices' barriers, and a device makes it as soon as it has finished itself."""
        ended.wait(timeout=120)
        check(memory)

    with (
        compiled_quickly(),
        mock.patch.object(GPUSharedMemory, "assert_no_barriers_allocated", when_all_have_ended),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=devices == 1)),
    ):
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
def devices(count: int = 1) -> tuple[Any, ...]:
    """H200s of one host that exist for the compiler only."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    folder = str(compiler_folder())
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
    shape = f"1x1x{count}"
    topology = topologies.get_topology_desc("h200", platform="cuda", topology=shape, target_config=TARGET.read_text())
    return tuple(topology.devices)


def compiled(f: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Compiled:
    """f compiled for one H200; `args` are trees of abstract values."""
    need_compiler()
    mesh = Mesh(np.array(devices()), ("x",), axis_types=(AxisType.Auto,))
    placed = SingleDeviceSharding(devices()[0])
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed), args)
    return _aot.compiled(jax.jit(f, donate_argnums=donate), args, mesh)
