"""The NVIDIA kernels, compiled by the real CUDA compiler for an H200 on a machine without one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.pallas import reference
from jlora.pallas.cases import (
    LARGE_ATTENTION,
    LARGE_LORA,
    LLAMA2_7B,
    LLAMA3_8B,
    AttentionCase,
    LoraCase,
    attention_shapes,
)
from jlora.pallas.gpu_lora import lora
from jlora.pallas.gpu_ops import GpuTiles, Limits, attention_op, lora_op, runtime_refusal
from jlora.pallas.gpu_prefill import PrefillTiles
from jlora.pallas.gpu_support import fit_units, lora_refusal
from jlora.pallas.ops import ActiveBlocks, Adapted, Pages
from tests.pallas import _gpu

pytestmark = [
    pytest.mark.aot_cuda,
    pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal())),
]

MIB, GIB = 1 << 20, 1 << 30


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What ptxas says of every kernel compiled in the test: registers, spills, warnings."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def read() -> list[str]:
        said = []
        for ptx in sorted(tmp_path.glob("**/*.ptx")):
            code = ptx.read_text()
            assert "cp.async.bulk.tensor" in code
            assert ("wgmma.mma_async" in code) == ("lora_combine" not in code)
            ptxas = str(_gpu.compiler_folder() / "ptxas")  # type: ignore[operator]
            command = [ptxas, "-arch=sm_90a", "-v", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
            said.append(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
        return said

    return read


def check_resources(said: list[str]) -> None:
    """No spills, no product made serial, and registers for 384 threads: one prompt block, three of decode."""
    assert said, "no PTX was written"
    for text in said:
        assert "serialized" not in text
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        assert not any(spills), text
        assert max(int(n) for n in re.findall(r"Used (\d+) registers", text)) <= 168, text


def some(always: set[tuple[str, int]], cases: Sequence[Any]) -> list[Any]:
    """Every case with pages of 32 and 64 tokens; those in `always` always, the others under the marker `aot_more`."""
    return [
        pytest.param(
            case,
            tokens,
            id=f"{case.name} B={tokens}",
            marks=[pytest.mark.aot_more] * ((case.name, tokens) not in always),
        )
        for case in cases
        for tokens in (32, 64)
    ]


ATTENTION = some(
    {("llama3-8b tp=1 decode 64 x 1k", 32), ("llama2-7b tp=4 decode 8 x 1k", 64), ("llama3-8b tp=1 prefill 512", 64)},
    LARGE_ATTENTION,
)


@pytest.mark.parametrize(("case", "block_tokens"), ATTENTION)
def test_attention_compiles(case: AttentionCase, block_tokens: int, resources, record_property):
    args = attention_shapes(replace(case, block_tokens=block_tokens))
    program = _gpu.compiled(attention_op(), *args)
    record_property("compiled", program.row(f"attention {case.name} B={block_tokens}", "H200", 1))
    assert program.temp < 64 * MIB
    check_resources(resources())


@pytest.mark.aot_more
@pytest.mark.parametrize("chunk", [1, 32])
def test_narrow_heads_compile(chunk: int, resources):
    spec = replace(LLAMA3_8B, head_dim=64)
    rows = ((1024, chunk),) * 8
    _gpu.compiled(attention_op(), *attention_shapes(AttentionCase("narrow", spec, 32, rows, chunk)))
    check_resources(resources())


def test_probabilities_in_registers_compile(resources):
    tiles = GpuTiles(prefill=PrefillTiles(registers=True))
    case = AttentionCase("registers", LLAMA3_8B, 32, ((1024, 32),) * 8, 32)
    _gpu.compiled(attention_op(tiles), *attention_shapes(case))
    check_resources(resources())


def adapted(layout: PoolLayout, group: tuple[str, ...], tokens: int) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    """Abstract x, pool, first row, bases, lists, adapters of a launch; and lora over them."""
    units = [layout.units[name] for name in group]
    pool = array(2 * layout.blocks, layout.block_tokens, 2 * layout.kv_heads // layout.tp, layout.head_dim)
    lists = [array(layout.blocks, dtype=jnp.int32)] * 2 + [array(len(group) + 1, dtype=jnp.int32)]
    bases = [array(tokens, unit.b) for unit in units]
    args = array(tokens, units[0].a), pool, array(dtype=jnp.int32), bases, lists, array(tokens, dtype=jnp.int32)
    limits = Limits(sequences=64, rank=256, row=32)  # the default of adapters.max_rank

    def f(x, pool, first, bases, lists, adapters):
        blocks, owners, offsets = lists
        parts = [
            Adapted(y, ActiveBlocks(blocks, owners, offsets[i], offsets[i + 1]), unit)
            for i, (y, unit) in enumerate(zip(bases, units, strict=True))
        ]
        return lora(x, pool, first, parts, adapters, room=limits.room(tokens))

    return args, f


LORA = some(
    {
        ("llama3-8b tp=1 q+k+v decode 64, 8 adapters", 32),
        ("llama3-8b tp=1 gate+up decode 64, 8 adapters", 32),
        ("llama2-7b tp=4 down prefill 2048, 4 adapters", 64),
    },
    [c for c in LARGE_LORA if c.name.endswith(("decode 64, 8 adapters", "prefill 2048, 4 adapters"))],
)


@pytest.mark.parametrize(("case", "block_tokens"), LORA)
def test_lora_compiles(case: LoraCase, block_tokens: int, resources, record_property):
    layout = fit_units(PoolLayout.of(case.spec, 4096, block_tokens, case.tp))
    assert lora_refusal(layout, [layout.units[name] for name in case.group]) is None
    args, f = adapted(layout, case.group, case.count)
    program = _gpu.compiled(f, *args)
    record_property("compiled", program.row(f"lora {case.name} B={block_tokens}", "H200", 1))
    # Room for 64 adapters of rank 256: memory, not time.
    assert program.temp < 512 * MIB
    check_resources(resources())


@pytest.mark.parametrize("spec", [LLAMA3_8B, pytest.param(LLAMA2_7B, marks=pytest.mark.aot_more)], ids=lambda s: s.name)
@pytest.mark.parametrize(("rows", "chunk"), [(64, 1), (16, 32)], ids=["decode", "prompts"])
def test_layers_share_one_pool_without_copies(spec: ModelSpec, rows: int, chunk: int):
    """Three layers of what a step does to the pool: adapters, new keys, attention, adapters again."""
    layers, tokens = 3, rows * chunk
    shallow = replace(spec, layers=layers)
    layout = fit_units(PoolLayout.of(shallow, 8 * GIB // PoolLayout.of(shallow, 1, 32).block_bytes, 32))
    attend = attention_op()
    adapt = lora_op(layout, Limits(sequences=64, rank=64, row=32), reference.lora)
    shape = (tokens, spec.heads, spec.head_dim), (tokens, spec.kv_heads, spec.head_dim)

    def f(pool, x, weights, lists, adapters, at, slots, pages):
        def joined(names, x, layer):
            parts = [
                Adapted(x @ weights[n], ActiveBlocks(*lists[:2], lists[2][i], lists[2][i + 1]), layout.units[n])
                for i, n in enumerate(names)
            ]
            return adapt(x, pool, layer * layout.blocks, parts, adapters)

        for layer in range(layers):
            q, k, v = joined(("q", "k", "v"), x, layer)
            pool, q, k, v = lax.optimization_barrier((pool, q, k, v))
            k, v = k.reshape(shape[1]), v.reshape(shape[1])
            pool = reference.write_kv(pool, at + layer * layout.blocks, slots, k, v)
            pool, q = lax.optimization_barrier((pool, q))
            out = attend(q.reshape(rows, chunk, *shape[0][1:]), pool, layer * layout.blocks, pages)
            (y,) = joined(("o",), out.reshape(tokens, -1), layer)
            pool, x = lax.optimization_barrier((pool, x + y))
        return pool, x

    whole = layout.blocks_for(spec.max_len)
    ints = {n: array(n, dtype=jnp.int32) for n in (tokens, rows, 4, layout.blocks)}
    pages = Pages(array(rows, whole, dtype=jnp.int32), ints[rows], ints[rows])
    weights = {n: array(*spec.projection_shapes[n]) for n in ("q", "k", "v", "o")}
    lists = (ints[layout.blocks], ints[layout.blocks], ints[4])
    x = array(tokens, spec.width)
    program = _gpu.compiled(
        f, array(*layout.shape), x, weights, lists, ints[tokens], ints[tokens], ints[tokens], pages, donate=(0,)
    )
    pool_bytes = 2 * int(np.prod(layout.shape))
    assert program.alias >= pool_bytes > 7.9 * GIB
    assert program.temp < 0.05 * pool_bytes
    kernels = program.text.count('custom_call_target="mosaic_gpu')
    assert kernels == layers * 7, "attention, and shrink, combine and expand of (q, k, v) and of o"
