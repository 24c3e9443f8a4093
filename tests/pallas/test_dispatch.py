"""The choice of implementations: made once, with a reason, and refused with one."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jlora.engine import device
from jlora.errors import ConfigError
from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.pallas import cases, gpu_ops
from jlora.pallas.dispatch import SCALAR_SHARE, Site, choose
from jlora.pallas.gpu_support import Gpu, fit_units, refusal_of
from jlora.pallas.reference import CPU, XLA
from jlora.pallas.tiles import BUDGET, AttentionShape, Chip, LoraShape, chip_of, load
from jlora.pallas.tpu_attention import smem_bytes

SHAPES = ((2, 1), (64, 1), (16, 32))
GPUS = {
    "NVIDIA H200": Gpu("9.0", 13000),
    "NVIDIA A100-SXM4-80GB": Gpu("8.0", 13000),
    "NVIDIA B200": Gpu("10.0", 13000),
    "AMD Instinct MI300X": Gpu("gfx942"),
}


def site(platform: str, kind: str, spec: ModelSpec = cases.LLAMA3_8B, tp: int = 1, blocks: int = 2048) -> Site:
    layout = PoolLayout.of(spec, blocks, 32, tp)
    width = layout.blocks_for(spec.max_len)
    return Site(platform, kind, layout, spec.heads, SHAPES, width, gpu=GPUS.get(kind, Gpu()))


def test_a_cpu_runs_the_reference_and_says_why():
    chosen = choose(site("cpu", "cpu"))
    assert chosen.ops == CPU
    assert {c.op for c in chosen.choices} == set(XLA.__slots__)
    assert all(c.implementation == "xla" and c.reason for c in chosen.choices)
    assert "on a CPU the reference is the fast path" in str(chosen)


@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
def test_a_hopper_runs_its_kernels_and_xla_what_they_do_not_serve():
    where = site("gpu", "NVIDIA H200", cases.LLAMA2_7B)
    assert [c.implementation for c in choose(where).choices[:2]] == ["pallas-gpu"] * 2
    assert choose(where, "xla").ops is XLA
    narrow = choose(site("gpu", "NVIDIA H200", replace(cases.LLAMA2_7B, dtype="float32")))
    assert narrow.ops is XLA and "the pool is float32" in narrow.choices[0].reason


@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
def test_contexts_whose_page_lists_do_not_fit_in_shared_memory_stay_with_xla():
    fits, long = (site("gpu", "NVIDIA H200", replace(cases.LLAMA3_8B, max_len=32 * n)) for n in (16384, 32768))
    assert choose(fits).choices[0].implementation == "pallas-gpu"
    assert "32768 pages exceed the 16384" in choose(long).choices[0].reason


@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
def test_units_are_widened_only_where_kernels_read_them(monkeypatch: pytest.MonkeyPatch):
    def widened(spec: ModelSpec, capability: str = "9.0", kernels: str = "auto") -> bool:
        client = SimpleNamespace(platform_version="cuda 13000")
        gpu = SimpleNamespace(platform="gpu", client=client, compute_capability=capability, device_kind="a GPU")
        monkeypatch.setattr(jax, "devices", lambda: [gpu])
        layout = PoolLayout.of(spec, 64, 32)
        fitted = device.fitted(layout, kernels)
        assert fitted in (layout, fit_units(layout))
        return fitted != layout

    llama = cases.LLAMA3_8B
    assert widened(llama) and widened(llama, kernels="pallas")
    assert not widened(llama, kernels="xla") and not widened(llama, "8.0")
    assert not widened(replace(llama, dtype="float32"))
    monkeypatch.setattr(gpu_ops, "runtime_refusal", lambda: "an old jax")
    assert not widened(llama)


@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
def test_a_gpu_runs_its_kernels_where_it_is_asked_to_and_names_what_they_leave():
    where = site("gpu", "NVIDIA H200", replace(cases.LLAMA3_8B, mlp=40960))  # 22 slots wide: no two units in a block
    chosen = choose(replace(where, layout=fit_units(where.layout)), "pallas")
    assert [c.implementation for c in chosen.choices[:2]] == ["pallas-gpu"] * 2
    assert "gate+up stays with XLA" in chosen.choices[1].reason
    with pytest.raises(ConfigError, match="no attention kernel: the pool is float32"):
        choose(site("gpu", "NVIDIA H200", replace(cases.LLAMA3_8B, dtype="float32")), "pallas")


@pytest.mark.parametrize("kind", [kind for kind in GPUS if kind != "NVIDIA H200"])
def test_a_gpu_without_the_kernels_instructions_stays_with_xla_or_is_refused_by_its_name(kind: str):
    where = site("gpu", kind)
    why = f"{kind} has compute capability {GPUS[kind].capability}; the kernels' products (wgmma) need 9.0: H100, H200"
    chosen = choose(where)
    assert chosen.ops is XLA and all(c.reason == why for c in chosen.choices[:2])
    with pytest.raises(ConfigError) as refused:
        choose(where, "pallas")
    assert why in str(refused.value)


@pytest.mark.parametrize(("cuda", "served"), [(12060, True), (12080, False), (12090, False), (13000, True), (0, True)])
@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
def test_a_cuda_whose_compiler_miscompiles_the_kernels_is_refused(cuda: int, served: bool):
    where = site("gpu", "NVIDIA H200")
    where = replace(where, layout=fit_units(where.layout), gpu=Gpu("9.0", cuda))
    if served:
        assert [c.implementation for c in choose(where, "pallas").choices[:2]] == ["pallas-gpu"] * 2
        return
    with pytest.raises(ConfigError) as refused:
        choose(where, "pallas")
    assert f"built with CUDA 12.{cuda % 1000 // 10}, and 12.8 to 12.9.0 miscompile" in str(refused.value)


def test_a_device_says_its_capability_and_its_cuda():
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    gpu = SimpleNamespace(client=client, compute_capability="9.0", device_kind="NVIDIA H100 80GB HBM3")
    assert Gpu.of(gpu) == Gpu("9.0", 12090) and "CUDA 12.9" in str(refusal_of(gpu))
    assert Gpu.of(jax.devices("cpu")[0]) == Gpu()
    assert "capability none that jax knows" in str(refusal_of(jax.devices("cpu")[0]))


def test_every_op_is_logged_with_its_implementation_and_reason(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, "jlora.pallas.dispatch"):
        chosen = choose(site("tpu", "TPU v5 lite", replace(cases.LLAMA3_8B, max_len=131072)))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert line.startswith("ops on tpu (TPU v5 lite): ") and len(line) < 200
    (whole,) = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    assert {c.op for c in chosen.choices} == set(XLA.__slots__)
    for choice in chosen.choices:
        assert f"{choice.op} {choice.implementation}" in line
        assert choice.reason and f"{choice.op}: {choice.implementation} ({choice.reason})" in whole


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("spec", [cases.LLAMA3_8B, cases.LLAMA2_7B], ids=lambda s: s.name)
def test_a_tpu_runs_kernels_for_both_models(spec: ModelSpec, tp: int, kind: str):
    chosen = choose(site("tpu", kind, spec, tp))
    assert [c.implementation for c in chosen.choices[:2]] == ["pallas-tpu"] * 2
    assert chosen.ops.lora is not XLA.lora and chosen.ops.attention is not XLA.attention
    assert chosen.ops.write_kv is XLA.write_kv


def test_xla_is_taken_where_it_is_asked_for():
    chosen = choose(site("tpu", "TPU v5 lite"), "xla")
    assert chosen.ops is XLA and chosen.choices[0].reason == "engine.kernels = xla"
    assert choose(site("cpu", "cpu"), "xla").ops is XLA


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (site("tpu", "TPU v5 lite", replace(cases.TINY64, dtype="bfloat16")), "head_dim = 64"),
        (site("tpu", "TPU7x"), "does not know the chip 'TPU7x'"),
        (site("tpu", "TPU v5 lite", blocks=10**6), "exceed the scalar memory"),
        (site("rocm", "MI300"), "no kernels for rocm"),
        (site("cpu", "cpu"), "on a CPU"),
    ],
    ids=["narrow heads", "unknown chip", "huge pool", "unknown platform", "cpu"],
)
def test_what_kernels_cannot_serve_runs_on_xla_with_the_reason_or_is_refused_with_it(where: Site, reason: str):
    lora = next(c for c in choose(where).choices if c.op == "lora")
    assert lora.implementation == "xla" and reason in lora.reason
    with pytest.raises(ConfigError, match="engine.kernels = 'pallas'"):
        choose(where, "pallas")


def test_long_contexts_that_pass_the_scalar_memory_are_refused_for_attention_alone():
    spec = replace(cases.LLAMA3_8B, max_len=131072)
    attention, lora, *_ = choose(site("tpu", "TPU v5 lite", spec)).choices
    assert attention.implementation == "xla" and attention.reason.startswith("page tables of 1024 KiB exceed")
    assert lora.implementation == "pallas-tpu"
    lower = re.search(r"lower engine.max_seqs, or model.max_model_len to at most (\d+)$", attention.reason)
    assert lower, attention.reason
    for tokens, served in ((int(lower[1]), "pallas-tpu"), (int(lower[1]) + 1, "xla")):
        shorter = site("tpu", "TPU v5 lite", replace(spec, max_len=tokens))
        assert choose(shorter).choices[0].implementation == served


def test_where_prompts_take_the_scalar_memory_the_key_for_prompts_is_named():
    where = site("tpu", "TPU v5 lite", replace(cases.LLAMA3_8B, max_len=131072))
    for rows, said in ((256, "lower engine.max_step_tokens, or model.max_model_len to"), (512, "max_step_tokens$")):
        assert re.search(said, choose(replace(where, shapes=((64, 1), (rows, 32)))).choices[0].reason)


@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
def test_the_lists_of_the_nvidia_kernels_are_as_long_as_there_are_slots(monkeypatch: pytest.MonkeyPatch):
    """A launch of 8,192 prompt tokens has 256 rows, and no more adapters than a decode launch."""
    made: list[gpu_ops.Limits] = []
    monkeypatch.setattr(gpu_ops, "lora_op", lambda layout, limits, *rest: made.append(limits) or XLA.lora)
    choose(replace(site("gpu", "NVIDIA H200", cases.LLAMA2_7B), shapes=((64, 1), (256, 32))))
    assert [limits.room(256).run for limits in made] == [32] and made[0].sequences == 64


GPU_KERNELS = pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
LONG = replace(cases.LLAMA3_8B, max_len=1 << 20)


@pytest.mark.parametrize(
    ("kind", "spec", "warned"),
    [
        ("TPU v5 lite", LONG, ["attention .*lower engine.max_seqs, or model.max_model_len to at most 61440"]),
        ("TPU v5 lite", cases.LLAMA3_8B, []),
        ("TPU v5 lite", replace(cases.LLAMA3_8B, head_dim=64), ["attention .*head_dim = 64", "lora .*head_dim = 64"]),
        ("TPU7x", LONG, []),  # no kernels are made for it
        ("cpu", LONG, []),
        pytest.param(
            "NVIDIA H200",
            LONG,
            ["attention .*lower model.max_model_len to at most 524288"],
            marks=GPU_KERNELS,
        ),
        pytest.param("NVIDIA H200", cases.LLAMA3_8B, [], marks=GPU_KERNELS),
        pytest.param(
            "NVIDIA H200",
            replace(cases.LLAMA3_8B, mlp=40960),
            [r"lora .*gate\+up stays with XLA: a block of cache.block_tokens = 32 .*down stays with XLA"],
            marks=GPU_KERNELS,
        ),
        ("NVIDIA A100-SXM4-80GB", LONG, []),
    ],
)
def test_a_chip_that_has_kernels_and_goes_without_them_warns_and_names_what_would_help(
    kind: str, spec: ModelSpec, warned: list[str], caplog: pytest.LogCaptureFixture
):
    platform = "gpu" if kind in GPUS else kind[:3].lower()
    where = site(platform, kind, spec)
    if platform == "gpu":
        where = replace(where, layout=fit_units(where.layout))
    choose(where)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(warned)
    for line, pattern in zip(said, warned, strict=True):
        assert kind in line and re.search(pattern, line), line
    caplog.clear()
    choose(where, "xla")  # as asked for
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", [name for name in load()["chips"] if name != "cpu"])
@pytest.mark.parametrize("case", cases.LARGE_LORA, ids=lambda c: c.name)
def test_tiles_fit_every_chips_vector_memory(case: cases.LoraCase, name: str):
    chip = chip_of(name)
    assert chip is not None
    layout = case.layout
    units = [layout.units[n] for n in case.group]
    parts = (tuple(getattr(u, n) for u in units) for n in ("b", "slots", "per_block"))
    shape = LoraShape(case.count, case.input_width, *parts, 2 * layout.kv_heads // layout.tp * layout.head_dim * 2, 2)
    tiles = chip.lora(shape)
    assert shape.vmem(tiles) <= BUDGET * chip.vmem_bytes
    assert tiles.tokens % 16 == 0 or tiles.tokens >= case.count


@pytest.mark.parametrize("name", [name for name in load()["chips"] if name != "cpu"])
@pytest.mark.parametrize("case", cases.LARGE_ATTENTION, ids=lambda c: c.name)
def test_attention_tiles_and_tables_fit_every_chips_fast_memories(case: cases.AttentionCase, name: str):
    chip = chip_of(name)
    assert chip is not None
    layout, tokens = case.layout, len(case.rows) * case.chunk
    heads, kv_heads = case.spec.heads // case.tp, layout.kv_heads // case.tp
    shape = AttentionShape(tokens, case.chunk, heads, kv_heads, layout.head_dim, case.block_tokens, 2)
    tiles = chip.attention(shape)
    assert shape.vmem(tiles) <= BUDGET * chip.vmem_bytes < tiles.vmem_bytes <= chip.vmem_bytes
    assert tiles.kv_tokens >= case.block_tokens and tiles.kv_tokens % case.block_tokens == 0 and tiles.queries >= 8
    assert smem_bytes(len(case.rows), case.chunk, case.width) <= SCALAR_SHARE * chip.smem_bytes


def test_a_measured_entry_of_a_gpu_is_for_its_chip_and_shape_alone(monkeypatch: pytest.MonkeyPatch):
    if reason := gpu_ops.runtime_refusal():
        pytest.skip(reason)
    layout = fit_units(PoolLayout.of(cases.LLAMA3_8B, 10, 32))
    entry = {"decode": {"stages": 3}, "lora": {"chunks": [8, 16]}}
    table = {**load(), "gpu": {"NVIDIA H200": {"32/8x128 B=32": entry}}}
    monkeypatch.setattr(gpu_ops.table, "load", lambda: table)
    tuned = gpu_ops.tiles_of("NVIDIA H200", layout, 32)
    assert (tuned.decode.stages, tuned.lora.chunks) == (3, (8, 16)) and tuned.prefill == gpu_ops.GpuTiles().prefill
    for kind, other in (("NVIDIA H100 80GB HBM3", layout), ("NVIDIA H200", replace(layout, block_tokens=64))):
        assert gpu_ops.tiles_of(kind, other, 32) == gpu_ops.GpuTiles()


def test_a_measured_entry_replaces_the_default_for_its_shape_alone():
    chip = chip_of("TPU v5 lite")
    assert chip is not None
    shape = LoraShape(60, 4096, (4096,), (4,), (8,), 4096, 2)
    tuned = Chip(chip.name, chip.vmem_bytes, chip.smem_bytes, chip.defaults, {shape.key: {"units": 64}})
    assert tuned.lora(shape).units == 64 and tuned.lora(replace(shape, tokens=2000)).units == chip.lora(shape).units
