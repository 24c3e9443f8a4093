"""`jlora cluster plan`: how many replicas of which chip a trace needs, by simulation.

jlora cluster plan --trace mine.csv --slo-ms 50
jlora cluster plan --trace mine.csv --slo-ms 50 --on a10 a100 h100 --model llama-3-8b --attain 0.95
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jlora.errors import ConfigError
from jlora.serve.flags import Parser
from jlora.sim import cli, many, outcome
from jlora.sim.hardware import CHIPS
from jlora.sim.scenario import Work, settled
from jlora.sim.service import TABLE, simulate_service
from jlora.sim.workloads import flags, mixes

DESCRIPTION = """Says how many replicas a trace needs, by simulating it: the least number with which enough requests
meet the objective. It takes the flags of `jlora sim`; --slo-ms is the objective, per output token of a whole answer.

  jlora cluster plan --trace mine.csv --slo-ms 50 --on a10 a100"""
FIGURES = ("attained", "goodput/s", "TTFT ms", "p99", "TPOT ms")
COLUMNS: Mapping[str, tuple[str, str, float, int]] = {name: many.TABLE[name] for name in FIGURES}

Try = Callable[[int], float]  # replicas -> share of the requests that meet the objective


def main(argv: Sequence[str]) -> int:
    """Runs `jlora cluster plan`; returns the exit code: 1 if no number in question is enough."""
    made = Parser("jlora cluster plan", DESCRIPTION)
    cli.add_flags(made)
    made.set_defaults(replicas=None)
    made.add_argument("--on", nargs="+", default=[], choices=list(CHIPS), help="chips to compare (default: --chip)")
    made.add_argument("--attain", type=float, default=0.99, help="share that must meet the objective (default: 0.99)")
    made.add_argument("--most", type=int, default=64, help="replicas at most (default: 64)")
    args = made.parse(argv)
    try:
        check(args)
        found = [plan(args, chip) for chip in args.on or [args.chip]]
    except ConfigError as e:
        made.error(str(e))
    if args.json is not None:
        args.json.write_text(json.dumps({"attain": args.attain, "slo_ms": args.slo_ms, "plans": found}) + "\n")
    return 0 if all(each["replicas"] for each in found) else 1


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    flags.check(args)
    if args.replicas is not None:
        raise ConfigError(f"--replicas {args.replicas}: a plan finds the number; --most bounds it")
    if not args.slo_ms > 0:
        raise ConfigError(f"--slo-ms {args.slo_ms:g}: must be more than 0: a plan needs an objective")
    if not 0 < args.attain <= 1:
        raise ConfigError(f"--attain {args.attain:g}: must be more than 0 and at most 1")
    if args.fail:
        raise ConfigError("--fail: a plan is of replicas that nothing happens to; jlora sim plays losses")
    if args.most < 1:
        raise ConfigError(f"--most {args.most}: must be at least 1")
    if args.route is not None and len(args.route) > 1 or args.policy is not None and len(args.policy) > 1:
        raise ConfigError("a plan takes one --route and one --policy")


def plan(args: argparse.Namespace, chip: str) -> dict[str, Any]:
    """The least number of replicas of a chip (0: even `--most` are too few), and every number that was tried."""
    args = flags.drawing(argparse.Namespace(**{**vars(args), "chip": chip}), cli.DRAWN)
    scenario = cli.scenario_of(args)
    trace = cli.trace_of(args, scenario.hardware)
    ranks = mixes.ranks_of(args.ranks, trace, args.seed)
    work = Work.of(settled(trace, scenario.step_model), ranks, scenario.hardware)
    route = (args.route or [TABLE if args.place else "jlora"])[0]
    tried: dict[int, dict[str, Any]] = {}

    policy = (args.policy or ["jlora"])[0]

    def attained(count: int) -> float:
        args.replicas, args.route = count, [route]
        many.check(args)
        tried[count] = simulate_service(scenario, many.service_of(args, ranks), work, policy, route)
        return tried[count]["service"]["attainment"]

    count = least(attained, args.attain, args.most)
    rows = [{**tried[n], "replicas": n} for n in sorted(tried)]
    facts = work.facts
    print(f"{chip}, {scenario.hardware.spec.name}, {trace.name}: {facts.requests} requests, {facts.rate:.2f}/s")
    print(outcome.table(rows, COLUMNS, ("replicas",)))
    enough = f"{args.attain:.1%} within {args.slo_ms:g} ms per token"
    print(f"{count} x {chip}: {enough}\n" if count else f"{args.most} x {chip} are too few for {enough}\n", flush=True)
    kept = [{"replicas": row["replicas"], **row["service"], **row["summary"]} for row in rows]
    return {"chip": chip, "replicas": count, "tried": kept}


def least(attained: Try, share: float, most: int) -> int:
    """The least number of replicas that attains the share, if more never attain less; 0 if `most` do not."""
    low, high = 0, 1  # `low` are too few
    while attained(high) < share:
        if high == most:
            return 0
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attained(middle) >= share else (middle, high)
    return high
