"""The device job in miniature, as a bare accelerator image has it: few packages, one command; and what can break it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jlora import cli, machine
from jlora.doctor import checks, fit, journal, model, needs, rates
from jlora.doctor import job as the_job
from jlora.doctor.fit import Link, Measured, Rates
from jlora.doctor.job import Job, Section
from jlora.doctor.model import Part, StepCase, count_of, decode, load_of, mixed, plan_of, prefill
from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.pallas import cases, gpu_ops
from jlora.pallas.dispatch import Site, choose
from jlora.pallas.gpu_support import Gpu, fit_units
from jlora.pallas.ops import GROUPS
from jlora.pallas.reference import XLA
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, simulate
from jlora.sim.workloads import SOURCES, Load, play
from jlora.step_model import StepLoad, StepModel

ROOT = Path(__file__).resolve().parents[2]
# What the project, its tests, or flax beside itself install, and this job must do without. There are jax with scipy,
# flax with what `flax.nnx` itself imports (optax, treescope, msgpack, rich, yaml), and safetensors.
ABSENT = (
    "tqdm",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "google",
    "orbax",
    "tensorstore",
    "requests",
    "PIL",
    "transformers",
    "peft",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "matplotlib",
    "torch",
    "pytest",
    "hypothesis",
    "prometheus_client",
)
# Python reads it at the start of every process: of the job, and of its parts.
BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""


def bare(directory: Path, absent: Sequence[str]) -> dict[str, str]:
    """The environment of a Python that lacks packages."""
    (directory / "sitecustomize.py").write_text(BARE.replace("ABSENT", repr(absent)))
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": path}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the job in miniature has put its results, and what it said."""
    env, out = bare(tmp_path_factory.mktemp("bare"), ABSENT), tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "jlora.doctor", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_a_python_without_a_package_is_told_so_at_once(tmp_path: Path):
    command = [sys.executable, "-m", "jlora.doctor", "--quick", "--out", str(tmp_path / "out")]
    env = bare(tmp_path, ("msgspec", "rich"))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    said = "jlora doctor: needs packages that this Python lacks: pip install msgspec rich\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_what_is_asked_for_is_all_that_the_parts_import():
    """Beside it there is what these packages need themselves."""
    code = "import sys, jlora.doctor.part, jlora.doctor.job, jlora.doctor.tune; print(*sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    imported = {name.partition(".")[0] for name in made.stdout.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ours = {re.split(r"[<>=]", word)[0] for word in project} - {"jaxlib", "ml_dtypes", "tqdm"}  # jax, flax bring them
    assert set(needs.PACKAGES) <= imported and imported & ours <= {*needs.PACKAGES, "flatbuffers", "safetensors"}


@pytest.mark.slow
def test_the_job_runs_in_miniature_without_the_projects_other_packages(job: tuple[Path, str]):
    out, said = job
    record = json.loads((out / "device.json").read_text())
    assert record["skipped"] == record["failed"] == []
    kernels = record["kernels"]
    attention, lora = ([r for r in kernels if ("B=" in r["case"]) is attends] for attends in (True, False))
    assert len(lora) >= 1 and all(row["ok"] is True for row in lora)
    assert len(attention) >= 2 and all("does not run on a CPU" in row["reason"] for row in attention)
    model = record["models"]["tiny128"]
    assert {row["case"] for row in model["steps"]} == {"decode 2 x 32", "prefill 64"}
    assert all(row["seconds"] > 0 and 0 < row["floor_share"] for row in model["steps"])
    assert len(model["adapters"]) == 4 and all(row["ratio"] > 0 for row in model["adapters"])
    by_kernel = {row["case"]: row for row in record["kernel_speed"]}
    assert [row["ok"] for row in by_kernel.values() if "error" in row] == [True]
    assert record["device"]["platform"] == "cpu" and record["versions"]["jax"]
    assert "over the base (R4)" in said and "decode 2 x 32" in said


@pytest.mark.slow
def test_the_whole_engine_is_timed_beside_the_bare_step_and_the_floor(job: tuple[Path, str]):
    out, said = job
    rows = json.loads((out / "device.json").read_text())["models"]["tiny128"]["engine"]
    assert [row["case"] for row in rows] == ["decode 2 x 32", "decode 2 x 32, 2 adapters r16-16"]
    for row in rows:
        assert row["compiles_after_warmup"] == 0 and row["steps"] >= 4
        assert row["step_s"] > row["host_s"] > 0 and row["alone_s"] > 0
        assert row["ratio"] == pytest.approx(row["step_s"] / row["alone_s"])
        assert row["gap_s"] == pytest.approx(row["step_s"] - row["alone_s"])
        assert row["floor_share"] == pytest.approx(row["floor_s"] * row["tokens_per_s"] / 2)
    assert "tiny128: the whole engine" in said and "compiled after warm-up (R10)" in said


