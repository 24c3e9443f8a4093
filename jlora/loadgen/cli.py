"""`jlora bench serve`: plays a workload to gRPC servers, several configurations in turn.

    jlora bench serve --target 127.0.0.1:50051 --workload W3 --rate 5 --shrink 4
    jlora bench serve --config ours=cache.policy=jlora --config lru=cache.policy=lru --shrink 2
    jlora bench serve --target old=host:50051 new=host:50052 --trace mine.csv --users 8

A `--target` runs already; a `--config` is started here, from a TOML file or from `section.key=value`
pairs with commas between them (`NAME=` alone: the defaults). Without `--model` the servers that are
started get a random model and random adapters, written into --work. All sides play the same trace,
A B A B, each time from an empty prefix cache and the trace's own history (--keep-cache leaves the
cache as it is). Prints a report, and writes it as JSON and HTML with a figure into --out.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tqdm import tqdm

from jlora import machine
from jlora.errors import ConfigError, JloraError
from jlora.loadgen import report, rounds, trace
from jlora.loadgen.checkpoints import LLAMA_100M, SMALL, TINY, write_adapter, write_model
from jlora.loadgen.player import Pace, Player, differing
from jlora.loadgen.rounds import Budget, Journal, Sample, Side
from jlora.loadgen.sample import Slo, cache, known, sample
from jlora.loadgen.server import GrpcTarget, Server, ServerProcess, flags_of, look
from jlora.loadgen.trace import Limits
from jlora.serve.flags import Parser
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc
from jlora.sim.trace import Facts, Trace, facts
from jlora.sim.workloads import mixes

RANDOM = {"random-tiny": TINY, "random-small": SMALL, "random-100m": LLAMA_100M}


def main(argv: Sequence[str]) -> int:
    """Runs it; returns the exit code."""
    args = parser().parse(list(argv))
    try:
        with ExitStack() as stack:
            sides = [*_targets(args.target), *_started(args, stack)]
            if not sides:
                raise ConfigError("nothing to measure: give --target HOST:PORT or --config NAME=...")
            result = _Bench(args, sides).run()
    except (JloraError, RuntimeError) as e:
        print(f"jlora bench serve: {e}", file=sys.stderr)
        return 1
    except grpc.aio.AioRpcError as e:  # between two requests of the trace
        print(f"jlora bench serve: the server failed: {e.code().name}: {e.details()}", file=sys.stderr)
        return 1
    print(report.write(args.out, result))
    return 0


def parser() -> Parser:
    """The flags of `jlora bench serve`."""
    made = Parser("jlora bench serve", __doc__ or "")
    made.add_argument(
        "--target", nargs="+", action="extend", default=[], metavar="[NAME=]HOST:PORT", help="running servers"
    )
    made.add_argument("--config", action="append", default=[], metavar="NAME=FILE|SETS", help="a server to start here")
    made.add_argument(
        "--model", default="random-small", metavar="DIR", help=f"for --config: a directory or {', '.join(RANDOM)}"
    )
    made.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="SECTION.KEY=VALUE", help="for every --config"
    )
    made.add_argument(
        "--adapters",
        nargs="+",
        metavar="NAME",
        help="which of the server's (default: all but activated LoRAs)",
    )
    made.add_argument("--random-adapters", type=int, default=8, metavar="N", help="of a random model (default 8)")
    made.add_argument("--ranks", default="4,8", metavar="MIX", help="of random adapters: 4,8 or hot:4,8 (default 4,8)")
    trace.add_flags(made)
    made.add_argument("--warmup", type=float, default=0.0, metavar="S", help="do not count what is due before")
    made.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (default 600)")
    made.add_argument("--keep-cache", action="store_true", help="do not flush the prefix cache before each run")
    made.add_argument("--slo-ttft", type=float, default=0.5, metavar="S", help="goodput: first token (default 0.5)")
    made.add_argument("--slo-tpot", type=float, default=0.1, metavar="S", help="goodput: mean later gap (default 0.1)")
    made.add_argument("--rounds", type=int, default=0, help="of all sides in turn (default 5; one side alone: 1)")
    made.add_argument("--minutes", type=float, default=60.0, help="start no round that would end later than this")
    made.add_argument("--out", type=Path, default=Path("build/bench/serve"), help="where results go")
    made.add_argument("--work", type=Path, default=Path("build/bench"), help="random weights and unfinished runs")
    return made


@dataclass(frozen=True, slots=True)
class Target:
    """One side: a server, and its settings if it was started here."""

    name: str
    address: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _targets(texts: Sequence[str]) -> list[Target]:
    """Running servers."""
    found = []
    for text in texts:
        name, equals, address = text.rpartition("=")
        if ":" not in address:
            raise ConfigError(f"--target {text}: must be HOST:PORT or NAME=HOST:PORT")
        found.append(Target(name if equals else address, address))
    return found


def _started(args: argparse.Namespace, stack: ExitStack) -> list[Target]:
    """Servers of our own; `stack` ends them."""
    wanted = {}
    for text in args.config:
        name, equals, rest = text.partition("=")
        if not name or not equals or name in wanted:
            raise ConfigError(f"--config {text}: must be NAME=FILE or NAME=section.key=value,..., each name once")
        wanted[name] = rest
    if not wanted:
        return []
    base = _weights(args)
    common = _pairs(args.set)
    targets = []
    for name, rest in wanted.items():
        is_file = rest.endswith(".toml")
        settings = common if is_file else {**common, **_pairs([item for item in rest.split(",") if item])}
        print(f"starting {name}", flush=True)
        server = ServerProcess([*base, *(["--config", rest] if is_file else []), *flags_of({}, settings)])
        stack.callback(server.stop)
        targets.append(Target(name, server.address, {"file": Path(rest).name} if is_file else settings))
    return targets


def _weights(args: argparse.Namespace) -> list[str]:
    """`--model` and `--adapter` flags; writes what is random, unless it is there."""
    if args.model not in RANDOM:
        return ["--model", args.model]
    spec, directory = RANDOM[args.model], args.work / args.model
    if not (directory / "model.safetensors").exists():
        write_model(directory, spec, seed=0)
    names = tuple(f"a{i}" for i in range(args.random_adapters))
    ranks = mixes.ranks_of(args.ranks, Trace("", (), names), args.seed)
    paths = {}
    for i, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        paths[name] = str(directory / "adapters" / f"{name}-{rank}")
        if not (Path(paths[name]) / "adapter_model.safetensors").exists():
            write_adapter(Path(paths[name]), spec, rank, seed=1000 + i)
    return ["--model", str(directory), "--served-model-name", args.model, *flags_of(paths, {})]


def _pairs(items: Sequence[str]) -> dict[str, str]:
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"setting {item!r}: must be section.key=value")
        found[key] = value
    return found


class _Bench:
    """All sides on one trace."""

    def __init__(self, args: argparse.Namespace, targets: Sequence[Target]):
        self._args = args
        self._targets = targets
        self._servers = {target.name: asyncio.run(look(target.address)) for target in targets}
        if len(self._servers) < len(targets):
            raise ConfigError("two sides have one name")
        limits = limits_of(list(self._servers.values()), args.adapters)
        self._trace = trace.draw(args, limits)
        self._models = trace.models(self._trace, limits)
        self._slo = Slo(args.slo_ttft, args.slo_tpot)
        self._pace = Pace(args.speed, args.timeout)
        self._answers: dict[str, int] = {}  # of the first run: all others should give the same

    def run(self) -> dict[str, Any]:
        """The rounds; what goes into the results file."""
        args, settings = self._args, self._describe()
        print(self._facts().text(self._trace.name), flush=True)
        unfinished = args.work / f"serve-{self._trace.digest()}.jsonl"
        journal = Journal(unfinished, settings)
        budget = Budget(args.rounds or (5 if len(self._targets) > 1 else 1), args.minutes)
        sides = [Side(target.name, lambda t=target: self._measure(t)) for target in self._targets]
        done = rounds.interleave(sides, journal, budget, "rounds")
        unfinished.unlink()  # the same command again measures again
        return {
            "benchmark": "serve",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": machine.command("jlora bench"),
            "settings": settings,
            "machine": machine.describe(),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "facts": self._facts().describe(),
            "rounds": done,
            "summary": {target.name: summarise(done, target.name, self._targets[0].name) for target in self._targets},
        }

    def _measure(self, target: Target) -> Sample:
        found = asyncio.run(self._play(target))
        answers = found.pop("answers")
        found["different"] = differing(answers, self._answers)
        self._answers = {**answers, **self._answers}
        return found

    async def _play(self, target: Target) -> dict[str, Any]:
        """One pass of the trace."""
        total = sum(turn.at >= 0 for turn in self._trace.turns)
        async with grpc.aio.insecure_channel(target.address) as channel:
            control = rpc.ControlStub(channel)
            if not self._args.keep_cache:
                await control.FlushCache(pb.FlushCacheRequest())
            before = await control.GetCacheState(pb.GetCacheStateRequest())
            with tqdm(total=total, desc=target.name, unit="req", leave=False) as bar:
                player = Player(GrpcTarget(channel), self._trace, self._models, self._pace, bar.update)
                await player.history()
                calls = await player.play()
            after = await control.GetCacheState(pb.GetCacheStateRequest())
        return {**sample(calls, self._slo, self._args.warmup), "cache": cache(before, after)}

    def _facts(self) -> Facts:
        server = self._servers[self._targets[0].name]
        sizes = [server.adapters[name] for name in self._models]
        return facts(self._trace, server.info.block_tokens, sizes)

    def _describe(self) -> dict[str, Any]:
        """Settings that make two runs comparable."""
        args = self._args
        return {
            "trace": trace.describe(args, self._trace),
            "sides": {
                target.name: {"set": dict(target.settings), **self._servers[target.name].describe()}
                for target in self._targets
            },
            "adapters": self._models,
            "slo": asdict(self._slo),
            "pace": asdict(self._pace),
            "warmup_s": args.warmup,
            "kept_cache": args.keep_cache,
        }


def limits_of(servers: Sequence[Server], wanted: Sequence[str] | None) -> Limits:
    """The limits that all servers share.

    Raises:
        ConfigError: a wanted adapter is not on every server, or is an activated LoRA.
    """
    activated = frozenset[str]().union(*(server.activated for server in servers))
    everywhere = [name for name in servers[0].adapters if all(name in server.adapters for server in servers)]
    common = [name for name in everywhere if name not in activated]
    for name in wanted or ():
        if name in activated:
            raise ConfigError(f"--adapters {name}: is an activated LoRA, which the trace's prompts do not invoke")
        if name not in common:
            raise ConfigError(f"--adapters {name}: is not on every server; they have {', '.join(common) or 'none'}")
    return Limits(
        max_len=min(server.info.max_model_len for server in servers),
        vocab=min(server.info.vocab for server in servers),
        adapters=list(wanted or common),
    )


def summarise(done: Sequence[Mapping[str, Sample]], side: str, base: str) -> dict[str, Any]:
    """Medians over the rounds, ratios to the first side inside a round, and the side against itself.

    A round without an answer has no times, and is left out of theirs; NaN if there is no other.
    """
    plain = ("requests_per_s", "tokens_per_s", "goodput_per_s", "attained", "ttft_s", "tpot_s")
    ratios = {
        key: asdict(rounds.spread(known([_over(r[side][key], r[base][key]) for r in done])))
        for key in ("ttft_s", "tpot_s", "goodput_per_s")
    }
    return {
        **{key: statistics.median(known([r[side][key] for r in done])) for key in plain},
        "ratio": ratios,
        "control": rounds.control([r[side]["ttft_s"] for r in done]),
    }


def _over(value: float, base: float) -> float:
    return value / base if base else math.nan
