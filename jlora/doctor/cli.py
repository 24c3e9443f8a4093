"""`jlora doctor`: checks and measures this accelerator.

jlora doctor [check] [--quick]     every kernel, rates, whole steps, cache policies; writes JSON and a table
jlora doctor tune [--quick]        block sizes of the kernels for this chip, in some 8 minutes
jlora doctor fit DEVICE.json       the simulator's step-time model from a report of `check`
jlora doctor fit --model DIR       an engine's step times: profiles it on this machine
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jlora.doctor import fit, job, points
from jlora.errors import JloraError

KERNELS = ("decode", "prefill", "lora")  # that can be tuned


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["tune"]:
        return _tune(words[1:])
    if words[:1] == ["fit"]:
        return _fit(words[1:])
    return job.main(words[1:] if words[:1] == ["check"] else words)


def _tune(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser("jlora doctor tune", description="Measures block sizes of the kernels.")
    made.add_argument("--quick", action="store_true", help="fewer shapes")
    made.add_argument("--minutes", type=float, default=8.0, help="begin nothing later")
    made.add_argument("--only", nargs="+", default=KERNELS, choices=KERNELS, help="these kernels alone")
    made.add_argument("--out", type=Path, default=Path("build/doctor"), help="where tiles.json goes")
    args = made.parse_args(argv)
    until = time.monotonic() + 60 * args.minutes

    from jlora.doctor import tune  # jax comes with it: not before the flags are known to be right

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "tiles.json"

    def save(found: dict[str, Any]) -> None:
        _write(args.out / "tune.json", {key: found[key] for key in ("chip", "times")}, 1)
        _write(path, found["tiles"], 2)

    try:
        save(tune.run(tune.Plan(args.quick, args.only, until), save))
    except JloraError as e:
        print(f"jlora doctor tune: {e}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _write(path: Path, found: Any, indent: int) -> None:
    """A reader never sees half of a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=indent) + "\n")
    partial.replace(path)


def _fit(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser("jlora doctor fit", description="Fits the simulator's step-time model again.")
    made.add_argument("report", nargs="?", type=Path, help="device.json of `jlora doctor`")
    made.add_argument("--model", default="", metavar="DIR", help="profile an engine that serves this model instead")
    made.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the engine")
    made.add_argument("--quick", action="store_true", help="few scenes and rounds")
    made.add_argument(
        "--slo-ms", type=float, default=0.0, help="a step of an operating point (default: 1.5 x one alone)"
    )
    made.add_argument("--out", type=Path, help="where step-MODEL.json goes (default: beside the report; build/doctor)")
    args = made.parse_args(argv)
    if bool(args.model) == bool(args.report):
        made.error("give a report or --model, and not both")
    if not args.slo_ms >= 0:  # nan is not
        made.error(f"--slo-ms {args.slo_ms:g}: must be at least 0")
    return _fit_engine(args) if args.model else _fit_report(args)


def _fit_engine(args: argparse.Namespace) -> int:
    from jlora.doctor import engine_fit  # jax comes with it: not before the flags are known to be right

    try:
        settings = {key: value for key, _, value in (item.partition("=") for item in args.set)}
        built = engine_fit.started(args.model, settings)
        try:
            course = engine_fit.QUICK if args.quick else engine_fit.FULL
            found = engine_fit.run(built, course, lambda what: print(what, flush=True))
        finally:
            built.engine.close()
    except JloraError as e:
        print(f"jlora doctor fit: {e}", file=sys.stderr)
        return 1
    out = args.out or Path("build/doctor")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"step-{found.steps.spec.name}.json"
    points.added(found.steps, 1e-3 * args.slo_ms).write(path)
    for row in found.rows:
        print("{form} {set} {kind}: R2 {r2:.4f}, error {median:.1%}, p90 {p90:.1%}, {steps} steps".format(**row))
    print(path)
    return 0


def _fit_report(args: argparse.Namespace) -> int:
    try:
        report = json.loads(args.report.read_text())
        fits = {name: fit.of_report(report, name) for name in report.get("models", {})}
    except (OSError, ValueError, KeyError) as e:
        print(f"jlora doctor fit: {args.report}: is no report of `jlora doctor`: {e}", file=sys.stderr)
        return 1
    for name, made_of in fits.items():
        if made_of is not None:
            errors = made_of["errors"]
            path = fit.write(made_of, args.out or args.report.parent)
            print(
                f"{path}: {errors['steps']} steps of {name}, error {errors['median']:.1%}, worst {errors['worst']:.1%}"
            )
    return 0 if any(fits.values()) else 1
