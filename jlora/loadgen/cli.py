"""`jlora bench serve`: plays a workload to gRPC servers, in turn.

    jlora bench serve --target 127.0.0.1:50051 --workload W3 --rate 5 --shrink 4
    jlora bench serve --config ours=cache.policy=jlora --config lru=cache.policy=lru --shrink 2
    jlora bench serve --target old=host:50051 new=host:50052 --trace mine.csv --users 8

A --target runs already. A --config is started here, from a TOML file or from settings with commas
between them (NAME= alone: the defaults). Without --model it serves a random model with random
adapters, written into --work. All servers play the same trace, A B A B, each time from an empty
prefix cache and the trace's own history (--keep-cache leaves the cache as it is). Prints tables, and
writes JSON and a figure into --out, named by trace and settings. The same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from tqdm import tqdm

from jlora import machine
from jlora.config import listed
from jlora.errors import ConfigError, JloraError
from jlora.loadgen import report, sides, trace
from jlora.loadgen.player import Pace, Player, differing
from jlora.loadgen.rounds import Budget, Round, Sample, Side, Unfinished, measure
from jlora.loadgen.sample import Slo, cache, known, sample
from jlora.loadgen.server import GrpcTarget, Server
from jlora.loadgen.trace import Limits
from jlora.serve.flags import Parser
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.sim.trace import Trace, facts
from jlora.sim.workloads import flags

CONTROL_S = 60.0  # a call between two runs


def main(argv: Sequence[str]) -> int:
    """Runs it; returns the exit code."""
    args = parser().parse(list(argv))
    try:
        check(args)
        with sides.servers(args) as servers:
            print(run(args, servers), flush=True)
    except (JloraError, RuntimeError) as e:
        print(f"jlora bench serve: {e}", file=sys.stderr)
        return 1
    except grpc.aio.AioRpcError as e:  # before a run
        print(f"jlora bench serve: the server failed: {e.code().name}: {e.details()}", file=sys.stderr)
        print("The same command continues after the finished rounds.", file=sys.stderr)
        return 1
    return 0


def parser() -> Parser:
    """The flags of `jlora bench serve`."""
    made = Parser("jlora bench serve", __doc__ or "")
    sides.add_flags(made)
    made.add_argument(
        "--adapters", nargs="+", metavar="NAME", help="which of the server's (default: all but activated LoRAs)"
    )
    flags.add(made, trace.DRAWN)
    made.add_argument("--warmup", type=float, default=0.0, metavar="S", help="do not count what is due before")
    made.add_argument("--timeout", type=float, default=600.0, metavar="S", help="time limit of a request (default 600)")
    made.add_argument("--keep-cache", action="store_true", help="do not flush the prefix cache before each run")
    made.add_argument("--slo-ttft", type=float, default=0.5, metavar="S", help="goodput: first token (default 0.5)")
    made.add_argument("--slo-tpot", type=float, default=0.1, metavar="S", help="goodput: mean later gap (default 0.1)")
    made.add_argument("--rounds", type=int, default=0, help="of all servers in turn (default 5; one server alone: 1)")
    made.add_argument("--minutes", type=float, default=60.0, help="start no round that would end later than this")
    made.add_argument("--out", type=Path, default=Path("build/bench/serve"), help="where results go")
    return made


def check(args: argparse.Namespace) -> None:
    """Checks the flags before a server is started. Raises ConfigError."""
    flags.check(flags.drawing(args, trace.DRAWN))
    flags.at_least(args, 0, "warmup", "rounds", "minutes", "random_adapters")
    flags.above_0(args, "timeout", "slo_ttft", "slo_tpot")
    for name in ("out", "work"):
        report.prepare(f"--{name}", getattr(args, name))


def run(args: argparse.Namespace, servers: Mapping[str, Server]) -> str:
    """Plays the trace to all servers in turn and writes the results; returns the report as text."""
    limits = limits_of(list(servers.values()), args.adapters)
    drawn = trace.draw(args, limits)
    models = trace.models(drawn, limits)
    first = next(iter(servers.values()))
    known_facts = facts(drawn, first.info.block_tokens, [first.adapters[name] for name in models])
    print("\n".join([known_facts.text(drawn.name), *flags.remarks(drawn)]), flush=True)
    last = drawn.turns[-1].at
    if args.warmup > last and not drawn.users:  # in a closed loop nobody knows when the last one is due
        raise ConfigError(f"--warmup {args.warmup:g}: must be at most {last:g}, when the last request is due")
    settings = {
        "trace": trace.describe(args, drawn),
        "sides": {name: server.describe() for name, server in servers.items()},
        "adapters": models,
        "slo": asdict(Slo(args.slo_ttft, args.slo_tpot)),
        "pace": {"speed": args.speed, **asdict(Pace(args.timeout))},
        "warmup_s": args.warmup,
        "kept_cache": args.keep_cache,
    }
    journal = Unfinished(args.work / f"{report.name_of(settings)}.jsonl", settings)
    turns = [
        Side(name, lambda s=server: asyncio.run(_play(args, s, drawn, models))) for name, server in servers.items()
    ]
    measure(journal, "rounds", turns, Budget(args.rounds or (5 if len(servers) > 1 else 1), args.minutes))
    rounds = compared(journal.rounds)
    result = {
        "benchmark": "serve",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": machine.command("jlora bench"),
        "settings": settings,
        "machine": machine.describe(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "facts": known_facts.describe(),
        "rounds": rounds,
        "summary": {name: summarise(rounds, name, next(iter(servers))) for name in servers},
    }
    text = report.write(args.out, result)
    journal.done()
    return text


def compared(rounds: Sequence[Round]) -> list[Round]:
    """The rounds with the number of answers that differ from the first run's, in place of the answers."""
    reference: dict[str, int] = {}
    made: list[Round] = []
    for finished in rounds:
        made.append({})
        for side, run in finished.items():
            plain = {key: value for key, value in run.items() if key != "answers"}
            made[-1][side] = {**plain, "different": differing(run["answers"], reference)}
            reference = {**run["answers"], **reference}
    return made


