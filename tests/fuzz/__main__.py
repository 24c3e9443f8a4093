"""Runs fuzzers: `python -m tests.fuzz config weights --inputs 1000000 --seed 1 --out fuzz.jsonl`.

Each target prints one line of JSON, and adds it to the file of `--out`. What found something is written to `--found`;
`--keep` adds the inputs that reached new lines to the corpus.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import logging
import platform
import resource
import sys
import time
from pathlib import Path

from tests.fuzz import _corpus
from tests.fuzz._engine import Report, fuzz, name_of
from tests.fuzz._targets import TARGETS

MEMORY = 4 << 30  # bytes of this process
UNMAPPED = ("UNKNOWN", "INTERNAL")
LIBRARIES = ("protobuf", "msgspec", "jinja2", "google-re2", "tokenizers", "starlette")


def main() -> int:
    args = parsed()
    names = list(TARGETS) if "all" in args.targets else args.targets
    codes = []
    for name in names:
        until = time.monotonic() + args.seconds
        codes.append(ended(fuzz(TARGETS[name](), args.inputs, args.seed, _corpus.load(name), until), args))
    return max(codes)


def parsed() -> argparse.Namespace:
    """The command line. Also bounds this process's memory."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", choices=[*TARGETS, "all"])
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target, beside its corpus")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each target, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add to")
    parser.add_argument("--found", type=Path, default=Path("build/fuzz"), help="where inputs go that found something")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new lines to the corpus")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    logging.disable()  # a line for each refusal costs more than the refusal
    return parser.parse_args()


def ended(report: Report, args: argparse.Namespace) -> int:
    """Prints and keeps what a run has found; 1 if that is a fault."""
    for data in (*report.crashes.values(), *report.hangs, report.slowest):
        args.found.mkdir(parents=True, exist_ok=True)
        (args.found / f"{report.target}-{name_of(data)}").write_bytes(data)
    if args.keep:
        _corpus.keep(report.target, report.new)
    line = json.dumps(record(report))
    print(line, flush=True)
    if args.out:
        with args.out.open("a") as out:
            out.write(line + "\n")
    return int(bool(report.crashes or report.hangs or any(report.statuses[s] for s in UNMAPPED)))


def record(report: Report) -> dict[str, object]:
    """The report as JSON."""
    return {
        "target": report.target,
        "engine": report.engine,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": report.seed,
        "inputs": report.inputs,
        "seconds": round(report.seconds, 1),
        "crashes": len(report.crashes),
        "hangs": len(report.hangs),
        "unmapped": sum(report.statuses[s] for s in UNMAPPED),
        "statuses": dict(report.statuses.most_common()),
        "slowest_s": round(report.slowest_s, 4),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "lines": report.lines,
        "python": platform.python_version(),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "found": {where: f"{report.target}-{name_of(data)}" for where, data in report.crashes.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
