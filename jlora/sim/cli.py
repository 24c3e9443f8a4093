"""`jlora sim`: simulates a workload under one or more policies on named hardware, and compares them. No jax.

jlora sim --workload W3 --rate 12 --policy jlora fastlibra lru vllm-fair:0.3 clairvoyant
jlora sim --workload W3 --hbm-share 0.25 --link-gbps 2 --json out.json
jlora sim --workload W8 --shrink 16 --users 20 --policy jlora lru
jlora sim --trace mine.csv --speed 2 --chip h200 --model llama-3-8b
jlora sim --replicas 8 --route round-robin caraserve jlora --kernel padded --slo-ms 45 --rate 60
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jlora import __version__
from jlora import config as configuration
from jlora.errors import ConfigError
from jlora.sim import losses, many, outcome
from jlora.sim.clairvoyant import Clairvoyant
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.link import LATENCY_S
from jlora.sim.replay import end_of, start_of
from jlora.sim.replica import Replica
from jlora.sim.scenario import POLICIES, Scenario, Work, cache_of, settled, simulate
from jlora.sim.service import TABLE, simulate_service
from jlora.sim.trace import Trace, sped_up
from jlora.sim.workloads import SOURCES, closed, flags, mixes, play
from jlora.step_model import FittedSteps, StepModel

DESCRIPTION = "Simulates one replica or many with the product's engine, cache and policies on hardware that you name."
CHIP = "npu"
CHOSEN = ("jlora", "fastlibra", "lru", "vllm", "vllm-fair", "slora")
# An engine of the paper's size; --set changes it.
ENGINE = {"engine.max_seqs": 128, "engine.max_step_tokens": 1024, "engine.max_queue": 1 << 20}

# The flags that shape a named workload, and their defaults.
DRAWN: Mapping[str, Any] = {
    "workload": "W1",
    "data": None,
    "rate": 2.0,
    "seconds": 300.0,
    "gap": None,
    "adapters": 100,
    "popularity": None,
    "arrivals": None,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `jlora sim`."""
    what = parser.add_argument_group("workload")
    flags.add(what, DRAWN)
    what.add_argument("--adapters", type=int, help="number of adapters (default: 100)")
    what.add_argument("--ranks", default="32,64", metavar="MIX", help="equal shares; hot:...: highest on most popular")
    what.add_argument("--hint-s", type=float, default=0.0, help="clients send Prefetch this many seconds before a turn")
    where = parser.add_argument_group("hardware")
    where.add_argument("--chip", choices=list(CHIPS), help=f"{CHIP} is FASTLIBRA's (default of jlora sim: {CHIP})")
    where.add_argument("--chips", type=int, default=1, choices=range(1, 5), help="tensor parallel (default: 1)")
    where.add_argument("--model", default="llama-2-7b", choices=list(MODELS), help="(default: llama-2-7b)")
    where.add_argument("--steps", type=Path, metavar="JSON", help="measured step times instead of the chip's peaks")
    where.add_argument("--hbm-gb", type=float, default=0.0, help="pool size (default: memory left by the weights)")
    where.add_argument("--hbm-share", type=float, default=0.0, help="pool size as a share of the working set")
    where.add_argument("--host-gb", type=float, default=240.0, help="size of the host tier (default: 240)")
    where.add_argument("--link-gbps", type=float, default=0.0, help="each way (default: the chip's)")
    where.add_argument("--latency-us", type=float, default=1e6 * LATENCY_S, help="of every copy (default: 20)")
    where.add_argument("--adapter-load-ms", type=float, default=0.0, help="additional time per adapter load")
    many.add_flags(parser.add_argument_group("many replicas"))
    how = parser.add_argument_group("run")
    how.add_argument(
        "--policy", nargs="+", metavar="NAME", help=f"{', '.join(POLICIES)}; vllm-fair:SHARE (many: jlora)"
    )
    how.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="cache.* or engine.*")
    how.add_argument("--json", type=Path, metavar="OUT", help="write all results, with a row per request")


def run(args: argparse.Namespace, commit: Callable[[], str]) -> int:
    """Runs the simulations and prints the results. `--json` also records the `commit`. Raises ConfigError."""
    args = flags.drawing(args, DRAWN)
    many.check_alone(args)
    args.policy = args.policy or (list(CHOSEN) if args.replicas == 1 else ["jlora"])
    args.route = args.route or [TABLE if args.place else "jlora"]
    args.chip = args.chip or (None if args.steps else CHIP)
    scenario = scenario_of(args)
    check(args, scenario)
    trace = trace_of(args, scenario.hardware)
    ranks = mixes.ranks_of(args.ranks, trace, args.seed)
    work = Work.of(settled(trace, scenario.step_model), ranks, scenario.hardware)
    losses.check(losses.parse(args.fail, args.replicas), end_of(trace))
    print("\n".join([work.facts.text(trace.name), f"  trace {trace.digest()}", *flags.remarks(trace)]), flush=True)
    results, took = [], []
    try:
        for policy, route in itertools.product(args.policy, args.route if args.replicas > 1 else [""]):
            began = time.perf_counter()
            if route:
                service, route = many.played(args, ranks, route)
                results.append(simulate_service(scenario, service, work, policy, route))
            else:
                results.append(_play(scenario, work, policy))
            took.append(f"{results[-1].get('route') or policy} {time.perf_counter() - began:.1f} s")
            if route:  # it may take minutes
                print(f"simulated {took[-1]}", file=sys.stderr, flush=True)
    finally:  # an interrupt ends the run, and leaves the rows of what was played
        if results:
            print(told(results, took))
    if args.json is not None:
        record = {"workload": trace.name, "digest": trace.digest(), "seed": args.seed, "flags": described(args)}
        record |= {"version": __version__, "commit": commit(), "facts": work.facts.describe(), "runs": results}
        args.json.write_text(json.dumps(record) + "\n")
    return 0


