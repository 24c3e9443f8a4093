"""`jlora doctor`: checks and measures this accelerator.

jlora doctor [check] [--quick]     every kernel, rates, whole steps, cache policies; writes JSON and a table
jlora doctor tune [--quick]        block sizes of the kernels for this chip
jlora doctor fit DEVICE.json       the simulator's step-time model from a report of `check`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jlora.doctor import fit, job
from jlora.errors import JloraError


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
    made.add_argument("--out", type=Path, default=Path("build/doctor"), help="where tiles.json goes")
    args = made.parse_args(argv)

    from jlora.doctor import tune  # jax comes with it: not before the flags are known to be right

    try:
        found = tune.run(args.quick)
    except JloraError as e:
        print(f"jlora doctor tune: {e}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tune.json").write_text(json.dumps({key: found[key] for key in ("chip", "times")}, indent=1) + "\n")
    path = args.out / "tiles.json"
    path.write_text(json.dumps(found["tiles"], indent=2) + "\n")
    print(path)
    return 0


def _fit(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser("jlora doctor fit", description="Fits the simulator's step-time model again.")
    made.add_argument("report", type=Path, help="device.json of `jlora doctor`")
    made.add_argument("--out", type=Path, help="where step-MODEL.json goes (default: beside the report)")
    args = made.parse_args(argv)
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