@pytest.mark.slow
def test_the_simulator_runs_on_the_steps_that_the_job_has_measured(job: tuple[Path, str]):
    file = job[0] / "step-tiny128.json"
    spec = replace(cases.TINY, max_len=128)
    model = StepModel.fitted(file, spec.name, 1)
    rows = json.loads((job[0] / "device.json").read_text())["models"]["tiny128"]
    assert json.loads(file.read_text()) == rows["fit"]
    assert rows["fit"]["errors"]["steps"] == 6 and rows["fit"]["errors"]["median"] < 0.5
    assert model.seconds(StepLoad(**rows["steps"][0]["load"])) > model.fixed_s > 0
    load = Load(rate=2.0, seconds=5.0, adapters=2, shrink=16, vocab=spec.vocab, max_len=spec.max_len)
    hardware = Hardware(CHIPS["npu"], 1, spec)
    work = Work.of(play(SOURCES["W7"](None), load), (4, 8), hardware)
    run = simulate(Scenario(hardware, hbm_gb=0.01, host_gb=0.05, step=model), work, "jlora")
    assert run["setting"]["step_model"] == "fitted" and run["summary"]["ttft_s"] > 0
    assert run["summary"]["requests"] == work.facts.requests and run["summary"]["unfinished"] == 0


@pytest.mark.slow
def test_steps_measured_for_one_model_are_refused_for_another(
    job: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    words = ["sim", "--steps", str(job[0] / "step-tiny128.json"), "--policy", "jlora", "--seconds", "10"]
    assert cli.main(words) == 1
    assert "step-tiny128.json: model = 'tiny128': must be 'llama-2-7b'" in capsys.readouterr().err


RATES = Rates(4e12, 7e14, Link(5e10, 1e-5), Link(5e10, 1e-5))


# A part that breaks on the case b, as a kernel on a real device may, and is whole again after it.
BREAKS = """
import json, sys, time
from pathlib import Path
from jlora.doctor.journal import Journal, read
path = Path(json.loads(sys.argv[1])["to"])
journal, done = Journal(path), read(path).begun
for case in "abc":
    if case in done:
        continue
    journal.begin(case)
    if case == "b":
        HOW
    journal.row("kernels", {"case": case, "ok": True})
journal.end()
"""


def test_quick_compares_every_form_of_every_kernel():
    quick = checks.quick_cases()
    attention = [c for c in quick if isinstance(c, cases.AttentionCase)]
    adapted = [c for c in quick if isinstance(c, cases.LoraCase)]
    assert [c.name.rpartition(" ")[2] for c in attention] == ["decode", "chunks", "mixed"]
    assert {c.group for c in adapted} == set(GROUPS)
    assert {any(who >= 0 for who, _ in c.tokens) for c in adapted} == {True, False}
    for case in quick:  # and accelerators serve them: nothing is left out for its type, its heads or its pages
        one = isinstance(case, cases.AttentionCase)
        shapes = ((len(case.rows) + case.padding, case.chunk),) if one else ((case.count, 1),)
        for platform, kind in (("gpu", "NVIDIA H200"), ("tpu", "TPU v5 lite")):
            if platform == "gpu" and gpu_ops.runtime_refusal():
                continue
            layout = fit_units(case.layout) if platform == "gpu" else case.layout
            chosen = choose(Site(platform, kind, layout, case.spec.heads, shapes, 8, 64, Gpu("9.0")), "pallas")
            assert chosen.choices[0 if one else 1].implementation == f"pallas-{platform}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("time.sleep(100)", "without a sign"), ("sys.exit('CUDA_ERROR_ILLEGAL_ADDRESS')", "exit code 1")],
    ids=["hangs", "dies"],
)
def test_a_kernel_that_hangs_or_dies_costs_its_own_case_only(how: str, reason: str, tmp_path: Path):
    script = tmp_path / "part.py"
    script.write_text(BREAKS.replace("HOW", how))
    args = argparse.Namespace(out=tmp_path, kernels="auto", quick=True, words=["--quick"])
    made = Job(args, time.monotonic() + 60, tmp_path, (sys.executable, str(script)))
    made.run(Section("kernels", silent_s=5, restarts=2))
    record = json.loads((tmp_path / "device.json").read_text())
    assert [(row["case"], row["ok"]) for row in record["kernels"]] == [("a", True), ("b", False), ("c", True)]
    assert reason in record["kernels"][1]["reason"] and record["commit"] == machine.commit()
    assert len(record["failed"]) == 1 and record["failed"][0].startswith("kernels, b: ")
    assert ("ILLEGAL_ADDRESS" in record["failed"][0]) == ("sys.exit" in how)


