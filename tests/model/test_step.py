"""The compiled step: the pool is updated in place, on one device and on two."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jlora.config import EngineConfig
from jlora.engine.batch import BatchBuilder
from jlora.layout import PoolLayout
from jlora.model import llama, sharding, step
from jlora.model.sampling import empty_slots
from jlora.model.spec import ModelSpec
from tests._make import tiny_spec

BLOCKS, MAX_SEQS = 16000, 4


def compiled(rows: int, chunk: int, tp: int, stacked: bool):
    """The forward program compiled from abstract values only, and its pool's bytes per device."""
    lowered, layout = forward(tiny_spec(), rows, chunk, tp, stacked)
    return lowered.compile(), BLOCKS * layout.block_bytes // tp


def forward(spec: ModelSpec, rows: int, chunk: int, tp: int = 1, stacked: bool = True) -> tuple[Any, PoolLayout]:
    """The forward program as it is lowered, and the layout of its pool."""
    mesh = sharding.make_mesh(tp)
    layout = PoolLayout.of(spec, BLOCKS, 8, tp)
    programs = step.build(spec, layout, mesh, stacked)
    params, specs = llama.abstract(spec)[0], sharding.param_specs(spec)
    if stacked:
        params, specs = jax.eval_shape(llama.stack_layers, params), sharding.stacked_specs(specs)

    def placed(x: jax.ShapeDtypeStruct, s) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))

    builder = BatchBuilder(layout, EngineConfig(max_seqs=MAX_SEQS, max_step_tokens=64), spec, lambda uid: ())
    pool = placed(jax.ShapeDtypeStruct(layout.shape, np.dtype(spec.dtype)), sharding.POOL)
    last = jax.eval_shape(lambda: empty_slots(MAX_SEQS, spec.vocab)).last
    batch = builder.blank(rows, chunk).batch
    return programs.forward.lower(jax.tree.map(placed, params, specs), pool, last, batch), layout


@pytest.mark.parametrize(("rows", "chunk"), [(4, 1), (2, 32)])
def test_products_of_float32_are_float32_on_every_platform(rows: int, chunk: int):
    """By default a GPU takes TF32 and a TPU bfloat16 for them; bfloat16's own products keep the default."""
    products = [line for line in forward(tiny_spec(), rows, chunk)[0].as_text().splitlines() if "dot_general" in line]
    assert len(products) >= 7 and all("HIGHEST, HIGHEST" in line for line in products)
    assert "HIGHEST" not in forward(tiny_spec(dtype="bfloat16"), rows, chunk)[0].as_text()


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize(("rows", "chunk", "tp"), [(4, 1, 1), (2, 32, 1), (4, 1, 2)])
def test_the_forward_updates_the_pool_in_place(rows: int, chunk: int, tp: int, stacked: bool):
    program, pool_bytes = compiled(rows, chunk, tp, stacked)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("program", ["write_blocks", "write_layers"])
def test_swapping_blocks_in_updates_the_pool_in_place(program: str, tp: int):
    """Whole, and in groups of layers, as a streamed copy comes."""
    spec, mesh = tiny_spec(), sharding.make_mesh(tp)
    layout = PoolLayout.of(spec, BLOCKS, 8, tp)
    programs = step.build(spec, layout, mesh, True)

    def placed(shape: tuple[int, ...], of: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, of))

    pool, ids = placed(layout.shape, sharding.POOL), jax.ShapeDtypeStruct((4,), np.int32)
    if program == "write_blocks":
        lowered = programs.write_blocks.lower(pool, ids, placed((4, *layout.block_shape), sharding.BLOCKS))
    else:
        group = spec.layers // step.layer_groups(spec.layers)
        data, first = placed((4, group, *layout.block_shape[1:]), sharding.BLOCKS), jax.ShapeDtypeStruct((), np.int32)
        lowered = programs.write_layers.lower(pool, ids, data, first)
    memory = lowered.compile().memory_analysis()
    pool_bytes = BLOCKS * layout.block_bytes // tp
    assert memory.alias_size_in_bytes >= pool_bytes and memory.temp_size_in_bytes < 0.05 * pool_bytes
