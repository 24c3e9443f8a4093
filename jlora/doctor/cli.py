"""`jlora doctor`: checks and measures this accelerator.

jlora doctor [check] [--quick]     every kernel, rates, whole steps, cache policies; writes JSON and a table
jlora doctor tune [--quick]        block sizes of the kernels for this chip, in some 8 minutes
jlora doctor fit DEVICE.json       the simulator's step-time model from a report of `check`
jlora doctor fit --model DIR       an engine's step times: profiles it on this machine
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jlora.doctor import fit, job, output, points
from jlora.errors import InvalidArgument, JloraError

KERNELS = ("decode", "prefill", "lora")  # that can be tuned


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, rest = (words[0], words[1:]) if words[:1] and words[0] in COMMANDS else ("check", words)
    try:
        return COMMANDS[name](rest)
    except JloraError as e:
        print(f"jlora doctor {name}: {e}", file=sys.stderr)
        return 1


def _tune(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser("jlora doctor tune", description="Measures block sizes of the kernels.")
    made.add_argument("--quick", action="store_true", help="one model, fewer shapes")
    made.add_argument("--minutes", type=float, default=8.0, help="begin nothing later")
    made.add_argument("--only", nargs="+", default=KERNELS, choices=KERNELS, help="these kernels alone")
    made.add_argument("--out", type=Path, default=Path("build/doctor"), help="where tiles.json goes")
    args = made.parse_args(argv)
    if not args.minutes > 0:  # nan is not
        made.error(f"--minutes {args.minutes:g}: must be more than 0")
    until = time.monotonic() + 60 * args.minutes
    output.ready(args.out)

    from jlora.doctor import tune  # jax comes with it: not before the flags are known to be right

    path = args.out / "tiles.json"

    def save(found: dict[str, Any]) -> None:
        times = {key: found[key] for key in ("chip", "times")}
        output.write(args.out / "tune.json", json.dumps(times, indent=1) + "\n")
        output.write(path, json.dumps(found["tiles"], indent=2) + "\n")

    found = tune.run(tune.Plan(args.quick, args.only, until), save)
    save(found)
    print(f"{path}: sizes for {found['chip']}")
    return 0


def _fit(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser("jlora doctor fit", description="Fits the simulator's step-time model again.")
    made.add_argument("report", nargs="?", type=Path, help="device.json of `jlora doctor`")
    made.add_argument("--model", default="", metavar="DIR", help="profile an engine that serves this model instead")
    made.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the engine")
    made.add_argument("--quick", action="store_true", help="few scenes and rounds")
    made.add_argument(
        "--slo-ms", type=float, default=0.0, help="a step of an operating point (default: 1.5 x one alone)"
    )
    made.add_argument(
        "--out",
        type=Path,
        help="where step-MODEL.json goes (default: beside the report), or fit-MODEL-tpN.json (build/doctor)",
    )
    args = made.parse_args(argv)
    if bool(args.model) == bool(args.report):
        made.error("give a report or --model, and not both")
    if not args.slo_ms >= 0:  # nan is not
        made.error(f"--slo-ms {args.slo_ms:g}: must be at least 0")
    return _fit_engine(args) if args.model else _fit_report(args)


def _fit_engine(args: argparse.Namespace) -> int:
    out = args.out or Path("build/doctor")
    output.ready(out)

    from jlora.doctor import engine_fit  # jax comes with it: not before the flags are known to be right

    settings = {key: value for key, _, value in (item.partition("=") for item in args.set)}
    engine_fit.check(settings)
    built = engine_fit.started(args.model, settings)
    try:
        course = engine_fit.QUICK if args.quick else engine_fit.FULL
        found = engine_fit.run(built, course, lambda what: print(what, flush=True))
    finally:
        built.engine.close()
    path = out / engine_fit.file_name(found.steps)
    with output.writing(path):
        points.added(found.steps, 1e-3 * args.slo_ms).write(path)
    for row in found.rows:
        r2 = "" if math.isnan(row["r2"]) else f"R2 {row['r2']:.4f}, "  # repeats have none
        print("{form} {set} {kind}: {said}error {median:.1%}, p90 {p90:.1%}, {steps} steps".format(**row, said=r2))
    print(f"contexts: up to {found.context} tokens of all sequences that decode; beyond, steps are extrapolated")
    print(path)
    return 0


def _fit_report(args: argparse.Namespace) -> int:
    try:
        report = json.loads(args.report.read_text())
        fits = {name: fit.of_report(report, name) for name in report.get("models", {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InvalidArgument(f"{args.report}: is no report of `jlora doctor`: {e}") from e
    made = {name: found for name, found in fits.items() if found is not None}
    if not made:
        raise InvalidArgument(f"{args.report}: has no steps of a model; `jlora doctor` measures them")
    out = args.out or args.report.parent
    output.ready(out)
    for name, found in made.items():
        errors = found["errors"]
        path = fit.write(found, out)
        print(f"{path}: {errors['steps']} steps of {name}, error {errors['median']:.1%}, worst {errors['worst']:.1%}")
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"check": job.main, "tune": _tune, "fit": _fit}
