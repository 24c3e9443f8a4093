"""`jlora bench [NAME]`: measures this machine, writes raw JSON and a page of tables.

    jlora bench peers --peer-python ~/torch/bin/python     R1 and R1b against transformers + PEFT
    jlora bench peers --llama-server PATH --llama-convert SCRIPT   the same and R2 against llama.cpp
    jlora bench throughput | latency | host | llama        one of them
    jlora bench lora                                       adapters by active blocks against dense over all slots
    jlora bench load                                       a model's weights from safetensors and from Orbax
    jlora bench cache                                      R7: cost growth of tree, decisions and scheduler
    jlora bench policies --data DIR                        R3 on this engine: every cache policy, two workloads
    jlora bench serve --target HOST:PORT                   a workload against running servers (serve --help)
    jlora bench workloads                                  what the workloads are like (workloads --help)
    jlora bench paper --figure 11 12 --minutes 60          FASTLIBRA's figures, simulated
    jlora bench beyond                                     the same simulator past the paper: slow links, drift, hints
    jlora bench alora                                      R6: pipelines with activated LoRAs against plain LoRAs,
                                                           on this engine and, at the paper's sizes, simulated
    jlora bench pipelines                                  its simulated part alone
    jlora bench tune                                       block sizes of the kernels on this chip
    jlora bench                                            throughput, latency, host, cache

The peer's interpreter has torch, transformers and peft and needs no jlora; without it jlora is
measured alone. Finished rounds are kept in --work: an interrupted run goes on where it stopped.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import (
    against_llama,
    alora,
    alora_page,
    beyond,
    beyond_page,
    cache,
    growth,
    host,
    latency,
    llama,
    load,
    lora,
    paper,
    paper_page,
    pipelines,
    pipelines_page,
    policies,
    policy_page,
    report,
    throughput,
)
from benchmarks.rounds import Budget
from benchmarks.throughput import Setup
from jlora import machine
from jlora.doctor import tune
from jlora.errors import ConfigError, JloraError
from jlora.loadgen import cli as serve_load
from jlora.loadgen import workloads as workload_facts
from jlora.loadgen.checkpoints import R1, R1_QUICK
from jlora.serve.flags import Parser

GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": ("throughput", "latency", "host", "cache"),
    "peers": ("throughput", "latency"),
    "throughput": ("throughput",),
    "latency": ("latency",),
    "llama": ("llama",),
    "host": ("host",),
    "lora": ("lora",),
    "load": ("load",),
    "cache": ("cache",),
    "policies": ("policies",),
    "paper": ("paper",),
    "beyond": ("beyond",),
    "alora": ("alora", "pipelines"),
    "pipelines": ("pipelines",),
    "tune": ("tune",),
}

# Those with flags of their own.
COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"serve": serve_load.main, "workloads": workload_facts.main}

# What stands in a file's name for a dtype, where a benchmark has no choice of it.
OWN: Mapping[str, Sequence[str]] = {
    "llama": ["float32"],
    "cache": ["python"],
    "policies": ["float32"],
    "alora": ["float32"],
    "pipelines": ["simulated"],
    "paper": ["simulated"],
    "beyond": ["simulated"],
    "tune": ["tiles"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks asked for; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    args = parser().parse(words)
    args.out = args.out or Path("build/bench") / ("quick" if args.quick else "results")
    benchmarks: Mapping[str, Callable[[argparse.Namespace, str], dict[str, Any]]] = {
        "throughput": _throughput,
        "latency": _latency,
        "llama": _llama,
        "host": _host,
        "lora": _lora,
        "load": _load,
        "cache": _cache,
        "policies": _policies,
        "paper": _paper,
        "beyond": _beyond,
        "alora": _alora,
        "pipelines": _pipelines,
        "tune": _tune,
    }
    try:
        for name in _chosen(args):
            for dtype in OWN.get(name, args.dtype[:1] if name == "host" else args.dtype):
                path = report.save(args.out, name, dtype, benchmarks[name](args, dtype))
                print(f"{name} {dtype}: {path}", flush=True)
    except (JloraError, RuntimeError) as e:
        print(f"jlora bench: {e}", file=sys.stderr)
        return 1
    if any(name in report.NAMES for name in _chosen(args)):
        print(args.out / report.PAGE)
    return 0


def parser() -> Parser:
    """The flags of `jlora bench`."""
    made = Parser("jlora bench", __doc__ or "")
    made.add_argument("name", nargs="?", default="all", choices=list(GROUPS), help="which benchmark (default: all)")
    made.add_argument("--peer-python", default="", metavar="PATH", help="interpreter with torch, transformers, peft")
    made.add_argument("--llama-server", default="", metavar="PATH", help="llama-server of llama.cpp")
    made.add_argument("--llama-model", type=Path, metavar="GGUF", help="the benchmark's model, float32")
    made.add_argument("--llama-adapter", action="append", default=[], metavar="NAME=GGUF", help="and its adapters")
    made.add_argument("--llama-convert", default="", metavar="PATH", help="a program that makes them instead")
    made.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    made.add_argument("--rounds", type=int, default=0, help="interleaved rounds (default: 5; latency, lora 15)")
    made.add_argument("--minutes", type=float, default=13.0, help="start no round that would end later than this")
    made.add_argument("--data", type=Path, metavar="DIR", help="public traces for the policies (default: synthetic)")
    made.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="jlora configuration")
    made.add_argument(
        "--out", type=Path, help="where results go (default: build/bench/results; with --quick build/bench/quick)"
    )
    made.add_argument("--work", type=Path, default=Path("build/bench"), help="weights and unfinished runs")
    made.add_argument("--no-grpc", action="store_true", help="skip the run behind the gRPC server")
    figures = paper.FIGURES
    made.add_argument("--figure", nargs="+", type=int, default=list(figures), choices=figures, help="of the paper")
    made.add_argument("--seconds", type=float, default=0.0, help="of simulated traffic (default: 30; beyond 100)")
    made.add_argument("--quick", action="store_true", help="a tiny model and workload: whether it works at all")
    return made


def _chosen(args: argparse.Namespace) -> Sequence[str]:
    """What to run; llama.cpp is a peer where there is one."""
    chosen = GROUPS[args.name]
    return (*chosen, "llama") if args.name == "peers" and args.llama_server else chosen


def _setup(args: argparse.Namespace, dtype: str, rounds: int) -> Setup:
    pairs = [item.partition("=") for item in args.set]
    return Setup(
        plan=R1_QUICK if args.quick else R1,
        dtype=dtype,
        budget=Budget(args.rounds or (2 if args.quick else rounds), args.minutes),
        work=args.work / ("quick" if args.quick else "r1"),
        peer_python=args.peer_python,
        settings={key: value for key, _, value in pairs},
        grpc=not args.no_grpc,
    )


def _throughput(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    return throughput.run(_setup(args, dtype, rounds=5))


def _latency(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    prompts, tokens = ((8, 24), 8) if args.quick else ((128, 512), 32)
    return latency.run(_setup(args, dtype, rounds=15), prompts, tokens)


def _llama(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    if not args.llama_server:
        raise ConfigError("llama: give llama.cpp's server by --llama-server PATH")
    adapters = {name: Path(path) for name, _, path in (text.partition("=") for text in args.llama_adapter)}
    peer = llama.Peer(args.llama_server, args.llama_model, adapters, args.llama_convert, machine.threads())
    base = _setup(args, dtype, rounds=5)
    plan = against_llama.R2_QUICK if args.quick else against_llama.R2
    return against_llama.run(against_llama.Setup(plan, peer, base.budget, base.work / "llama", base.settings))


def _host(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    setup = _setup(args, dtype, rounds=5)
    setup = replace(setup, plan=host.HOST, work=setup.work / "host")
    return host.run(setup, host.QUICK_LOADS if args.quick else host.LOADS)


def _lora(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    budget = Budget(args.rounds or (2 if args.quick else 15), min(args.minutes, 3.0))
    work = args.work / ("quick" if args.quick else "lora")
    return lora.run(lora.QUICK if args.quick else lora.FULL, dtype, budget, work)


def _load(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    budget = Budget(args.rounds or (1 if args.quick else 5), args.minutes)
    work = args.work / ("quick" if args.quick else "load")
    return load.run(load.QUICK if args.quick else load.FULL, dtype, budget, work)


def _cache(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    work = args.work / ("quick" if args.quick else "r7")
    result = cache.run(cache.QUICK if args.quick else cache.FULL, work)
    args.out.mkdir(parents=True, exist_ok=True)
    growth.draw(result, args.out / growth.FIGURE)
    return result


def _policies(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    budget = Budget(args.rounds or (1 if args.quick else 5), args.minutes)
    make = policies.quick if args.quick else policies.full
    result = policies.run(make(budget, args.work / ("quick" if args.quick else "policies"), args.data))
    policy_page.write(args.out, result)
    return result


def _paper(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    make = paper.quick if args.quick else paper.full
    work = args.work / ("quick" if args.quick else "paper")
    plan = replace(make(work, args.data), figures=tuple(args.figure), minutes=args.minutes)
    result = paper.run(replace(plan, seconds=args.seconds or plan.seconds))
    paper_page.write(args.out, result)
    return paper.packed(result)


def _beyond(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    make = beyond.quick if args.quick else beyond.full
    plan = replace(make(args.work / ("quick" if args.quick else "beyond"), args.data), minutes=args.minutes)
    result = beyond.run(replace(plan, seconds=args.seconds or plan.seconds))
    beyond_page.write(args.out, result)
    return result


def _alora(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    budget = Budget(args.rounds or (2 if args.quick else 5), args.minutes)
    make = alora.quick if args.quick else alora.full
    result = alora.run(make(budget, args.work / ("quick-alora" if args.quick else "alora")))
    alora_page.write(args.out, result)
    return result


def _pipelines(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    result = pipelines.run(pipelines.QUICK if args.quick else pipelines.CELLS)
    pipelines_page.write(args.out, result)
    return result


def _tune(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    result = tune.run(args.quick)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tiles.json").write_text(json.dumps(result["tiles"], indent=2) + "\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
