"""`jlora cluster plan`: how many replicas of which chip a trace needs, by simulation.

jlora cluster plan --trace mine.csv --slo-ms 50 --on a10 a100 h100 --model llama-3-8b
jlora cluster plan --trace mine.csv --slo-ms 50 --steps fit-MODEL-tpN.json --attain 0.95
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jlora.errors import ConfigError
from jlora.serve.flags import Parser
from jlora.sim import cli, many, outcome
from jlora.sim.hardware import CHIPS
from jlora.sim.scenario import Scenario, Work, pool_blocks, settled
from jlora.sim.service import TABLE, simulate_service
from jlora.sim.workloads import flags, mixes

DESCRIPTION = """Says how many replicas a trace needs, by simulating it: the least number with which enough requests
meet the objective. It takes the flags of `jlora sim`; --slo-ms is the objective, per output token of a whole answer.

  jlora cluster plan --trace mine.csv --slo-ms 50 --on a10 a100"""
FIGURES = ("attained", "goodput/s", "TTFT ms", "p99", "TPOT ms")
COLUMNS: Mapping[str, tuple[str, str, float, int]] = {name: many.TABLE[name] for name in FIGURES}
GAIN = 0.01  # of attainment, and of the time per token, that twice as many replicas must bring
WAITS = 0.1  # of the time per token that answers may wait where more replicas bring nothing
# Part of a late answer's time per token -> its name, and what makes it shorter.
PARTS: Mapping[str, tuple[str, str]] = {
    "queue_s": ("in a queue", "another --route"),
    "copies_s": ("for the adapter or the KV to come", "a larger pool, a faster way (--fetch-gbps), or --place"),
    "prefill_s": ("in prefill", "a faster chip, or more of them for each replica (--chips)"),
    "decode_s": ("in decode", "a faster chip, or more of them for each replica (--chips)"),
}

Result = Mapping[str, Any]
Try = Callable[[int], float]  # replicas -> share of the requests that meet the objective
Stuck = Callable[[int, int], bool]  # fewer replicas, and more: whether these bring nothing


def main(argv: Sequence[str]) -> int:
    """Runs `jlora cluster plan`; returns the exit code: 1 if no number in question is enough."""
    made = Parser("jlora cluster plan", DESCRIPTION)
    cli.add_flags(made)
    made.set_defaults(replicas=None)
    made.add_argument("--on", nargs="+", default=[], choices=list(CHIPS), metavar="CHIP", help="chips to compare")
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
    if args.trace is None and args.workload is None:
        raise ConfigError("--trace: give a CSV of your requests, or draw some with --workload")
    if args.steps is None and not args.on and args.chip is None:
        raise ConfigError(f"--on: name the chips to compare, of {', '.join(CHIPS)}; or give --steps of your own device")
    if args.steps is not None and args.on:
        raise ConfigError(f"--on {' '.join(args.on)}: --steps are of one device; name it with --chip if need be")
    if args.replicas is not None:
        raise ConfigError(f"--replicas {args.replicas}: a plan finds the number; --most bounds it")
    if args.chip is not None and args.on:
        raise ConfigError(f"--chip {args.chip}: means nothing with --on {' '.join(args.on)}")
    if args.slo_ms == 0:
        raise ConfigError("--slo-ms: set the objective, in milliseconds per output token")
    if not args.slo_ms > 0:
        raise ConfigError(f"--slo-ms {args.slo_ms:g}: must be more than 0")
    if not 0 < args.attain <= 1:
        raise ConfigError(f"--attain {args.attain:g}: must be more than 0 and at most 1")
    if args.hint_s:
        raise ConfigError(f"--hint-s {args.hint_s:g}: must be 0: a plan's clients send no hints")
    if args.fail:
        raise ConfigError("--fail: a plan is of replicas that nothing happens to; jlora sim plays losses")
    flags.at_least(args, 1, "most")
    if args.route is not None and len(args.route) > 1 or args.policy is not None and len(args.policy) > 1:
        raise ConfigError("a plan takes one --route and one --policy")
    flags.writable(args.json)
    many.check(numbered(args, 1))


def plan(args: argparse.Namespace, chip: str | None) -> dict[str, Any]:
    """The least number of replicas of a chip (0: none is enough), and every number that was tried."""
    args = flags.drawing(argparse.Namespace(**{**vars(args), "chip": chip}), cli.DRAWN)
    scenario = cli.scenario_of(args)
    trace = cli.trace_of(args, scenario.hardware)
    ranks = mixes.ranks_of(args.ranks, trace, args.seed)
    work = Work.of(settled(trace, scenario.step_model), ranks, scenario.hardware)
    name = scenario.hardware.chip.name
    tried: dict[int, dict[str, Any]] = {}

    def attained(count: int) -> float:
        began = time.perf_counter()
        tried[count] = played(args, scenario, work, ranks, count)
        share = tried[count]["service"]["attainment"]
        took = time.perf_counter() - began
        print(f"{name}: {count} attain {share:.1%} (simulated in {took:.1f} s)", file=sys.stderr, flush=True)
        return share

    facts, step, chips = work.facts, scenario.step_model, scenario.hardware.chips
    pool_blocks(scenario, work)  # raises if a replica has no room
    said = (
        f"{scenario.hardware.spec.name} on {chips} x {name}, routed by {numbered(args, 1).route[0]}; "
        f"{trace.name}: {facts.requests} requests, {facts.rate:.2f}/s"
    )
    print("\n".join([said, *flags.remarks(trace)]), flush=True)
    wanted = f"{args.attain:.1%} within {args.slo_ms:g} ms per token"
    if (least_ms := 1e3 * (step.fixed_s + step.weights_s)) > args.slo_ms:
        print(f"No number is enough for {wanted}: a step takes {least_ms:.1f} ms. What helps: {PARTS['decode_s'][1]}\n")
        return {"chip": name, "replicas": 0, "tried": []}
    count = least(attained, args.attain, args.most, lambda fewer, more: stuck(tried[fewer], tried[more]))
    rows = [{**tried[n], "replicas": n} for n in sorted(tried)]
    print(outcome.table(rows, COLUMNS, ("replicas",)))
    print(f"{enough(count, chips, name)}: {wanted}\n" if count else f"{too_few(rows, wanted)}\n", flush=True)
    print(throttled(tried[count or max(tried)]["service"], facts.rate), end="")
    kept = [{"replicas": row["replicas"], **row["service"], **row["summary"]} for row in rows]
    return {"chip": name, "replicas": count, "tried": kept}


def played(
    args: argparse.Namespace, scenario: Scenario, work: Work, ranks: Sequence[int], count: int
) -> dict[str, Any]:
    """One simulation of so many replicas. Raises ConfigError."""
    args = numbered(args, count)
    service, route = many.played(args, ranks, args.route[0])
    return simulate_service(scenario, service, work, (args.policy or ["jlora"])[0], route)


def numbered(args: argparse.Namespace, count: int) -> argparse.Namespace:
    """The flags with a number of replicas and a route. One replica is a service too, so every flag of many holds."""
    route = args.route or [TABLE if args.place else "jlora"]
    return argparse.Namespace(**{**vars(args), "replicas": count, "route": route})


def least(attained: Try, share: float, most: int, stuck: Stuck = lambda fewer, more: False) -> int:
    """The least number of replicas that attains the share, if more never attain less; 0 if none does."""
    low, high = 0, 1  # `low` are too few
    while attained(high) < share:
        if high == most or (low and stuck(low, high)):
            return 0
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attained(middle) >= share else (middle, high)
    return high


def stuck(fewer: Result, more: Result) -> bool:
    """Whether more replicas bring nothing: answers take as long as before, and late ones hardly wait."""
    before, now = fewer["service"], more["service"]
    late = now["missed"]
    waits, whole = late["queue_s"] + late["copies_s"], sum(late[part] for part in PARTS)
    same = now["attainment"] < before["attainment"] + GAIN and now["per_token_s"] > (1 - GAIN) * before["per_token_s"]
    return same and not late["unfinished"] and waits <= WAITS * whole


def throttled(service: Result, rate: float) -> str:
    """A line where requests came far more slowly than the trace names them, else nothing."""
    sent = service["goodput"] / service["attainment"] if service["attainment"] else rate
    if sent > 0.8 * rate:
        return ""
    return (
        f"The trace names {rate:.2f} requests/s, and {sent:.2f}/s were sent: a turn of a session waits for the answer "
        "before it. For the trace's rate itself, leave the sessions out.\n\n"
    )


def enough(replicas: int, chips: int, name: str) -> str:
    """What to buy."""
    some = "1 replica" if replicas == 1 else f"{replicas} replicas"
    return f"{some} of {chips} x {name}" + (f" ({replicas * chips} chips)" if chips > 1 else "")


def too_few(tried: Sequence[Result], wanted: str) -> str:
    """What the most that were tried attain, where late answers spend their time, and what would help."""
    last = tried[-1]
    late, over = last["service"]["missed"], len(tried) > 1 and stuck(tried[-2], last)
    parts = sorted(PARTS, key=lambda part: -late[part])
    spent = ", ".join(f"{1e3 * late[part]:.1f} {PARTS[part][0]}" for part in parts if late[part] >= 5e-5)
    some = "1 replica is" if last["replicas"] == 1 else f"{last['replicas']} replicas are"
    said = f"{some} too few for {wanted}: {last['service']['attainment']:.1%} attained. "
    if late["unfinished"]:
        said += f"{late['unfinished']} of {late['answers']} late answers have not ended. "
    if spent:
        said += f"A late answer takes {1e3 * sum(late[part] for part in parts):.1f} ms per token: {spent}. "
    helps = (
        f"More replicas bring nothing; what helps: {PARTS[parts[0]][1]}" if over else "More replicas may help (--most)"
    )
    return f"{said}{helps}, or a larger --slo-ms"
