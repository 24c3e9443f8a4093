"""Everything that only an accelerator can show, in one job: `python -m jlora.bench.device [--quick]`.

    rates      memory, products and the link to the host, as measured here
    kernels    every kernel against the reference; then kernel, XLA and roofline floor on large cases
    steps      Llama-3-8B and Llama-2-7B with random weights: decode, prompts, 0 to 64 adapters (R4, R5)
    model      the step-time model fitted to these steps
    engine     the whole engine against the bare step (R5); cache policies on a short W1 (R10)

It needs jax, numpy, flax and safetensors, nothing from a disk or a network, and one device. It
stays under its time limit: what there was no time for is listed as such. On a CPU all of it runs
in miniature, TPU kernels in the interpreter. Results: a JSON file, the fitted coefficients as
another, and a table on the screen.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jlora.bench import device_checks, device_engine, device_fit, device_rates, machine
from jlora.bench.device_engine import Busy, World
from jlora.bench.device_fit import Measured
from jlora.bench.device_model import DeviceModel, StepCase, adapter_blocks, count_of, decode, mixed, prefill
from jlora.errors import JloraError
from jlora.model.spec import ModelSpec
from jlora.pallas import cases
from jlora.sim.workloads import Load

ROUNDS, REPEATS = 5, 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: full on an accelerator, a miniature on a CPU."""

    models: tuple[ModelSpec, ...]
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    context: int
    adapters: tuple[int, ...]
    busy: Busy
    shallow: ModelSpec
    load: Load
    small: bool


def plan_for(platform: str, quick: bool) -> Plan:
    """The plan for a platform; `quick` has one model and fewer shapes."""
    if platform == "cpu":
        tiny = replace(cases.TINY, max_len=128)
        load = Load(rate=3, seconds=1.5, gap_s=1, adapters=3, shrink=32, vocab=tiny.vocab, max_len=tiny.max_len)
        return Plan((tiny,), (2,), (64,), 32, (1, 2), Busy(2, 16, 8), tiny, load, True)
    models = (cases.LLAMA3_8B,) if quick else (cases.LLAMA3_8B, cases.LLAMA2_7B)
    models = tuple(replace(spec, max_len=4096) for spec in models)
    shallow = replace(cases.LLAMA3_8B, layers=2, max_len=1024, name="llama3-8b, 2 layers")
    load = Load(rate=8, seconds=20, gap_s=4, adapters=24, shrink=4, vocab=shallow.vocab, max_len=shallow.max_len)
    sizes = ((1, 64), (512,)) if quick else ((1, 8, 32, 64), (512, 2048))
    return Plan(models, *sizes, 1024, (1, 8, 64), Busy(16, 32, 48), shallow, load, False)


