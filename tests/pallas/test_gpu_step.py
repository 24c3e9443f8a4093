"""A whole forward made of the NVIDIA kernels, compiled by the real CUDA compiler for one H200 and for several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
from jlora.model.spec import TARGETS, ModelSpec
from jlora.pallas.cases import LLAMA2_7B, LLAMA3_8B
from jlora.pallas.dispatch import Site, choose
from jlora.pallas.gpu_ops import runtime_refusal
from jlora.pallas.gpu_support import Gpu, fit_units
from jlora.pallas.ops import GROUPS
from tests.pallas import _aot, _gpu
from tests.pallas._aot import Compiled

pytestmark = [
    pytest.mark.aot_cuda,
    pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal())),
]

GIB = 1 << 30
DECODE, PROMPTS = (64, 1), (16, 32)
SHAPES = pytest.mark.parametrize("shape", [DECODE, PROMPTS], ids=["decode", "prompts"])


def compiled_step(
    spec: ModelSpec, gib: int, shape: tuple[int, int], tp: int = 1, bare: bool = False, kernels: str = "pallas"
) -> Compiled:
    """The forward program with layers unrolled, over a pool of `gib` on each device."""
    _gpu.need_compiler()
    mesh = Mesh(np.array(_gpu.devices(tp)), ("tp",), axis_types=(AxisType.Auto,))
    blocks = gib * tp * GIB // PoolLayout.of(spec, 1, 32).block_bytes
    layout = fit_units(PoolLayout.of(spec, blocks, 32, tp))
    width = layout.blocks_for(spec.max_len)
    site = Site("gpu", "H200", layout, spec.heads, (DECODE, PROMPTS), width, 64, Gpu("9.0"))
    programs = step.build(spec, layout, mesh, False, choose(site, kernels).ops, step.Making(host_waits=True))
    params, specs = llama.abstract(spec)[0], sharding.param_specs(spec)
    builder = BatchBuilder(layout, EngineConfig(max_seqs=64, max_step_tokens=512), spec, lambda uid: (), bare)
    pool = _aot.placed(jax.ShapeDtypeStruct(layout.shape, jnp.dtype(layout.dtype)), mesh, sharding.POOL)
    last = jax.eval_shape(lambda: empty_slots(64, spec.vocab)).last
    rest = _aot.placed((last, builder.blank(*shape, bare=bare).batch), mesh)
    return _aot.compiled(programs.forward, (_aot.placed(params, mesh, specs), pool, *rest), mesh)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", ["write_blocks", "write_layers"])
def test_copies_into_the_pool_update_it_in_place(name: str, tp: int, record_property: Any):
    _gpu.need_compiler()
    program = _aot.compiled_copy(name, Mesh(np.array(_gpu.devices(tp)), ("tp",), axis_types=(AxisType.Auto,)))
    record_property("compiled", program.row(f"{name} llama3-8b, 64 blocks", "H200", tp))
    assert program.alias >= 8 * GIB - _aot.COPIED
    assert program.temp < 0.05 * 8 * GIB
    assert _aot.collectives(program.text) == {}


@pytest.mark.parametrize("tp", [1, 4])
def test_a_copy_out_of_the_pool_takes_nothing_beside_what_it_copies(tp: int, record_property: Any):
    _gpu.need_compiler()
    program = _aot.compiled_copy("read_blocks", Mesh(np.array(_gpu.devices(tp)), ("tp",), axis_types=(AxisType.Auto,)))
    record_property("compiled", program.row("read_blocks llama3-8b, 64 blocks", "H200", tp))
    assert program.temp < 0.05 * 64 * _aot.COPIED / tp
    assert _aot.collectives(program.text) == {}


def kernels(program: Compiled) -> int:
    """How many launches of our kernels the program has."""
    return program.text.count('custom_call_target="mosaic_gpu')


@SHAPES
@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (LLAMA3_8B, 2),
        pytest.param(LLAMA2_7B, 2, marks=pytest.mark.aot_more),
        pytest.param(LLAMA3_8B, 32, marks=pytest.mark.aot_more),
        pytest.param(LLAMA2_7B, 32, marks=pytest.mark.aot_more),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_whole_step_updates_the_pool_in_place(
    spec: ModelSpec, layers: int, shape: tuple[int, int], record_property: Any
):
    program = compiled_step(replace(spec, layers=layers), 8, shape)
    record_property("compiled", program.row(f"{spec.name} step, {layers} layers, {shape[0]}x{shape[1]}", "H200", 1))
    assert program.alias >= 8 * GIB - PoolLayout.of(spec, 1, 32).block_bytes
    assert program.temp < 0.05 * 8 * GIB
    # Per layer: attention, and three launches for each group of projections.
    assert kernels(program) == layers * (1 + 3 * len(GROUPS))


def test_a_decode_step_without_adapters_launches_attention_only(record_property: Any):
    program = compiled_step(replace(LLAMA3_8B, layers=2), 8, DECODE, bare=True)
    record_property("compiled", program.row("llama3-8b step without adapters, 2 layers, 64x1", "H200", 1))
    assert kernels(program) == 2 and "lora_shrink" not in program.text
    assert program.alias >= 8 * GIB - PoolLayout.of(LLAMA3_8B, 1, 32).block_bytes


def test_a_server_of_attention_adapters_launches_nothing_for_the_others(
    record_property: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step, "Making", partial(step.Making, adapted=TARGETS["attention"]))
    program = compiled_step(replace(LLAMA3_8B, layers=2), 8, DECODE)
    record_property("compiled", program.row("llama3-8b step, attention's adapters, 2 layers, 64x1", "H200", 1))
    assert kernels(program) == 2 * (1 + 3 * 2)


@pytest.mark.parametrize(
    "shape", [DECODE, pytest.param(PROMPTS, marks=pytest.mark.aot_more)], ids=["decode", "prompts"]
)
def test_a_pool_that_fills_the_memory_costs_no_more_launches(shape: tuple[int, int]):
    """XLA counts it several times, and would compute arrays again to make room."""
    small, large = (compiled_step(replace(LLAMA3_8B, layers=2), gib, shape) for gib in (8, 100))
    assert ".remat" not in large.text
    assert large.text.count(" fusion(") == small.text.count(" fusion(") > 0


def test_the_lists_of_adapters_are_made_once_for_all_layers():
    """What a layer launches of them costs a step of 32 layers more than the kernels that read them."""
    made = []
    for layers in (1, 2):
        program = compiled_step(replace(LLAMA3_8B, layers=layers), 1, DECODE)
        entry = program.text.partition("\nENTRY ")[2]
        made.append(sum("unit_pairs" in line and " fusion(" in line for line in entry.splitlines()))
    assert 0 < made[0] <= made[1] < made[0] + 5  # 27 a layer where they depend on it


def test_programs_of_whole_steps_run_without_graphs_and_plain_rows_without_branches(
    own_programs, monkeypatch: pytest.MonkeyPatch
):
    _gpu.need_compiler()
    options, jit = {}, jax.jit

    def noted(f: Any, **kwargs: Any) -> Any:
        made = jit(f, **kwargs)
        options[made] = kwargs.get("compiler_options")
        return made

    layout = fit_units(PoolLayout.of(LLAMA3_8B, 64, 32))
    mesh = Mesh(np.array(_gpu.devices(1)), ("tp",), axis_types=(AxisType.Auto,))
    monkeypatch.setattr(jax, "jit", noted)
    programs = step.build(LLAMA3_8B, layout, mesh, False, making=step.Making(host_waits=True))
    monkeypatch.undo()
    assert options[programs.forward] == options[programs.layers] == step.KEEPING | step.UNGRAPHED
    assert options[programs.sample] == step.KEEPING and programs.greedy is not None and programs.drawn is not None
    assert step.build(LLAMA3_8B, layout, mesh, False).greedy is None


@SHAPES
@pytest.mark.parametrize(
    ("spec", "layers", "tp"),
    [
        (LLAMA3_8B, 2, 4),
        pytest.param(LLAMA3_8B, 2, 2, marks=pytest.mark.aot_more),
        pytest.param(LLAMA2_7B, 2, 4, marks=pytest.mark.aot_more),
        pytest.param(LLAMA3_8B, 32, 4, marks=pytest.mark.aot_more),
        pytest.param(LLAMA2_7B, 32, 4, marks=pytest.mark.aot_more),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_step_on_several_gpus_has_two_large_sums_and_one_small_one_per_group(
    spec: ModelSpec, layers: int, tp: int, shape: tuple[int, int], record_property: Any
):
    program = compiled_step(replace(spec, layers=layers), 8, shape, tp)
    what = f"{spec.name} step, {layers} layers, {shape[0]}x{shape[1]}"
    record_property("compiled", program.row(what, "H200", tp))
    assert program.alias >= 8 * GIB - PoolLayout.of(spec, 1, 32).block_bytes
    assert program.temp < 0.05 * 8 * GIB
    assert kernels(program) == layers * (1 + 3 * len(GROUPS))
    # Layers are unrolled: a layer's two outputs of row-parallel products and its four groups; the embedding once.
    assert _aot.collectives(program.text) == {"all-gather": 1, "all-reduce": layers * (2 + len(GROUPS))}
