"""A launch without adapters: its program has no LoRA kernel, or a branch that it does not enter.

A batch whose lists have no room (`Batch.lists` of width 0) is a shape of its own: the forward
made for it knows no adapters, whatever the ops are made of.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.layout import PoolLayout
from jlora.model import llama, sharding, step
from jlora.pallas import gpu_ops
from jlora.pallas.gpu_support import fit_units
from jlora.pallas.ops import Ops
from jlora.pallas.reference import XLA
from jlora.pallas.tiles import chip_of
from jlora.pallas.tpu_lora import TpuLora
from tests.pallas.test_tpu_step import BLOCKS, SPEC, changed, launch

HALF = replace(SPEC, dtype="bfloat16")


def bare(batch: step.Batch) -> step.Batch:
    """The same launch for the program without adapters."""
    return changed(batch, adapters=-1)._replace(lists=np.zeros((2, 0), np.int32))


def traced(ops: Ops, layout: PoolLayout, batch: step.Batch, dtype: str) -> str:
    """The forward's program as jax hands it to a compiler."""
    spec = replace(SPEC, dtype=dtype)
    programs = step.build(spec, layout, sharding.make_mesh(1), True, ops)
    params = jax.eval_shape(llama.stack_layers, llama.abstract(spec)[0])
    pool = jax.ShapeDtypeStruct(layout.shape, jnp.dtype(dtype))
    return str(programs.forward.trace(params, pool, jax.ShapeDtypeStruct((4,), np.int32), batch).jaxpr)


def tpu_ops() -> tuple[Ops, PoolLayout, str]:
    chip = chip_of("TPU v5 lite")
    assert chip is not None
    return replace(XLA, lora=TpuLora(chip)), PoolLayout.of(SPEC, BLOCKS, 16), "fused_lora"


def gpu_lora_ops() -> tuple[Ops, PoolLayout, str]:
    if reason := gpu_ops.runtime_refusal():
        pytest.skip(reason)
    layout = fit_units(PoolLayout.of(HALF, BLOCKS, 32))
    lora = gpu_ops.lora_op(layout, gpu_ops.Limits(sequences=4, rank=32, row=32), XLA.lora)
    return replace(XLA, lora=lora), layout, "lora_shrink"


@pytest.mark.parametrize("platform", [tpu_ops, gpu_lora_ops], ids=["tpu", "gpu"])
def test_a_program_without_adapters_has_no_lora_kernel(platform):
    ops, layout, kernel = platform()
    batch = launch(1, 1)[2]
    assert kernel in traced(ops, layout, batch, layout.dtype)
    assert "lora" not in traced(ops, layout, bare(batch), layout.dtype)


def test_a_program_without_adapters_has_no_loop_over_their_blocks():
    layout, _, batch = launch(1, 1)
    loops = [traced(XLA, layout, b, "float32").count("while[") for b in (batch, bare(batch))]
    # What is left is attention's own; the loops of (q, k, v), o, (gate, up) and down are gone.
    assert loops[0] - loops[1] == 4 and loops[1] > 0


@pytest.mark.slow
def test_a_program_without_adapters_gives_what_a_batch_without_any_gives():
    layout, pool, batch = launch(1, 8)
    programs = step.build(SPEC, layout, sharding.make_mesh(1), True)
    params = llama.stack_layers(llama.plain(nnx.state(llama.Llama(SPEC, nnx.Rngs(0)))))
    none = changed(batch, adapters=-1, offsets=0)
    found = [programs.forward(params, jnp.array(pool), np.zeros(4, np.int32), b)[:2] for b in (none, bare(batch))]
    for with_op, without in zip(*found, strict=True):
        np.testing.assert_allclose(np.array(without), np.array(with_op), atol=1e-5)
    rows = programs.forward(params, jnp.array(pool), np.zeros(4, np.int32), batch)[1]
    assert np.abs(np.array(rows) - np.array(found[0][1])).max() > 0.1  # its adapters do something