@pytest.mark.slow
@pytest.mark.parametrize(("silent", "failed"), [("compile 64x1", 0), ("decode 64 x 1024", 1)])
def test_a_compiler_may_be_silent_for_longer_than_what_is_timed(silent: str, failed: int, tmp_path: Path):
    script = tmp_path / "part.py"
    script.write_text(BREAKS.replace("HOW", f"journal.begin({silent!r}); time.sleep(8)"))
    args = argparse.Namespace(out=tmp_path, kernels="auto", quick=True, words=[])
    made = Job(args, time.monotonic() + 60, tmp_path, (sys.executable, str(script)))
    made.run(Section("kernels", silent_s=4))
    assert len(made.failed) == failed


def test_what_a_part_has_found_is_in_the_results_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(Job, "run", lambda job, section, behind=(): seen.append([str(job.work), *os.listdir(job.work)]))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/kept")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "rates.jsonl").write_text('{"end": true}\n')  # of an earlier job
    assert the_job.main(["--out", str(tmp_path)]) == 1  # nothing was measured
    assert seen == [[str(tmp_path / "parts")]] and os.environ["JAX_COMPILATION_CACHE_DIR"] == "/kept"


# A part that begins at once, also on a busy machine, and breaks on the case b.
LIGHT = """
import json, sys, time
with open(json.loads(sys.argv[1])["to"], "a") as file:
    for line in ({"begin": "a"}, {"row": ["kernels", {"case": "a", "ok": True}]}, {"begin": "b"}):
        file.write(json.dumps(line) + "\\n")
HOW
"""


def light(how: str, folder: Path) -> Job:
    """A job of it."""
    args = argparse.Namespace(out=folder, kernels="auto", quick=True, words=[])
    return Job(args, time.monotonic() + 28, folder, (sys.executable, "-c", LIGHT.replace("HOW", how)))


def test_a_part_without_time_is_left_out_and_one_that_is_late_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(the_job, "GRACE_S", 2)
    made = light("time.sleep(100)", tmp_path)
    made.run(Section("kernel_speed", least_s=30))
    assert made.skipped[0].startswith("kernel_speed: ") and made.failed == []
    made.run(Section("kernels", most_s=1, restarts=2))
    assert made.failed == [] and [row["ok"] for row in made.found["kernels"]] == [True, None]
    assert "kernels, b: was ended" in made.skipped[1]


@pytest.mark.parametrize(
    ("how", "reason"),
    [("time.sleep(100)", "s without a sign"), ("time.sleep(2); sys.exit(3)", "ended with exit code 3")],
    ids=["hangs", "dies"],
)
def test_a_part_that_hangs_or_dies_when_its_time_is_over_has_failed(how: str, reason: str, tmp_path: Path):
    made = light(how, tmp_path)
    made.run(Section("kernels", most_s=1, silent_s=6))
    assert made.skipped == [] and made.failed[0].startswith("kernels, b: ") and made.failed[0].endswith(reason)
    assert [row["ok"] for row in made.found["kernels"]] == [True, False]