def told(results: Sequence[Mapping[str, Any]], took: Sequence[str]) -> str:
    """What was simulated, a row for each result, and how long they took."""
    setting = results[0]["setting"]
    alone = setting.get("replicas", 1) == 1
    table = outcome.table(results) if alone else outcome.table(results, many.TABLE, ("policy", "route"))
    return f"{heading(setting)}\n{table}\n\nsimulated in: {', '.join(took)}"


def heading(setting: Mapping[str, Any]) -> str:
    """What was simulated."""
    count = setting.get("replicas", 1)
    each = f"{count} replicas, each of " if count > 1 else ""
    return (
        f"{each}{setting['chips']} x {setting['chip']}, {setting['model']}: "
        f"pool {setting['device_blocks']} blocks, host {setting['host_blocks']}, of {setting['block_tokens']} tokens; "
        f"link {setting['link_gbps']:g} GB/s each way\n"
    )


def check(args: argparse.Namespace, scenario: Scenario) -> None:
    """Checks the flags before a trace is drawn. Raises ConfigError."""
    flags.check(args)
    many.check(args)
    flags.writable(args.json)
    for policy in args.policy:
        cache_of(policy, scenario.cache)
        if args.users and policy == Clairvoyant.name:
            raise ConfigError(
                f"--policy {policy}: needs the times of an open loop; with --users {args.users} they depend on the "
                "answers, so it is no bound"
            )


def described(args: argparse.Namespace) -> dict[str, Any]:
    """All flags except `--json`, as plain values; files by name."""
    told = {name: value for name, value in vars(args).items() if name != "json"}
    return {name: value.name if isinstance(value, Path) else value for name, value in told.items()}


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Hardware and settings of the flags. Raises ConfigError."""
    pairs = [item.partition("=") for item in args.set]
    for key, equals, _ in pairs:
        if not equals or key.partition(".")[0] not in ("cache", "engine"):
            raise ConfigError(f"--set {key}: must be cache.KEY=VALUE or engine.KEY=VALUE")
    config = configuration.load(None, {**ENGINE, **{key: value for key, _, value in pairs}})
    sizes = ("hbm_gb", "hbm_share", "host_gb", "link_gbps", "latency_us", "adapter_load_ms", "hint_s")
    flags.at_least(args, 0, *sizes)
    hardware, step = hardware_of(args)
    return Scenario(
        hardware,
        hbm_gb=args.hbm_gb,
        hbm_share=args.hbm_share,
        host_gb=args.host_gb,
        link_gbps=args.link_gbps,
        latency_s=1e-6 * args.latency_us,
        adapter_load_s=1e-3 * args.adapter_load_ms,
        hint_s=args.hint_s,
        cache=config.cache,
        engine=config.engine,
        step=step,
    )


def hardware_of(args: argparse.Namespace) -> tuple[Hardware, StepModel | FittedSteps | None]:
    """The hardware and its measured steps. A file of `jlora doctor fit` names model, device and pool itself.

    Raises ConfigError.
    """
    if args.steps is not None and FittedSteps.wrote(args.steps):
        steps = FittedSteps.read(args.steps)
        return Hardware.fitted(steps), steps
    model = MODELS[args.model]
    step = StepModel.fitted(args.steps, model.name, args.chips) if args.steps else None
    if args.chip is None:
        raise ConfigError(f"--steps {args.steps}: names no memory and no link: give --chip, of {', '.join(CHIPS)}")
    return Hardware(CHIPS[args.chip], args.chips, model), step


def trace_of(args: argparse.Namespace, hardware: Hardware) -> Trace:
    """The trace of the flags. Raises ConfigError."""
    spec = hardware.spec
    if args.trace is not None:
        trace = flags.own(args, spec.vocab, spec.max_len, spec.name)
    else:
        load = flags.load_of(args, args.adapters, spec.vocab, spec.max_len)
        trace = play(SOURCES[args.workload](args.data), load)
    trace = sped_up(trace, args.speed)
    return closed(trace, args.users) if args.users else trace


def _play(scenario: Scenario, work: Work, policy: str) -> dict[str, Any]:
    total = None if work.trace.users else int(work.trace.turns[-1].at)
    with tqdm(total=total, desc=policy, unit="s", leave=False, delay=1.0) as bar:
        start = start_of(work.trace)

        def progress(replica: Replica) -> None:
            if replica.clock.now - start >= bar.n + 1:
                bar.update(int(replica.clock.now - start) - bar.n)

        return simulate(scenario, work, policy, [progress])
