"""The device job's report as text. No jax."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Record = Mapping[str, Any]
CASES = ("kernels", "kernel_speed", "checklist")  # their rows have "ok"
# column -> key of a row, factor, format
Columns = Mapping[str, tuple[str, float, str]]
STEPS: Columns = {
    "ms": ("seconds", 1e3, ".2f"),
    "of the floor (R5)": ("floor_share", 1, ".2f"),
    "of the measured matmul rate": ("matmul_share", 1, ".2f"),
}
ADAPTERS: Columns = {"over the base (R4)": ("ratio", 1, ".3f"), "control": ("control", 1, ".3f")}
ENGINE: Columns = {
    "ms": ("step_s", 1e3, ".2f"),
    "over the step alone": ("ratio", 1, ".3f"),
    "of the floor (R5)": ("floor_share", 1, ".2f"),
    "the device waits, us": ("gap_s", 1e6, ".0f"),
    "host, us": ("host_s", 1e6, ".0f"),
    "compiled after warm-up (R10)": ("compiles_after_warmup", 1, "d"),
}
SPEED: Columns = {
    "floor us": ("floor_us", 1, ".0f"),
    "kernel us": ("kernel_us", 1, ".0f"),
    "of the floor": ("kernel_share", 1, ".2f"),
    "XLA us": ("xla_us", 1, ".0f"),
    "error": ("error", 1, ".1e"),
}


def table(record: Record) -> str:
    """What was found, a line for each row, then what failed and what was left out. The last line is the verdict."""
    console = Console(file=io.StringIO(), width=160, highlight=False)
    for line in _device(record):
        console.print(line, markup=False)
    for name, model in record.get("models", {}).items():
        console.print(_rows(f"{name}: steps", model.get("steps", []), STEPS))
        console.print(_rows(f"{name}: steps with adapters", model.get("adapters", []), ADAPTERS))
        console.print(_rows(f"{name}: the whole engine", model.get("engine", []), ENGINE))
        if fit := model.get("fit"):
            errors = fit["errors"]
            console.print(f"step-time model: median error {errors['median']:.1%}, worst {errors['worst']:.1%}")
    console.print(_rows("kernels, timed", record.get("kernel_speed", []), SPEED))
    for line in (*_complaints(record), _verdict(record)):
        console.print(line, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _rows(title: str, rows: Sequence[Record], columns: Columns) -> Table | str:
    if not rows:
        return ""
    made = Table("case", *columns, title=title, title_justify="left", box=None)
    for row in rows:
        cells = [format(row[key] * factor, form) if key in row else "-" for key, factor, form in columns.values()]
        made.add_row(row["case"], *cells)
    return made


def _device(record: Record) -> Iterator[str]:
    kernels = record.get("kernels", [])
    unserved = sum(row["ok"] is None for row in kernels)
    yield f"{record.get('device', {}).get('kind', 'no device')}: {len(kernels)} kernel cases, {unserved} not served"
    if rates := record.get("rates"):
        link = rates["to_device"]["bytes_per_s"], rates["to_host"]["bytes_per_s"]
        yield (
            f"memory {rates['bytes_per_s'] / 1e9:.0f} GB/s, products {rates['flops_per_s'] / 1e12:.1f} TFLOP/s, "
            f"link {link[0] / 1e9:.1f} GB/s in, {link[1] / 1e9:.1f} GB/s out"
        )


def _verdict(record: Record) -> str:
    """The exit code in words."""
    rows = [row for name in CASES for row in record.get(name, [])]
    wrong, failed = sum(row.get("ok") is False for row in rows), len(record["failed"])
    if "rates" not in record:
        return "verdict: nothing was measured"
    if wrong or failed:
        return f"verdict: {wrong} cases are wrong and {failed} parts failed, see above"
    return f"verdict: this device computes what it should ({sum(row.get('ok') is True for row in rows)} cases checked)"


def _complaints(record: Record) -> Iterator[str]:
    """Every case that is wrong or has no kernel, then what failed and what was left out."""
    for name in CASES:
        for row in record.get(name, []):
            reasons = [str(row[key]) for key in ("reason", "seen", "kernel_reason", "xla_reason") if row.get(key)]
            if row.get("ok") is False:
                yield f"WRONG: {row['case']}: {', '.join(reasons)}"
            elif reasons and name != "kernels" and row.get("ok") is not True:
                yield f"{row['case']}: {', '.join(reasons)}"
    yield from (f"failed: {reason}" for reason in record["failed"])
    yield from (f"left out: {reason}" for reason in record["skipped"])
