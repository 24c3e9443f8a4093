"""The device job's report as text. No jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]


def table(record: Record) -> str:
    """What was found, a line for each row, then what failed and what was left out."""
    lines = [*_device(record)]
    for name, model in record.get("models", {}).items():
        lines += _model(name, model)
    for row in record.get("kernel_speed", []):
        lines.append(f"  {row['case']:60} {_speed(row)}")
    for row in record.get("checklist", []):
        if row["ok"] is not True:
            lines.append(f"  checklist: {row['case']}: {row.get('seen') or row.get('reason')}")
    for row in record.get("policies", []):
        lines.append(
            f"  {row['policy']:12} TTFT {row['ttft_s'] * 1e3:.1f} ms, KV hits {row['kv_device_hits']:.2f}, "
            f"{row['compiles_after_warmup']} compiled after warm-up (R10)"
        )
    lines += [f"failed: {reason}" for reason in record["failed"]]
    lines += [f"left out: {reason}" for reason in record["skipped"]]
    return "\n".join(lines)


def _device(record: Record) -> Iterator[str]:
    kernels = record.get("kernels", [])
    wrong = [row["case"] for row in kernels if row["ok"] is False]
    unserved = sum(row["ok"] is None for row in kernels)
    kind = record.get("device", {}).get("kind", "no device")
    yield f"{kind}: {len(kernels)} kernel cases, {unserved} not served, wrong: {wrong or 'none'}"
    if rates := record.get("rates"):
        link = rates["to_device"]["bytes_per_s"], rates["to_host"]["bytes_per_s"]
        yield (
            f"memory {rates['bytes_per_s'] / 1e9:.0f} GB/s, products {rates['flops_per_s'] / 1e12:.1f} TFLOP/s, "
            f"link {link[0] / 1e9:.1f} GB/s in, {link[1] / 1e9:.1f} GB/s out"
        )


def _model(name: str, model: Record) -> Iterator[str]:
    yield f"\n{name}: ms, share of the roofline floor (R5), share of the measured matmul rate"
    for row in model.get("steps", []):
        yield f"  {row['case']:32} {row['seconds'] * 1e3:9.2f} {row['floor_share']:6.2f} {row['matmul_share']:6.2f}"
    yield "  with adapters over the same step without (R4), control"
    for row in model.get("adapters", []):
        yield f"  {row['case']:44} {row['ratio']:6.3f} {row['control']:6.3f}{_own(row)}"
    for row in model.get("engine", []):
        yield (
            f"  engine, {row['case']}: {row['step_s'] * 1e3:.2f} ms, {row['ratio']:.3f} of the step alone, "
            f"{row['floor_share']:.2f} of the floor (R5); the device waits {row['gap_s'] * 1e6:.0f} us for the host, "
            f"whose part is {row['host_s'] * 1e6:.0f} us, {row['compiles_after_warmup']} compiled after warm-up (R10)"
        )
    if fit := model.get("fit"):
        errors = fit["errors"]
        yield f"  step-time model: median error {errors['median']:.1%}, worst {errors['worst']:.1%}"


def _own(row: Record) -> str:
    """R4 beside the program that knows no adapters: with them, and with LoRA on and none in the batch."""
    if "idle_to_own_program" not in row:
        return ""
    with_them, idle = row["ratio_to_own_program"], row["idle_to_own_program"]
    return f", over the base's own program {with_them:.3f}, with no adapter in the batch {idle:.3f}"


def _speed(row: Record) -> str:
    if "floor_us" not in row:
        return str(row.get("reason"))
    sides = [f"{n} {row[f'{n}_us']:.0f} us ({row[f'{n}_share']:.2f})" for n in ("kernel", "xla") if f"{n}_us" in row]
    why = [f"{n}: {row[f'{n}_reason']}" for n in ("kernel", "xla") if f"{n}_reason" in row]
    agree = [f"error {row['error']:.1e}{'' if row['ok'] else ' WRONG'}"] if "error" in row else []
    return f"floor {row['floor_us']:.0f} us; {', '.join([*sides, *agree, *why])}"
