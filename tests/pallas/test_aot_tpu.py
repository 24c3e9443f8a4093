"""Kernels and whole steps compiled by the real TPU compiler: memory, aliasing, collectives.

Nothing runs. What the compiler proves: the kernels are valid for the chip, their windows and
buffers fit its vector memory, the pool is updated in place without a copy, and what of a step is
collective communication. Speed and numerics need a device.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jlora.cache.pool import pieces
from jlora.config import EngineConfig
from jlora.engine.batch import BatchBuilder
from jlora.layout import PoolLayout
from jlora.model import llama, sharding, step
from jlora.model.sampling import empty_slots
from jlora.model.spec import ModelSpec
from jlora.pallas import cases
from jlora.pallas.dispatch import Site, choose
from jlora.pallas.ops import GROUPS, Adapted, Ops
from jlora.pallas.tiles import chip_of
from tests import port
from tests.pallas import _aot
from tests.pallas._aot import Compiled

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
    """A few of the cases always, all of them under the marker `aot_more`."""
    return [pytest.param(c, id=c.name, marks=() if c.name in SOME else pytest.mark.aot_more) for c in values]


def ops_for(mesh: Mesh, layout: PoolLayout, spec: ModelSpec, shapes: tuple[tuple[int, int], ...]) -> Ops:
    kind = mesh.devices.flat[0].device_kind
    return choose(Site("tpu", kind, layout, spec.heads, shapes, layout.blocks_for(spec.max_len)), "pallas").ops


def grown(pool: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same pool with about 1 GiB of rows."""
    row = int(np.prod(pool.shape[1:])) * pool.dtype.itemsize
    return jax.ShapeDtypeStruct((GIB // row, *pool.shape[1:]), pool.dtype)


CHIPS = [pytest.param(c, marks=() if c in ("v5e", "v6e") else pytest.mark.aot_more) for c in _aot.TOPOLOGIES]


@functools.cache
def lora_program(case: cases.LoraCase, chip: str) -> Compiled:
    """The op of a launch over lists of 4096 blocks; `case` without what no compiler sees (`anonymous`)."""
    mesh = _aot.tpu_mesh(chip, case.tp)
    layout = replace(case.layout, blocks=4096)
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
    return _aot.compiled(jax.jit(mapped, donate_argnums=3), _aot.placed(args, mesh), mesh)


def anonymous(case: cases.LoraCase) -> cases.LoraCase:
    """The case without its adapters: lists and trip counts are data, so they are no part of the program."""
    return replace(case, name="", ranks=(), tokens=((-1, case.count),))


def vmem_limit(chip: str) -> int:
    """What kernels may take of the chip's vector memory."""
    found = chip_of("TPU " + chip)
    assert found is not None
    return int(0.9 * found.vmem_bytes)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", representative(cases.LARGE_LORA))
def test_lora_compiles_without_a_copy_of_the_pool(case: cases.LoraCase, chip: str, record_property: Any):
    program = lora_program(anonymous(case), chip)
    what = f"lora {case.spec.name} {'+'.join(case.group)}, {case.count} tokens"
    record_property("compiled", program.row(what, chip, case.tp))
    assert program.temp < 0.05 * GIB
    units = [case.layout.units[name] for name in case.group]
    assert program.alias >= sum(case.count * unit.b * 2 for unit in units)
    assert 0 < program.vmem <= vmem_limit(chip)
    # No adapter, no launch: the kernel is inside a branch, or a loop whose turns are the list's.
    text = program.text
    assert "tpu_custom_call" in text and ("conditional(" in text if case.tp == 1 else "while(" in text)
    assert "tpu_custom_call" not in text[text.index("ENTRY") :]
    assert _aot.collectives(text) == ({"all-reduce": 1} if case.tp > 1 else {})


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", representative(cases.LARGE_ATTENTION))
def test_attention_compiles_without_a_copy_of_the_pool(case: cases.AttentionCase, chip: str, record_property: Any):
    mesh = _aot.tpu_mesh(chip, 1)
    shapes = ((len(case.rows), case.chunk),)
    op = ops_for(mesh, case.layout, case.spec, shapes).attention
    q, pool, first, pages = cases.attention_shapes(case)
    program = _aot.compiled(jax.jit(op), _aot.placed((q, grown(pool), first, pages), mesh), mesh)
    record_property("compiled", program.row(f"attention {case.name}", chip, 1))
    assert program.temp < 0.05 * GIB
    assert 0 < program.vmem <= vmem_limit(chip)


PART = replace(cases.LLAMA3_8B, layers=24)  # what 16 GB hold beside a pool of some size
# model, chip, devices, GiB of pool on each: what is left beside the weights, or less. To the compiler a device
# of this v4 topology is half a chip: 15.25 GiB.
STEPS = [
    *((spec, chip, 1, 1.5) for chip in ("v4", "v5e") for spec in (PART, cases.LLAMA2_7B)),
    *((spec, "v6e", 1, 8.0) for spec in (cases.LLAMA3_8B, cases.LLAMA2_7B)),
    *((spec, "v5p", 1, 8.0) for spec in (cases.LLAMA3_8B, cases.LLAMA2_7B)),
    *((spec, chip, 4, 8.0) for chip in ("v4", "v5e", "v5p", "v6e") for spec in (cases.LLAMA3_8B, cases.LLAMA2_7B)),
]
ALWAYS = ("v5e", "v6e")  # the other chips under the marker `aot_more`
SHAPES = pytest.mark.parametrize(("rows", "chunk"), [(64, 1), (16, 32)], ids=["decode", "prefill"])


def name_of(spec: ModelSpec) -> str:
    whole = (cases.LLAMA3_8B if spec.name == cases.LLAMA3_8B.name else cases.LLAMA2_7B).layers
    return spec.name if spec.layers == whole else f"{spec.name} {spec.layers} of {whole} layers"


def compiled_step(spec: ModelSpec, mesh: Mesh, gib: float, shape: tuple[int, int], bare: bool = False) -> Compiled:
    """The forward with layers scanned, over a pool of `gib` on each device."""
    tp = mesh.devices.size
    blocks = int(gib * tp * GIB) // PoolLayout.of(spec, 1, 32, tp).block_bytes
    layout = PoolLayout.of(spec, blocks, 32, tp)
    programs = step.build(spec, layout, mesh, True, ops_for(mesh, layout, spec, (shape,)))
    return _aot.compiled(programs.forward, step_values(spec, layout, mesh, shape, bare), mesh)


@SHAPES
@pytest.mark.parametrize(
    ("spec", "chip", "tp", "gib"),
    [
        pytest.param(*s, id=f"{name_of(s[0])} {s[1]} x{s[2]}", marks=[pytest.mark.aot_more] * (s[1] not in ALWAYS))
        for s in STEPS
    ],
)
def test_a_whole_step_updates_the_pool_in_place(
    spec: ModelSpec, chip: str, tp: int, gib: float, rows: int, chunk: int, record_property: Any
):
    program = compiled_step(spec, _aot.tpu_mesh(chip, tp), gib, (rows, chunk))
    record_property("compiled", program.row(f"step {name_of(spec)}, {rows}x{chunk}", chip, tp))
    pool_bytes = gib * GIB - PoolLayout.of(spec, 1, 32).block_bytes  # whole blocks of it
    assert program.alias >= pool_bytes
    assert program.temp < 0.05 * pool_bytes
    assert 0 < program.vmem <= vmem_limit(chip)
    # A layer: attention, and the two outputs of row-parallel products; one small sum per group of projections.
    want = {"all-reduce": 2 + len(GROUPS), "all-gather": 1} if tp > 1 else {}
    assert _aot.collectives(program.text) == want


@SHAPES
def test_a_step_in_float32_compiles_with_exact_products(rows: int, chunk: int, record_property: Any):
    """Each is six passes of bfloat16, in XLA's products and in the kernels."""
    spec = replace(cases.LLAMA3_8B, layers=2, dtype="float32")
    program = compiled_step(spec, _aot.tpu_mesh("v5e", 1), 2, (rows, chunk))
    record_property("compiled", program.row(f"step llama3-8b in float32, 2 layers, {rows}x{chunk}", "v5e", 1))
    assert program.text.count("tpu_custom_call") > 1 and "operand_precision={highest,highest}" in program.text


@pytest.mark.parametrize("tp", [1, 4])
def test_a_step_without_adapters_has_no_lora_kernel(tp: int, record_property: Any):
    program = compiled_step(cases.LLAMA3_8B, _aot.tpu_mesh("v6e", tp), 8, (64, 1), bare=True)
    record_property("compiled", program.row("step llama3-8b without adapters, 64x1", "v6e", tp))
    assert program.text.count("tpu_custom_call") == 1 and "fused_lora" not in program.text  # attention alone
    assert _aot.collectives(program.text) == ({"all-reduce": 2, "all-gather": 1} if tp > 1 else {})
    assert program.alias >= 8 * GIB - PoolLayout.of(cases.LLAMA3_8B, 1, 32).block_bytes


@pytest.mark.parametrize(("rows", "chunk"), [(64, 1), (8, 32)], ids=["decode", "prefill"])
def test_all_of_llama3_8b_compiles_for_one_v5e_beside_half_a_gib_of_pool(rows: int, chunk: int, record_property: Any):
    """15 GiB of weights leave no more; prompts of 512 tokens would take 11 % of it for temporaries, 256 take 2 %."""
    program = compiled_step(cases.LLAMA3_8B, _aot.tpu_mesh("v5e", 1), 0.5, (rows, chunk))
    record_property("compiled", program.row(f"step llama3-8b, {rows}x{chunk}", "v5e", 1))
    pool_bytes = 0.5 * GIB - PoolLayout.of(cases.LLAMA3_8B, 1, 32).block_bytes
    assert program.alias >= pool_bytes
    assert program.temp < 0.05 * pool_bytes


def test_the_weights_of_llama3_8b_load_on_one_v5e_in_the_room_of_half_a_gib_of_pool(record_property: Any):
    """The head comes before the layers; a layer's matrix is stored and transposed beside its stack."""
    spec, mesh = cases.LLAMA3_8B, _aot.tpu_mesh("v5e", 1)
    where = NamedSharding(mesh, PartitionSpec())
    head = _aot.placed(jax.ShapeDtypeStruct((spec.vocab, spec.width), jnp.bfloat16), mesh)
    program = _aot.compiled(port.mover(where, "bfloat16", True), (head,), mesh)
    record_property("compiled", program.row("llama3-8b's head is transposed", "v5e", 1))
    size = 2 * spec.vocab * spec.width
    assert 2 * size + program.temp < 4 * GIB  # itself twice, when the embedding is all there is
    stored = _aot.placed(jax.ShapeDtypeStruct((spec.mlp, spec.width), jnp.bfloat16), mesh)
    stack = _aot.placed(jax.ShapeDtypeStruct((spec.layers, spec.width, spec.mlp), jnp.bfloat16), mesh)
    program = _aot.compiled(port.filler(where, True), (stack, stored, _aot.placed(np.int32(0), mesh)), mesh)
    record_property("compiled", program.row("llama3-8b's largest matrix enters its stack", "v5e", 1))
    size = 2 * spec.mlp * spec.width
    assert program.alias >= spec.layers * size
    assert 2 * size + program.temp < 0.5 * GIB  # two are on their way at most


def test_a_piece_of_a_copy_is_a_small_part_of_half_a_gib_of_pool():
    blocks = int(0.5 * GIB) // PoolLayout.of(cases.LLAMA3_8B, 1, 32).block_bytes
    assert max(pieces(blocks)) * PoolLayout.of(cases.LLAMA3_8B, 1, 32).block_bytes <= 0.5 * GIB / 16


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["write_blocks", "write_layers"])
def test_copies_into_the_pool_update_it_in_place(name: str, chip: str, tp: int, record_property: Any):
    program = _aot.compiled_copy(name, _aot.tpu_mesh(chip, tp))
    record_property("compiled", program.row(f"{name} llama3-8b, 64 blocks", chip, tp))
    assert program.alias >= 8 * GIB - _aot.COPIED
    assert program.temp < 0.05 * 8 * GIB
    assert _aot.collectives(program.text) == {}


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_copy_out_of_the_pool_takes_nothing_beside_what_it_copies(chip: str, tp: int, record_property: Any):
    program = _aot.compiled_copy("read_blocks", _aot.tpu_mesh(chip, tp))
    record_property("compiled", program.row("read_blocks llama3-8b, 64 blocks", chip, tp))
    assert program.temp < 0.05 * 64 * _aot.COPIED / tp
    assert _aot.collectives(program.text) == {}


def step_values(spec: ModelSpec, layout: PoolLayout, mesh: Mesh, shape: tuple[int, int], bare: bool) -> tuple[Any, ...]:
    """Abstract arguments of `Programs.forward`."""
    params = jax.eval_shape(llama.stack_layers, llama.abstract(spec)[0])
    specs = sharding.stacked_specs(sharding.param_specs(spec))
    builder = BatchBuilder(layout, EngineConfig(max_seqs=64, max_step_tokens=512), spec, lambda uid: (), bare)
    pool = _aot.placed(jax.ShapeDtypeStruct(layout.shape, jnp.dtype(layout.dtype)), mesh, sharding.POOL)
    last = jax.eval_shape(lambda: empty_slots(64, spec.vocab)).last
    blank = builder.blank(*shape, bare=bare).batch
    return _aot.placed(params, mesh, specs), pool, *_aot.placed((last, blank), mesh)
