"""Kernels and whole steps compiled by the real TPU compiler: memory, aliasing, collectives.

Nothing runs. What the compiler proves: the kernels are valid for the chip, their windows and
buffers fit its vector memory, the pool is updated in place without a copy, and what of a step is
collective communication. Speed and numerics need a device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jlora.config import EngineConfig
from jlora.engine.batch import BatchBuilder
from jlora.layout import PoolLayout
from jlora.model import llama, sharding, step
from jlora.model.sampling import empty_slots
from jlora.model.spec import ModelSpec
from jlora.pallas import cases
from jlora.pallas.dispatch import Site, choose
from jlora.pallas.ops import GROUPS, Adapted, Ops
from tests.pallas import _aot

pytestmark = pytest.mark.aot_tpu

GIB = 2**30
SOME = {
    "llama3-8b tp=1 q+k+v decode 64, 8 adapters",
    "llama3-8b tp=1 gate+up decode 64, 64 adapters, mixed ranks",
    "llama3-8b tp=1 down prefill 2048, 4 adapters",
    "llama2-7b tp=1 q+k+v prefill 2048, 4 adapters",
    "llama3-8b tp=4 q+k+v decode 64, 8 adapters",
    "llama2-7b tp=4 gate+up prefill 2048, 4 adapters",
    "llama3-8b tp=1 decode 64 x 1k",
    "llama3-8b tp=1 prefill 2048",
    "llama2-7b tp=1 decode 8 x 1k",
    "llama3-8b tp=4 decode 32 x 1k",
}


def representative(values: list[Any]) -> list[Any]:
    """A few of the cases always, all of them under the marker `slow`."""
    return [pytest.param(c, id=c.name, marks=() if c.name in SOME else pytest.mark.slow) for c in values]


def ops_for(mesh: Mesh, layout: PoolLayout, spec: ModelSpec, shapes: tuple[tuple[int, int], ...]) -> Ops:
    kind = mesh.devices.flat[0].device_kind
    return choose(Site("tpu", kind, layout, spec.heads, shapes, layout.blocks_for(spec.max_len)), "pallas").ops


def grown(pool: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same pool with about 1 GiB of rows."""
    row = int(np.prod(pool.shape[1:])) * pool.dtype.itemsize
    return jax.ShapeDtypeStruct((GIB // row, *pool.shape[1:]), pool.dtype)


CHIPS = [pytest.param(c, marks=() if c in ("v5e", "v6e") else pytest.mark.slow) for c in _aot.TOPOLOGIES]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", representative(cases.LARGE_LORA))
def test_lora_compiles_without_a_copy_of_the_pool(case: cases.LoraCase, chip: str):
    mesh = _aot.tpu_mesh(chip, case.tp)
    layout = replace(case.layout, blocks=4096)  # the lists of a pool of that size
    shapes = ((case.count, 1),) if case.count <= 64 else ((case.count // 32, 32),)
    op = ops_for(mesh, layout, case.spec, shapes).lora
    x, pool, first, projections, adapters = cases.lora_shapes(case, layout.blocks)
    units = [p.unit for p in projections]

    def local(x, pool, first, bases, active, adapters):
        made = [Adapted(*parts) for parts in zip(bases, active, units, strict=True)]
        return op(x, pool, first, made, adapters, (lambda h: jax.lax.psum(h, "tp")) if case.tp > 1 else None)

    every = PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    args = (x, grown(pool), first, [p.base for p in projections], [p.active for p in projections], adapters)
    program = _aot.compiled(jax.jit(mapped, donate_argnums=3), _aot.placed(args, mesh), mesh)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * GIB
    assert memory.alias_size_in_bytes >= sum(p.base.size * p.base.dtype.itemsize for p in projections)
    text = program.as_text()
    # No adapter, no launch: the kernel is inside a branch, or a loop whose turns are the list's.
    assert "tpu_custom_call" in text and ("conditional(" in text if case.tp == 1 else "while(" in text)
    assert "tpu_custom_call" not in text[text.index("ENTRY") :]
    assert _aot.collectives(text) == ({"all-reduce": 1} if case.tp > 1 else {})


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", representative(cases.LARGE_ATTENTION))
def test_attention_compiles_without_a_copy_of_the_pool(case: cases.AttentionCase, chip: str):
    mesh = _aot.tpu_mesh(chip, 1)
    shapes = ((len(case.rows), case.chunk),)
    op = ops_for(mesh, case.layout, case.spec, shapes).attention
    q, pool, first, pages = cases.attention_shapes(case)
    program = _aot.compiled(jax.jit(op), _aot.placed((q, grown(pool), first, pages), mesh), mesh)
    assert program.memory_analysis().temp_size_in_bytes < 0.05 * GIB


# model, chip, devices, GiB of pool on each: what is left beside the weights, or less.
STEPS = [
    (cases.LLAMA2_7B, "v5e", 1, 1.5),
    (cases.LLAMA3_8B, "v6e", 1, 8),
    (cases.LLAMA2_7B, "v6e", 1, 8),
    (cases.LLAMA3_8B, "v5e", 4, 8),
    (cases.LLAMA2_7B, "v5e", 4, 8),
    (cases.LLAMA3_8B, "v6e", 4, 8),
    (cases.LLAMA2_7B, "v6e", 4, 8),
    (cases.LLAMA3_8B, "v5p", 1, 8),
    (cases.LLAMA3_8B, "v4", 1, 8),
]
ALWAYS = {("llama3-8b", "v6e", 1), ("llama3-8b", "v5e", 4), ("llama2-7b", "v5e", 1)}


@pytest.mark.parametrize(("rows", "chunk"), [(64, 1), (16, 32)], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("spec", "chip", "tp", "gib"),
    [
        pytest.param(
            *s, id=f"{s[0].name} {s[1]} x{s[2]}", marks=() if (s[0].name, *s[1:3]) in ALWAYS else pytest.mark.slow
        )
        for s in STEPS
    ],
)
def test_a_whole_step_updates_the_pool_in_place(spec: ModelSpec, chip: str, tp: int, gib: float, rows: int, chunk: int):
    mesh = _aot.tpu_mesh(chip, tp)
    blocks = int(gib * tp * GIB) // PoolLayout.of(spec, 1, 32, tp).block_bytes
    layout = PoolLayout.of(spec, blocks, 32, tp)
    programs = step.build(spec, layout, mesh, True, ops_for(mesh, layout, spec, ((rows, chunk),)))
    program = _aot.compiled(programs.forward, step_values(spec, layout, mesh, rows, chunk), mesh)
    memory = program.memory_analysis()
    pool_bytes = blocks * layout.block_bytes // tp
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes
    # A layer: attention, and the two outputs of row-parallel products; one small sum per group of projections.
    want = {"all-reduce": 2 + len(GROUPS), "all-gather": 1} if tp > 1 else {}
    assert _aot.collectives(program.as_text()) == want


def step_values(spec: ModelSpec, layout: PoolLayout, mesh: Mesh, rows: int, chunk: int) -> tuple[Any, ...]:
    """Abstract arguments of `Programs.forward`."""
    params = jax.eval_shape(llama.stack_layers, llama.abstract(spec)[0])
    specs = sharding.stacked_specs(sharding.param_specs(spec))
    builder = BatchBuilder(layout, EngineConfig(max_seqs=64, max_step_tokens=512), spec, lambda uid: ())
    pool = _aot.placed(jax.ShapeDtypeStruct(layout.shape, jnp.dtype(layout.dtype)), mesh, sharding.POOL)
    last = jax.eval_shape(lambda: empty_slots(64, spec.vocab)).last
    blank = builder.blank(rows, chunk).batch
    return _aot.placed(params, mesh, specs), pool, *_aot.placed((last, blank), mesh)
