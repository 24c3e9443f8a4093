"""The programs of a layer with the host's help, compiled by the real compilers for Llama-3-8B."""

from __future__ import annotations

from collections.abc import Iterator
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
from jlora.model.cut import SPLIT, CutLayer
from jlora.pallas.cases import LLAMA3_8B
from jlora.pallas.reference import XLA
from tests.pallas import _aot, _gpu
from tests.pallas.test_aot_tpu import ops_for

GIB = 1 << 30
TOKENS = 512
# Collectives of one layer under tensor parallelism.
WANTED = {
    "enter": {},
    "attend": {"all-reduce": 1},
    "middle": {"all-gather": 1},
    "hidden": {"all-reduce": 1},
    "leave": {"all-gather": 1},
}


def programs_of(mesh: Mesh, tpu: bool) -> Iterator[tuple[str, _aot.Compiled]]:
    """The five programs for prompts of 512 tokens, over a pool of 8 GiB on each device."""
    spec, tp = LLAMA3_8B, mesh.devices.size
    layout = PoolLayout.of(spec, 8 * tp * GIB // PoolLayout.of(spec, 1, 32).block_bytes, 32, tp)
    ops = ops_for(mesh, layout, spec, ((TOKENS // 32, 32),)) if tpu else XLA
    cut, stacked = step.build(spec, layout, mesh, tpu, ops).cut, tpu
    params, specs = llama.abstract(spec)[0], sharding.param_specs(spec)
    if stacked:
        params, specs = jax.eval_shape(llama.stack_layers, params), sharding.stacked_specs(specs)
    layers, spec_of = params["layers"], specs["layers"]
    w = _aot.placed(layers, mesh, spec_of) if stacked else _aot.placed(layers[0], mesh, spec_of[0])
    builder = BatchBuilder(layout, EngineConfig(max_seqs=64, max_step_tokens=TOKENS), spec, lambda uid: ())
    pool = _aot.placed(jax.ShapeDtypeStruct(layout.shape, jnp.dtype(layout.dtype)), mesh, sharding.POOL)
    at, batch = _aot.placed((np.int32(0), builder.blank(TOKENS // 32, 32).batch), mesh)

    def rows(width: int, *spec: Any) -> Any:
        return _aot.placed(jax.ShapeDtypeStruct((TOKENS, width), jnp.dtype(layout.dtype)), mesh, *spec)

    x, added = rows(LLAMA3_8B.width), rows(LLAMA3_8B.width, SPLIT)
    qkv, gate_up = (rows(n, SPLIT) for n in (sum(spec.projection_shapes[p][1] for p in "qkv"), 2 * spec.mlp))
    args = dict(
        enter=(w, x, at),
        attend=(w, pool, (qkv, qkv), at, batch),
        middle=(w, x, (x, added), at),
        hidden=(w, (gate_up, gate_up), at),
        leave=(x, (x, added)),
    )
    for name in CutLayer._fields:
        yield name, _aot.compiled(getattr(cut, name), args[name], mesh)


def check(mesh: Mesh, tpu: bool, chip: str, record_property: Any) -> None:
    for name, program in programs_of(mesh, tpu):
        record_property("compiled", program.row(f"{name} llama3-8b, {TOKENS} tokens", chip, mesh.devices.size))
        assert _aot.collectives(program.text) == (WANTED[name] if mesh.devices.size > 1 else {}), name
        assert program.temp < 0.05 * 8 * GIB, name
        if name == "attend":
            assert program.alias >= 8 * GIB - _aot.COPIED


@pytest.mark.aot_tpu
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.aot_more), 4])
def test_a_cut_layer_compiles_for_a_tpu(tp: int, record_property: Any):
    check(_aot.tpu_mesh("v6e", tp), True, "v6e", record_property)


@pytest.mark.aot_cuda
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.aot_more), 4])
def test_a_cut_layer_compiles_for_an_h200(tp: int, record_property: Any):
    _gpu.need_compiler()
    mesh = Mesh(np.array(_gpu.devices(tp)), ("tp",), axis_types=(AxisType.Auto,))
    check(mesh, False, "H200", record_property)
