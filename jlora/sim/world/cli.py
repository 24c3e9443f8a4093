"""`jlora sim faults`: plays seeds of a whole service under faults. No jax.

jlora sim faults --seeds 0:2000
jlora sim faults --world cluster --seeds 0:500 --steps 400
jlora sim faults --replay 1234
"""

from __future__ import annotations

import argparse
import os
import re

from jlora.errors import ConfigError, FailedPrecondition
from jlora.sim.world import report

DESCRIPTION = "Plays the service under faults that a seed draws, in virtual time, and checks every invariant."
STEPS = 200


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `jlora sim faults`."""
    parser.add_argument("--world", default="engine", choices=list(report.WORLDS), help="world to simulate")
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="from A to B - 1 (default: 0:100)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each seed (default: {STEPS})")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one seed and print what happens")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="(default: one for each core)")


def run(args: argparse.Namespace) -> int:
    """Plays the seeds; 1 if one of them found something. Raises ConfigError, FailedPrecondition."""
    if args.steps < 1 or args.processes < 1:
        raise ConfigError("--steps and --processes: must be at least 1")
    try:
        sites = report.sites_of(args.world)
    except ModuleNotFoundError as e:
        raise FailedPrecondition(f"needs {e.name}: run `pip install 'jlora[faults]'`") from e
    if args.replay is not None:
        return _replay(args)
    match = re.fullmatch(r"(\d+):(\d+)", args.seeds)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--seeds {args.seeds}: must be A:B, the first seed and the one behind the last")
    seeds = range(int(match[1]), int(match[2]))
    played = []
    for one in report.run(args.world, seeds, args.steps, args.processes):
        played.append(one)
        if one.failure:
            how = f"jlora sim faults --world {args.world} --steps {args.steps} --replay {one.seed}"
            print(f"seed {one.seed}: {one.failure}\n  {how}", flush=True)
    for name, count in report.total(played, sites).items():
        print(f"{count:>9}  {name:<18} {sites[name].what}")
    failed = sum(bool(one.failure) for one in played)
    print(f"{len(played)} seeds of {args.steps} steps, {failed} failed")
    return 1 if failed else 0


def _replay(args: argparse.Namespace) -> int:
    played, journal = report.play(args.world, args.replay, args.steps, keep=True)
    print("\n".join(journal.lines))
    print(f"seed {played.seed}: {played.failure or 'every invariant held'}; journal {played.digest}")
    return 1 if played.failure else 0