def test_a_job_that_is_told_to_end_takes_its_part_with_it(tmp_path: Path):
    part = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    code = f"""
import functools, sys
from jlora.doctor import job
job.Job = functools.partial(job.Job, program=(sys.executable, "-c", {part!r}))
sys.exit(job.main(["--out", {str(tmp_path)!r}]))
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        log = tmp_path / "parts" / "rates.log"
        until = time.monotonic() + 30
        while not (log.exists() and log.read_text().strip()) and time.monotonic() < until:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


FIRST = ["decode 64 x 1k", "q+k+v decode 64, 8 adapters"]
ATTENDS, ADAPTS = cases.SMALL_ATTENTION[-3], cases.SMALL_LORA[6]
WRONG = {
    "adds nothing": (ADAPTS, replace(XLA, lora=lambda x, pool, first, parts, adapters: [p.base for p in parts])),
    "another layer": (ADAPTS, replace(XLA, lora=lambda x, pool, first, *rest: XLA.lora(x, pool, 0, *rest))),
    "even weights": (ATTENDS, replace(XLA, attention=lambda q, *rest: XLA.attention(0 * q, *rest))),
    "not a number": (ATTENDS, replace(XLA, attention=lambda q, *rest: XLA.attention(q, *rest) / 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_on_what_is_timed_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    """With plain ops in the place of kernels, and small cases in that of large ones."""
    case, wrong = WRONG[name]
    for ops, right in ((wrong, False), (XLA, True)):
        monkeypatch.setattr(checks, "kernels_for", lambda case, ops=ops: ops)
        assert checks.timed(case, RATES)["ok"] is right


@pytest.mark.skipif(bool(gpu_ops.runtime_refusal()), reason=str(gpu_ops.runtime_refusal()))
@pytest.mark.parametrize("spec", [cases.TINY, cases.TINY64])
def test_a_gpu_has_attention_for_heads_of_either_width(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch):
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    chip = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0", client=client)
    monkeypatch.setattr(jax, "devices", lambda: [chip])
    half = replace(spec, dtype="bfloat16")
    some = [case for case in cases.SMALL_ATTENTION if case.spec == half]
    assert some and all(checks.kernels_for(case).attention is not XLA.attention for case in some)


def test_whenever_the_time_for_speed_ends_every_op_of_every_model_has_been_timed():
    def kinds(some: Sequence[checks.Case]) -> set[tuple[str, type]]:
        return {(case.spec.name, type(case)) for case in some}

    every, quick = checks.large_cases(False), checks.large_cases(False, quick=True)
    assert len(kinds(every[:4])) == 4 and [c.name.partition("tp=1 ")[2] for c in every[:2]] == FIRST
    loads = {case.name.rpartition("tp=1 ")[2] for case in every[:12]}
    assert {"prefill 2048", "decode 1 x 1k", "q+k+v decode 64, 64 adapters, mixed ranks"} <= loads
    assert len({case.name for case in every}) == len(every) == 36
    assert len(quick) == 8 and len(kinds(quick)) == 2 and quick[:2] == every[:2]


@pytest.mark.parametrize(
    ("platform", "quick", "kernels"),
    [("gpu", False, "auto"), ("tpu", False, "auto"), ("gpu", True, "auto"), ("gpu", False, "both")],
)
def test_the_job_ends_within_eight_minutes_and_every_part_has_its_least_time(platform: str, quick: bool, kernels: str):
    plan = [the_job.RATES, *the_job.sections(platform, quick, kernels)]
    assert len({section.name for section in plan}) == len(plan)
    limit = 60 * the_job.parser().get_default("minutes")
    assert limit <= 8 * 60 - 10  # the job's own start and end
    assert sum(section.needs_s for section in plan) <= limit
    left = limit
    for at, section in enumerate(plan):  # each takes all it gets, and is late
        share = section.share(left, sum(each.needs_s for each in plan[at + 1 :]))
        assert section.least_s <= share <= section.most_s
        left -= share + the_job.GRACE_S
    assert left >= 0


def test_a_line_that_was_cut_off_is_no_line(tmp_path: Path):
    path = tmp_path / "part.jsonl"
    written = journal.Journal(path)
    written.begin("a")
    written.put("rates", {"x": 1})
    written.begin("b")
    with path.open("a") as file:
        file.write('{"row": ["kernels", {"ca')
    found = journal.read(path)
    assert found.values == {"rates": {"x": 1}} and found.open == "b" and not found.ended
    journal.Journal(path).row("kernels", {"case": "b"})  # what is appended stands on a line of its own
    found = journal.read(path)
    assert found.values["kernels"] == [{"case": "b"}] and found.open is None and found.begun == ["a", "b"]


def loads() -> list[StepLoad]:
    """The device job's own steps of Llama-3-8B."""
    blocks = fit.hardware(MODELS["llama-3-8b"], RATES).adapter_blocks
    base = [decode(n, 1024) for n in (1, 8, 32, 64)] + [prefill(n) for n in (512, 2048)]
    adapted = [decode(64, 1024, mixed(k)) for k in (1, 8, 64)] + [prefill(2048, (16,) * 8)]
    return [load_of(case, blocks) for case in [*base, *adapted]]


