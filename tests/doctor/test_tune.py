"""The search for block sizes: what it keeps, what it writes, and when it ends."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jlora.doctor import tune
from jlora.errors import ConfigError
from jlora.pallas import cases, gpu_ops, tiles
from jlora.pallas.tiles import AttentionShape, LoraShape, chip_of


def test_tuning_keeps_the_fastest_of_what_compiles():
    def time(sizes):
        return float("inf") if sizes["tokens"] > 2 else sizes["units"] + 1 / sizes["tokens"]

    found = tune.descend({"units": 64, "tokens": 1}, {"units": (16, 32), "tokens": (2, 4)}, time)
    assert found.best == {"units": 16, "tokens": 2}
    assert "units=16, tokens=2" in found.times and not any("tokens=4" in name for name in found.times)


@pytest.mark.slow
def test_tune_writes_a_table_that_the_kernels_can_read(monkeypatch: pytest.MonkeyPatch):
    result = tune.run(tune.Plan(quick=True))
    (tuned,) = result["tiles"]["tuned"].values()
    assert result["chip"] == "cpu"
    assert [set(sizes) for sizes in tuned.values()] == [{"tokens", "rows", "units"}]
    assert all(np.isfinite(t) and t > 0 for times in result["times"].values() for t in times.values())
    assert set(result["tiles"]["chips"]) >= {"TPU v5e", "TPU v6e"}
    # Read back from the file that it is written to, with sizes that nothing but this table has.
    table = json.loads(json.dumps(result["tiles"]))
    rows = cases.SMALL_ATTENTION[0]
    asked = AttentionShape.of(rows.layout, rows.spec.heads, len(rows.rows) + rows.padding, rows.chunk)
    (lora,) = table["tuned"]["cpu"].values()
    table["tuned"]["cpu"][asked.key] = {"kv_tokens": 48, "queries": 6}
    lora |= {"tokens": 48, "units": 16}
    default = chip_of("interpreter")
    monkeypatch.setattr(tiles, "load", lambda: table)
    chip = chip_of("interpreter")
    assert chip is not None and default is not None
    case = cases.SMALL_LORA[1]
    units = [case.layout.units[name] for name in case.group]
    parts = (tuple(getattr(unit, n) for unit in units) for n in ("b", "slots", "per_block"))
    spec = case.spec
    shape = LoraShape(case.count, case.input_width, *parts, 2 * spec.kv_heads * spec.head_dim * 4, 4)
    assert (chip.lora(shape).tokens, chip.lora(shape).units) == (48, 16) != (default.lora(shape).tokens, 16)
    assert (chip.attention(asked).kv_tokens, chip.attention(asked).queries) == (48, 6)
    assert default.attention(asked) != chip.attention(asked)


def test_tuning_a_gpu_keeps_the_fastest_sizes_and_writes_what_is_not_the_default(monkeypatch: pytest.MonkeyPatch):
    """The search, with times that favour three stages of decode and registers in prompts; others do not compile."""
    if reason := gpu_ops.runtime_refusal():
        pytest.skip(reason)
    from jlora.doctor import tune_gpu
    from jlora.pallas.gpu_ops import GpuTiles

    def taken(case, tiles: GpuTiles, inputs) -> float:
        if tiles.lora.blocks == 396:
            return float("inf")
        return 4.0 - tiles.decode.stages + (0.5 if not tiles.prefill.registers else 0.0) + tiles.lora.chunks[0]

    monkeypatch.setattr(tune_gpu, "launch_seconds", taken)
    monkeypatch.setattr(tune_gpu, "ops_of", lambda case, tiles: tiles)
    monkeypatch.setattr(tune_gpu.checks, "random_inputs", lambda case: ())
    with pytest.raises(ConfigError, match="tune: .* has compute capability none that jax knows"):
        tune_gpu.run(tune.Plan(quick=True))  # this is a CPU
    monkeypatch.setattr(tune_gpu, "refusal_of", lambda device: None)
    saved: list[dict[str, Any]] = []
    result = tune_gpu.run(tune.Plan(quick=True), saved.append)
    assert [len(each["times"]) for each in saved] == [1, 2, 3] and saved[-1] == result
    alone = tune_gpu.run(tune.Plan(quick=True, only=["prefill"]))
    assert list(alone["times"]) == ["32/8x128 B=32 prefill"]
    (found,) = result["tiles"]["gpu"].values()
    entry = found["32/8x128 B=32"]
    assert entry["decode"] == {"stages": 3} and entry["prefill"] == {"registers": True}
    assert entry["lora"] == {"chunks": (2, 4)}
    assert not any("blocks=396" in name for name in result["times"]["32/8x128 B=32 lora"])
    made = GpuTiles.of(json.loads(json.dumps(entry)))
    assert made.decode.stages == 3 and made.prefill.registers and made.lora.chunks == (2, 4)


def test_tuning_ends_in_time_with_the_fastest_sizes_until_then(monkeypatch: pytest.MonkeyPatch):
    if reason := gpu_ops.runtime_refusal():
        pytest.skip(reason)
    from jlora.doctor import tune_gpu

    timed: list[int] = []
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: len(timed)))  # each launch takes a second

    def taken(case, tiles, inputs) -> float:
        timed.append(1)
        return 1.0 / len(timed)

    monkeypatch.setattr(tune_gpu, "launch_seconds", taken)
    monkeypatch.setattr(tune_gpu, "ops_of", lambda case, tiles: tiles)
    monkeypatch.setattr(tune_gpu.checks, "random_inputs", lambda case: ())
    monkeypatch.setattr(tune_gpu, "refusal_of", lambda device: None)
    result = tune_gpu.run(tune.Plan(quick=True, until=8))
    assert len(timed) == 9 and list(result["times"]) == ["32/8x128 B=32 decode"]
    (sizes,) = result["tiles"]["gpu"].values()
    assert list(result["times"]["32/8x128 B=32 decode"]) == ["stages=2, blocks=396", "stages=3, blocks=396"]
    assert sizes["32/8x128 B=32"] == {"decode": {"stages": 3}}
