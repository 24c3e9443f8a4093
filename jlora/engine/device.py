"""The device side of an engine: ops, programs, pool and slot state for weights that are already loaded.

Kept apart from `build`, which reads files: a benchmark with random weights needs this part alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jlora import machine
from jlora.cache.pool import DevicePool, has_pinned_host
from jlora.config import Config
from jlora.engine.ahead import Ahead, Shapes
from jlora.engine.batch import BatchBuilder, Projections
from jlora.engine.runner import Runner
from jlora.layout import PoolLayout
from jlora.model import sampling, sharding, step
from jlora.model.llama import Params
from jlora.model.spec import TARGETS, ModelSpec
from jlora.model.traced import Traced
from jlora.pallas.dispatch import Chosen, Site, choose
from jlora.pallas.gpu_support import Gpu, attention_refusal, fit_units, refusal_of
from jlora.ports import Clock


@dataclass(frozen=True, slots=True)
class Prepared:
    """The device side before its arrays exist: `ahead` compiles meanwhile."""

    spec: ModelSpec
    layout: PoolLayout
    mesh: Mesh
    stacked: bool
    builder: BatchBuilder
    state: Callable[[], sampling.SlotState]
    groups: int
    ahead: Ahead

    def complete(self, params: Params, clock: Clock = time.monotonic) -> tuple[Runner, DevicePool]:
        """Everything that lives on the devices, with these weights. `clock`: the engine's."""
        pool = DevicePool(self.layout, self.mesh, self.ahead.programs, self.groups, has_pinned_host(self.mesh))
        return Runner(params, pool, self.state(), self.builder, self.ahead, clock), pool


def prepare(config: Config, spec: ModelSpec, layout: PoolLayout, projections: Projections) -> Prepared:
    """Programs and shapes; the weights that complete it are stacked or listed as `uses_scan` says.

    Raises:
        ConfigError: `engine.kernels` asks for kernels that do not serve this model here.
    """
    mesh = sharding.make_mesh(config.model.tp)
    platform = mesh.devices.flat[0].platform
    builder = BatchBuilder(layout, config.engine, spec, projections, has_bare(platform))
    launches = tuple(builder.buckets.shapes)
    ops = choose_ops(config, spec, layout, launches).ops
    stacked = uses_scan(config.engine.layers, platform)
    adapted, site = TARGETS[config.adapters.target_modules], _site(config, spec, layout, launches)
    facts = replace(spec, name=""), mesh.shape, stacked, site, config.engine.kernels, adapted
    kept = jax.config.jax_compilation_cache_dir
    making = step.Making(host_waits=has_bare(platform), adapted=adapted)
    making = making._replace(wrap=Traced(Path(kept), *facts)) if kept else making
    programs = step.build(spec, layout, mesh, stacked, ops, making)
    replicated = NamedSharding(mesh, sharding.REPLICATED)
    state = jax.jit(lambda: sampling.empty_slots(config.engine.max_seqs, spec.vocab), out_shardings=replicated)
    groups = step.layer_groups(spec.layers)
    shapes = Shapes(
        sharding.placed(spec, mesh, stacked),
        jax.ShapeDtypeStruct(layout.shape, layout.dtype, sharding=NamedSharding(mesh, sharding.POOL)),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), jax.eval_shape(state)),
    )
    ahead = Ahead(programs, shapes, groups, spec.layers // groups)
    return Prepared(spec, layout, mesh, stacked, builder, state, groups, ahead)


def choose_ops(config: Config, spec: ModelSpec, layout: PoolLayout, shapes: tuple[tuple[int, int], ...]) -> Chosen:
    """The implementation of each op on this process's devices, for launches of `shapes`."""
    return choose(_site(config, spec, layout, shapes), config.engine.kernels)


def _site(config: Config, spec: ModelSpec, layout: PoolLayout, shapes: tuple[tuple[int, int], ...]) -> Site:
    device = jax.devices()[0]
    width, rank = layout.blocks_for(spec.max_len), config.adapters.max_rank
    return Site(device.platform, device.device_kind, layout, spec.heads, shapes, width, rank, Gpu.of(device))


def fitted(layout: PoolLayout, kernels: str) -> PoolLayout:
    """The layout with units as the platform's kernels read them, where these are to be used."""
    device = jax.devices()[0]
    if device.platform != "gpu" or kernels == "xla" or refusal_of(device) or attention_refusal(layout):
        return layout
    from jlora.pallas.gpu_ops import runtime_refusal  # jax's front of Mosaic GPU is for a process on a GPU

    return layout if runtime_refusal() else fit_units(layout)


def name_of(device: Any) -> str:
    """What a measurement names the device by; of a CPU the processor and its cores."""
    if device.platform != "cpu":
        return device.device_kind
    found = machine.describe()
    return f"{found['processor']}, {found['cores']} cores"


def uses_scan(layers: str, platform: str) -> bool:
    """Scan over stacked layers on TPU, unrolled elsewhere (on GPU a scan copies its weights each step)."""
    return platform == "tpu" if layers == "auto" else layers == "scan"


def has_bare(platform: str) -> bool:
    """Whether decode launches without adapters run programs that have no LoRA op at all.

    On CPU and TPU the op is a branch or a loop that such a launch does not enter. On a GPU the
    host waits for every branch of XLA, and every kernel costs its start, in 4 places of each layer.
    Prompts compute for much longer than that.
    """
    return platform == "gpu"