def test_the_fit_finds_a_device_that_is_slower_than_its_rates_say():
    prior = fit.hardware(MODELS["llama-3-8b"], RATES).step_model()
    true = replace(
        prior,
        fixed_s=1.5e-3,
        weights_s=1.3 * prior.weights_s,
        context_token_s=2 * prior.context_token_s,
        prompt_token_s=1.4 * prior.prompt_token_s,
        adapter_block_s=3 * prior.adapter_block_s,
    )
    found = fit.fit(prior, [Measured(load, true.seconds(load)) for load in loads()])
    assert found.worst_error < 0.03 and found.median_error < 0.01
    assert found.model.context_token_s == pytest.approx(true.context_token_s, rel=0.1)
    assert found.model.prompt_token_s == pytest.approx(true.prompt_token_s, rel=0.1)
    assert found.model.fixed_s + found.model.weights_s == pytest.approx(true.fixed_s + true.weights_s, rel=0.05)


def test_a_model_that_was_timed_with_two_kernels_has_a_file_of_each(tmp_path: Path):
    prior = fit.hardware(MODELS["llama-3-8b"], RATES).step_model()
    row = {"load": loads()[3]._asdict(), "seconds": 0.02}
    models = {name: {"prior": asdict(prior), "steps": [row]} for name in ("llama-3-8b xla", "llama-3-8b pallas")}
    report = {"models": models, "rates": asdict(RATES), "device": {"kind": "H200"}, "date": "2026-01-01"}
    for name in models:
        path = fit.write(fit.of_report(report, name) or {}, tmp_path)
        assert path.name == f"step-{name.replace(' ', '-')}.json" and StepModel.fitted(path, "llama-3-8b", 1)


def test_one_step_moves_the_fit_no_further_than_it_must(tmp_path: Path):
    prior = fit.hardware(MODELS["llama-3-8b"], RATES).step_model()
    (load,) = loads()[3:4]
    made = fit.record(prior, [Measured(load, 2 * prior.seconds(load))], {"model": "llama-3-8b", "chips": 1})
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(made))
    model = StepModel.fitted(path, "llama-3-8b", 1)
    assert model.seconds(load) == pytest.approx(2 * prior.seconds(load), rel=0.02)
    assert model.pair_s == pytest.approx(prior.pair_s, rel=1e-6)  # nothing was seen of it
    assert all(value > 0 for value in asdict(model).values())


def test_a_step_is_counted_as_the_simulator_counts_it():
    case = StepCase("two", (Part(10, 40, 1), Part(1023, 1, 0), Part(5, 1)), (8, 16))
    blocks = {8: 3, 16: 5}
    load = load_of(case, blocks.__getitem__)
    assert load == StepLoad(40, 2, 50 + 1024 + 6, 40 * 30.5 + 1024 + 6, 8, 40 * 5 + 3)


def test_a_plan_holds_its_cases_contexts_and_adapters_on_blocks_of_their_own():
    case = StepCase("two", (Part(10, 40, 1), Part(0, 32, -1)), (8, 16))
    layout = model.layout_for(cases.TINY, [case], "auto")
    plan = plan_of(layout, case, itertools.count(1))
    assert not plan.decode and [(w.start, w.count, w.adapted) for w in plan.prefill] == [(10, 40, True), (0, 32, False)]
    first, second = (work.sequence for work in plan.prefill)
    assert first.adapter.uid == 2 and first.lease is not None and second.lease is not None
    used = [*first.adapter.device, *first.lease.blocks, *second.lease.blocks]
    assert len(set(used)) == len(used) and 0 < min(used) and max(used) < layout.blocks
    assert len(first.adapter.device) == len(model.projections(layout, 16))
    assert len(first.lease.blocks) == layout.blocks_for(50)


def test_the_rate_of_products_is_of_numbers_without_zeros_that_stay_of_one_size(monkeypatch: pytest.MonkeyPatch):
    seen: list[np.ndarray] = []

    def once(call, repeats: int) -> float:
        seen.extend(np.asarray(call(count), np.float32) for count in (1, repeats))
        return 1.0

    monkeypatch.setattr(rates, "seconds", once)
    assert rates.products(256) == 2 * 256**3
    for values in (np.asarray(rates.factor(256), np.float32), *seen):
        assert (values != 0).mean() > 0.99 and 0.03 < values.std() < 0.12  # 1 / 16


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


def test_the_job_itself_needs_no_jax():
    """It must hold neither the device nor its memory while its parts run."""
    code = "import sys, jlora.doctor.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
