"""A whole forward made of the NVIDIA kernels, compiled by the real CUDA compiler for an H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jlora.config import EngineConfig
from jlora.engine.batch import BatchBuilder
from jlora.layout import PoolLayout
from jlora.model import llama, sharding, step
from jlora.model.sampling import empty_slots
from jlora.model.spec import ModelSpec
from jlora.pallas.cases import LLAMA2_7B, LLAMA3_8B
from jlora.pallas.dispatch import Site, choose
from jlora.pallas.gpu_layout import fit_units
from jlora.pallas.gpu_ops import runtime_refusal
from jlora.pallas.ops import GROUPS
from tests.pallas import _aot, _gpu

pytestmark = [
    pytest.mark.aot_cuda,
    pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal())),
]

GIB = 1 << 30


def compiled_step(spec: ModelSpec, gib: int, rows: int, chunk: int) -> tuple[Any, int]:
    """The forward program with layers unrolled, and its pool's bytes."""
    _gpu.need_compiler()
    mesh = Mesh(np.array([_gpu.device()]), ("tp",), axis_types=(AxisType.Auto,))
    blocks = gib * GIB // PoolLayout.of(spec, 1, 32).block_bytes
    layout = fit_units(PoolLayout.of(spec, blocks, 32))
    site = Site("gpu", "H200", layout, spec.heads, ((64, 1), (16, 32)), layout.blocks_for(spec.max_len), 64)
    programs = step.build(spec, layout, mesh, False, choose(site, "pallas").ops)
    params, specs = llama.abstract(spec)[0], sharding.param_specs(spec)
    builder = BatchBuilder(layout, EngineConfig(max_seqs=64, max_step_tokens=512), spec, lambda uid: ())
    pool = _aot.placed(jax.ShapeDtypeStruct(layout.shape, jnp.dtype(layout.dtype)), mesh, sharding.POOL)
    last = jax.eval_shape(lambda: empty_slots(64, spec.vocab)).last
    rest = _aot.placed((last, builder.blank(rows, chunk).batch), mesh)
    program = _aot.compiled(programs.forward, (_aot.placed(params, mesh, specs), pool, *rest), mesh)
    return program, blocks * layout.block_bytes


@pytest.mark.parametrize(("rows", "chunk"), [(64, 1), (16, 32)], ids=["decode", "prompts"])
@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (LLAMA3_8B, 2),
        pytest.param(LLAMA2_7B, 2, marks=pytest.mark.slow),
        pytest.param(LLAMA3_8B, 32, marks=pytest.mark.slow),
        pytest.param(LLAMA2_7B, 32, marks=pytest.mark.slow),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_whole_step_updates_the_pool_in_place(spec: ModelSpec, layers: int, rows: int, chunk: int):
    program, pool_bytes = compiled_step(replace(spec, layers=layers), 8, rows, chunk)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes
    # Per layer: attention, and three launches for each group of projections.
    assert program.as_text().count('custom_call_target="mosaic_gpu') == layers * (1 + 3 * len(GROUPS))