async def _play(args: argparse.Namespace, server: Server, drawn: Trace, models: Sequence[str]) -> Sample:
    total = sum(turn.at >= 0 for turn in drawn.turns)
    call = {"metadata": server.login.metadata, "timeout": CONTROL_S}
    async with server.login.aio(server.address) as channel:
        control = rpc.ControlStub(channel)
        if not args.keep_cache:
            await control.FlushCache(pb.FlushCacheRequest(), **call)
        before = await control.GetCacheState(pb.GetCacheStateRequest(), **call)
        with tqdm(total=total, desc=server.address, unit="req", leave=False) as bar:
            target, pace = GrpcTarget(channel, server.login), Pace(args.timeout)
            player = Player(target, drawn, models, pace, bar.update)
            await player.history()
            calls = await player.play()
        try:
            told = cache(before, await control.GetCacheState(pb.GetCacheStateRequest(), **call))
        except grpc.aio.AioRpcError:  # it has died, or hangs; what it has answered counts
            told = dict.fromkeys(cache(before, before), math.nan)
    return {**sample(calls, Slo(args.slo_ttft, args.slo_tpot), args.warmup), "cache": told}


def limits_of(servers: Sequence[Server], wanted: Sequence[str] | None) -> Limits:
    """The limits that all servers share. Raises ConfigError if a wanted adapter is not on all, or is activated."""
    activated = frozenset[str]().union(*(server.activated for server in servers))
    everywhere = [name for name in servers[0].adapters if all(name in server.adapters for server in servers)]
    common = [name for name in everywhere if name not in activated]
    for name in wanted or ():
        if name in activated:
            raise ConfigError(f"--adapters {name}: is an activated LoRA, which the trace's prompts do not invoke")
        if name not in common:
            raise ConfigError(f"--adapters {name}: is not on every server; they have {listed(common)}")
    return Limits(
        max_len=min(server.info.max_model_len for server in servers),
        vocab=min(server.info.vocab for server in servers),
        adapters=list(wanted or common),
    )


def summarise(rounds: Sequence[Mapping[str, Sample]], side: str, base: str) -> dict[str, Any]:
    """Medians over the rounds, ratios to `base` inside a round, and the side over itself a round later.

    A round without an answer has no times and is left out of theirs. Without any, a value is NaN.
    """

    def ratio(key: str) -> dict[str, float]:
        pairs = [(r[side][key], r[base][key]) for r in rounds]
        values = known([value / over for value, over in pairs if over])
        return {"median": statistics.median(values), "low": min(values), "high": max(values)}

    plain = ("requests_per_s", "tokens_per_s", "goodput_per_s", "attained", "ttft_s", "tpot_s")
    later = [after[side]["ttft_s"] / before[side]["ttft_s"] for before, after in pairwise(rounds)]
    return {
        **{key: statistics.median(known([r[side][key] for r in rounds])) for key in plain},
        "ratio": {key: ratio(key) for key in ("ttft_s", "tpot_s", "goodput_per_s")},
        "control": statistics.median(known(later)),
    }