@dataclass(slots=True)
class Report:
    """What has been found so far, and the time that is left."""

    started: float
    limit_s: float
    found: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit_s - (time.monotonic() - self.started)

    def section(self, name: str, least_s: float, run: Callable[[], Any]) -> Any:
        """Runs a section if at least so many seconds are left; an error of ours ends it, not the job."""
        if self.left() < least_s:
            self.skipped.append(f"{name}: {self.left():.0f} s left, {least_s:.0f} s needed")
            return None
        began = time.monotonic()
        try:
            self.found[name] = run()
        except (JloraError, *device_checks.FAILURES) as e:
            self.skipped.append(f"{name}: {type(e).__name__}: {e}"[:400])
            return None
        print(f"{name}: {time.monotonic() - began:.0f} s, {self.left():.0f} s left", flush=True)
        return self.found[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; 0 unless a kernel differs from the reference."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as cache:
        # The engine's programs are the bare steps' own: compiled once, found here again.
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        report = run(args)
    record = {
        "benchmark": "device",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m jlora.bench.device " + " ".join(a for a in (argv or sys.argv[1:]) if "/" not in a),
        "device": {"platform": jax.default_backend(), "kind": jax.devices()[0].device_kind},
        "machine": machine.describe(),
        "versions": machine.versions(),
        "seconds": round(time.monotonic() - report.started, 1),
        **report.found,
        "skipped": report.skipped,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "device.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    for name, model in record.get("models", {}).items():
        (args.out / f"step-{name}.json").write_text(json.dumps(model["fit"], indent=1) + "\n")
    print(table(record))
    print(path)
    checked = [*record.get("kernels", []), *(record.get("checklist") or [])]
    return int(any(row["ok"] is False for row in checked))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser("python -m jlora.bench.device", description=__doc__)
    made.add_argument("--quick", action="store_true", help="one model, fewer shapes, a third of the time")
    made.add_argument("--kernels", default="auto", choices=("auto", "pallas", "xla"), help="ops of the steps")
    made.add_argument("--minutes", type=float, default=8.0, help="time limit")
    made.add_argument("--out", type=Path, default=Path("build/device"), help="where results go")
    return made


def run(args: argparse.Namespace) -> Report:
    """All sections, the most telling first."""
    plan = plan_for(jax.default_backend(), args.quick)
    report = Report(time.monotonic(), 60 * args.minutes)
    rates = report.section("rates", 0, lambda: device_rates.measure(plan.small).describe())
    measured = device_rates.Rates.of(rates)
    report.section("kernels", 0, lambda: device_checks.correctness(7 if plan.small else 3 if args.quick else 1))
    models = {}
    for spec in plan.models:
        done = report.section(spec.name, 60, lambda spec=spec: steps(plan, spec, args.kernels, measured, report.left))
        if done:
            models[spec.name] = report.found.pop(spec.name)
    report.found["models"] = models
    report.section("engine", 5 if plan.small else 90, lambda: engine(plan, args.kernels))
    report.section("kernel_speed", 40, lambda: device_checks.speed(measured, plan.small, lambda: report.left() - 20))
    # Last, because a wrong wait among the warps of a new kernel hangs instead of failing.
    report.section("checklist", 30, lambda: device_checks.checklist(report.left))
    return report


def steps(
    plan: Plan, spec: ModelSpec, kernels: str, rates: device_rates.Rates, left: Callable[[], float]
) -> dict[str, Any]:
    """Times one model's steps and fits the step-time model to them."""
    base = [decode(n, plan.context) for n in plan.decode] + [prefill(n) for n in plan.prefill]
    most = plan.decode[-1]
    with_adapters = [decode(most, plan.context, mixed(k)) for k in plan.adapters]
    with_adapters.append(decode(most, plan.context, (16,) * min(8, most)))
    with_adapters.append(prefill(plan.prefill[-1], (16,) * plan.adapters[1]))
    config = device_engine.settings(max(most, 2), 32, kernels)
    model = DeviceModel(spec, [*base, *with_adapters], config)
    try:
        shapes = list(dict.fromkeys(case.shape for case in base))
        began = time.monotonic()
        model.compile(shapes, base_only=[base[len(plan.decode) - 1].shape])
        compiled_s = time.monotonic() - began
        rows, measured, skipped = [], [], []
        for case in base:
            if left() < 30:
                skipped.append(case.name)
                continue
            rows.append(_step_row(model, case, rates, _seconds(model.runner(case), plan)))
            measured.append(Measured(case.name, count_of(spec, model.layout, case), 0, rows[-1]["seconds"]))
        compared = []
        for case in with_adapters:
            if left() < 20:
                skipped.append(case.name)
                continue
            compared.append(_against_base(model, case, plan))
            blocks = spec.layers * sum(adapter_blocks(model.layout, rank) for rank in case.ranks)
            count = count_of(spec, model.layout, case)
            measured.append(Measured(case.name, count, blocks, compared[-1]["seconds"]))
        ops = [[c.op, c.implementation, c.reason] for c in model.chosen.choices]
        found = {"steps": rows, "adapters": compared, "compile_s": compiled_s, "ops": ops, "skipped": skipped}
        if measured:
            found["fit"] = device_fit.fit(measured).describe(rates)
        return {**found, "pool_blocks": model.layout.blocks, "block_bytes": model.layout.block_bytes}
    finally:
        model.close()


def _seconds(call: Callable[[int], Any], plan: Plan) -> float:
    return device_rates.seconds(call, 2 if plan.small else REPEATS, ROUNDS)


def _step_row(model: DeviceModel, case: StepCase, rates: device_rates.Rates, taken: float) -> dict[str, Any]:
    count = count_of(model.spec, model.layout, case)
    floor = count.floor(rates.chip)
    return {
        "case": case.name,
        "seconds": taken,
        "tokens_per_s": case.tokens / taken,
        "floor_s": floor,
        "floor_share": floor / taken,
        "matmul_share": count.flops / rates.flops_per_s / taken,
        "bound": count.bound(rates.chip),
    }


def _against_base(model: DeviceModel, case: StepCase, plan: Plan) -> dict[str, Any]:
    """R4: the step with adapters over the same step without, turn by turn; a control runs the base twice."""
    idle = replace(case, parts=tuple(replace(p, adapter=-1) for p in case.parts), ranks=())
    sides = {"base": model.runner(idle), "adapters": model.runner(case), "control": model.runner(idle)}
    if (case.shape, False) in model.compiled:
        sides["no LoRA op"] = model.runner(idle, lora=False)
    repeats = 2 if plan.small else REPEATS
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        jax.block_until_ready(sides[name](1))
    for _ in range(ROUNDS):
        for name, call in sides.items():
            began = time.perf_counter()
            jax.block_until_ready(call(repeats))
            taken[name].append((time.perf_counter() - began) / repeats)

    def over_base(name: str) -> float:
        return statistics.median(x / y for x, y in zip(taken[name], taken["base"], strict=True))

    row = {"case": case.name, "seconds": statistics.median(taken["adapters"]), "ratio": over_base("adapters")}
    row["control"] = over_base("control")
    if "no LoRA op" in sides:
        row["op_without_adapters"] = 1 / over_base("no LoRA op")
    return row


def engine(plan: Plan, kernels: str) -> dict[str, Any]:
    """The engine's own share of a step, and the policies, on a shallow model."""
    tokens = plan.busy.sequences * 32
    config = device_engine.settings(plan.busy.sequences, tokens, kernels)
    pool = 4 * plan.busy.sequences * (plan.shallow.max_len // 32)
    world = World(plan.shallow, config, max(256, pool))
    try:
        whole = device_engine.overhead(world, plan.busy)
        names = device_engine.POLICIES[:2] if plan.small else device_engine.POLICIES
        return {"decode": whole, "policies": device_engine.policies(world, plan.load, 0.3, 1.0, names)}
    finally:
        world.close()


def table(record: Mapping[str, Any]) -> str:
    """The report as text."""
    kernels = record.get("kernels", [])
    wrong = [row["case"] for row in kernels if row["ok"] is False]
    unserved = sum(row["ok"] is None for row in kernels)
    lines = [
        f"{record['device']['kind']}: {len(kernels)} kernel cases, {unserved} not served, wrong: {wrong or 'none'}"
    ]
    if rates := record.get("rates"):
        link = rates["to_device"]["bytes_per_s"], rates["to_host"]["bytes_per_s"]
        lines.append(
            f"memory {rates['bytes_per_s'] / 1e9:.0f} GB/s, products {rates['flops_per_s'] / 1e12:.1f} TFLOP/s, "
            f"link {link[0] / 1e9:.1f} GB/s in, {link[1] / 1e9:.1f} GB/s out"
        )
    for name, model in record.get("models", {}).items():
        lines.append(f"\n{name}: ms, share of the roofline floor (R5), share of the measured matmul rate")
        for row in model["steps"]:
            lines.append(
                f"  {row['case']:32} {row['seconds'] * 1e3:9.2f} {row['floor_share']:6.2f} {row['matmul_share']:6.2f}"
            )
        lines.append("  with adapters over the same step without (R4), control")
        for row in model["adapters"]:
            extra = f", the op alone {row['op_without_adapters']:.3f}" if "op_without_adapters" in row else ""
            lines.append(f"  {row['case']:44} {row['ratio']:6.3f} {row['control']:6.3f}{extra}")
    for row in record.get("kernel_speed", []):
        parts = [
            f"{n} {row[f'{n}_us']:.0f} us ({row[f'{n}_share']:.2f})" for n in ("kernel", "xla") if f"{n}_us" in row
        ]
        lines.append(f"  {row['case']:60} floor {row.get('floor_us', 0):.0f} us; {', '.join(parts)}")
    lines += [f"  checklist: {row['check']} failed: {row}" for row in record.get("checklist", []) if row["ok"] is False]
    if whole := record.get("engine"):
        lines.append(f"\nengine: {whole['decode']['step_s'] * 1e3:.2f} ms per full decode step")
        for row in whole["policies"]:
            lines.append(f"  {row['policy']:12} TTFT {row['ttft_s'] * 1e3:.1f} ms, KV hits {row['kv_device_hits']:.2f}")
    return "\n".join([*lines, *(f"skipped: {reason}" for reason in record.get("skipped", []))])


if __name__ == "__main__":
    sys.exit(main())
