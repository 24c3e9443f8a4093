"""The device job in miniature, as a bare accelerator image has it: few packages, one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jlora.bench import device_model, tune
from jlora.bench.device_fit import Measured, fit
from jlora.bench.device_model import Part, StepCase, batch_of, count_of, decode, mixed, prefill
from jlora.layout import PoolLayout
from jlora.pallas import cases
from jlora.pallas.counts import Count
from jlora.pallas.tiles import chip_of

ROOT = Path(__file__).resolve().parents[2]
# What the project installs and this job must do without.
ABSENT = ("tqdm", "grpc", "tokenizers", "jinja2", "huggingface_hub", "matplotlib", "torch")
BARE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from jlora.bench.device import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_job_runs_in_miniature_without_the_projects_other_packages(tmp_path: Path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", BARE, "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "device.json").read_text())
    assert record["skipped"] == []
    kernels = record["kernels"]
    attention, lora = ([r for r in kernels if ("B=" in r["case"]) is attends] for attends in (True, False))
    assert len(lora) >= 2 and all(row["ok"] is True for row in lora)
    assert attention and all("no interpreter of jax" in row["reason"] for row in attention)
    model = record["models"]["tiny128"]
    assert {row["case"] for row in model["steps"]} == {"decode 2 x 32", "prefill 64"}
    assert all(row["seconds"] > 0 and 0 < row["floor_share"] for row in model["steps"])
    assert len(model["adapters"]) == 4 and all(row["ratio"] > 0 for row in model["adapters"])
    assert any("op_without_adapters" in row for row in model["adapters"])
    coefficients = json.loads((tmp_path / "step-tiny128.json").read_text())
    assert coefficients == model["fit"] and coefficients["link"]["to_device"]["bytes_per_s"] > 0
    assert record["engine"]["decode"]["step_s"] > 0
    assert [row["policy"] for row in record["engine"]["policies"]] == ["jlora", "fastlibra"]
    assert "jlora" in done.stdout and "decode 2 x 32" in done.stdout


def test_the_fit_finds_the_coefficients_that_made_the_times():
    counts = [Count(b, f) for b, f in ((10**9, 10**10), (10**9, 10**12), (5 * 10**9, 10**11), (2 * 10**9, 10**10))]
    steps = [
        Measured(str(i), c, 100 * i, 0.001 + c.flops / 1e14 + c.bytes / 1e12 + 1e-6 * 100 * i)
        for i, c in enumerate([*counts, Count(3 * 10**9, 5 * 10**12)])
    ]
    found = fit(steps)
    assert found.flops_per_s == pytest.approx(1e14, rel=1e-3) and found.bytes_per_s == pytest.approx(1e12, rel=1e-3)
    assert found.fixed_s == pytest.approx(1e-3, rel=1e-3) and found.adapter_block_s == pytest.approx(1e-6, rel=1e-2)
    assert found.worst_error < 1e-4
    assert found.seconds(steps[1].count, 100) == pytest.approx(steps[1].seconds, rel=1e-3)


def test_a_batch_holds_its_cases_contexts_and_adapters_on_blocks_of_their_own():
    spec = cases.TINY
    case = StepCase("two", (Part(10, 40, 1), Part(0, 32, -1)), (8, 16))
    layout = device_model.layout_for(spec, [case], "auto")
    batch = batch_of(layout, case, layout.blocks_for(spec.max_len))
    assert case.shape == (3, 32) and batch.tokens.shape == (3, 32)
    assert batch.starts.tolist() == [10, 42, 0] and batch.lengths.tolist() == [42, 50, 32]
    assert batch.adapters.reshape(3, 32).T.tolist() == [[1, 1, -1]] * 32
    used = batch.blocks[: batch.offsets[-1]].tolist()
    pages = {*batch.table[0].tolist(), *batch.table[2].tolist()} - {0}
    assert len(set(used)) == len(used) and not pages & set(used) and 0 not in used
    for name, start, stop in zip("qkv", batch.offsets, batch.offsets[1:], strict=False):
        per_block = layout.units[name].per_block
        assert batch.owners[start:stop].tolist() == [0] * -(-8 // per_block) + [1] * -(-16 // per_block)
    written = batch.write_rows.reshape(3, 32) >= 0
    assert written.sum(1).tolist() == [32, 8, 32]


def test_a_steps_floor_counts_weights_once_and_every_context():
    spec = cases.LLAMA3_8B
    layout = PoolLayout.of(spec, 10, 32)
    one, many = (count_of(spec, layout, decode(n, 1024)) for n in (1, 64))
    matrices = 2 * (spec.parameters - spec.vocab * spec.width - spec.width - 2 * spec.width * spec.layers)
    kv_bytes = 1024 * spec.layers * 2 * spec.kv_heads * spec.head_dim * 2
    assert one.bytes - kv_bytes == pytest.approx(matrices, rel=1e-3)
    assert many.bytes - one.bytes == pytest.approx(63 * kv_bytes, rel=1e-2)
    with_adapters = count_of(spec, layout, decode(64, 1024, mixed(4)))
    assert with_adapters.bytes - many.bytes == 2 * 120 * 32 * (2 * 8192 + 2 * 5120)
    assert count_of(spec, layout, prefill(2048)).flops > 2 * 2048 * 6.9e9


def test_tuning_keeps_the_fastest_sizes_of_each_shape(monkeypatch: pytest.MonkeyPatch):
    """The search itself, with times that favour 16 units; then one real miniature."""
    chip = chip_of("interpreter")
    assert chip is not None
    case = cases.SMALL_LORA[1]
    monkeypatch.setattr(tune, "_seconds", lambda case, inputs, chip: float(next(iter(chip.tuned.values()))["units"]))
    found = tune.tune(case, chip, tune.QUICK)
    assert found.best["units"] == 16 and len(found.times) == 2


def test_tune_writes_a_table_that_the_kernels_can_read():
    result = tune.run(quick=True)
    (tuned,) = result["tiles"]["tuned"].values()
    assert result["chip"] == "cpu" and len(tuned) == 2
    assert all(set(sizes) == {"tokens", "units"} for sizes in tuned.values())
    assert all(np.isfinite(t) and t > 0 for times in result["times"].values() for t in times.values())
    assert set(result["tiles"]["chips"]) >= {"TPU v5e", "TPU v6e"}
