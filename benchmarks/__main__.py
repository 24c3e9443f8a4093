"""`jlora bench STUDY`: measures, and writes tidy JSON lines into --out; `report` makes pages of them.

    throughput, latency, peers   R1, R1b, both; --peer-python adds transformers + PEFT (docs/benchmarks.md)
    llama                        R2; --llama-server adds llama.cpp
    host, cache                  Python's time per step; cost growth of tree and scheduler (R7)
    refusals                     what a full queue costs: time to a refusal, refusals per second of a core
    abuse                        what idle connections and rapid resets cost a good client and the server's memory
    gaps                         the longest gaps of loop, engine and streams under everything that hostile clients send
    catalogue                    what a registered adapter costs: seconds of a start, bytes of memory and registry
    fronts                       the server's processor time per token, HTTP against gRPC
    lora                         adapters by active blocks against dense slots
    price                        R4: whole steps with 1, 8 and 64 adapters over the same steps of the base
    alora                        R6: activated against plain LoRAs in pipelines, on this engine
    beyond                       R3: every cache policy in the simulator, against a bound
    caraserve                    cold starts of adapters in the simulator, beside CaraServe's numbers
    router                       what a router adds between a client and its replicas
    cluster-routing              many replicas under every routing policy, beside CaraServe's Figures 19 and 20
    cluster-migration            requests that move between replicas, beside dLoRA's Figures 11, 12 and 15
    cluster-table                routing policies on six kinds of traffic to 4 to 60 replicas
    cluster-real                 the simulator's TTFT and TPOT beside those of real replicas over a paced device
    cluster-placement            where adapters are, beside LoRAServe's Figures 17 to 22
    failures                     R9: what replicas deliver while one of them is killed every minute
    faults                       F1 to F19 of docs/reliability.md on real processes, at their full counts
    soak                         an hour of all that users do to a server: memory, threads, TTFT, wrong answers
    merging                      merged against unmerged inference by skew, in the simulator (dLoRA, Figure 10)
    startup                      seconds until a server is ready, with and without compiled programs
    steps                        what `jlora doctor fit` predicts of unseen steps, beside CaraServe's forms
    switches                     merging on this engine: seconds of a switch, of a step merged and unmerged
    tiers                        the first token by the adapter's tier, and what a load costs those who run
    zipf                         whether answers stay exact with most adapters on the disk
    cold                         the first token of a request whose adapter is not on the device, by how it starts
    compare OLD NEW              two commits, or two checkouts: throughput, latency, llama, host, startup
    report                       the pages and figures of the files in --out
    all                          throughput, latency, host, cache
    serve, workloads             the load generator and its traffic; each has its own --help

An interrupted study goes on where it stopped. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.runner import Options
from jlora.errors import ConfigError, JloraError
from jlora.serve.flags import Parser

STUDIES: Mapping[str, str] = {
    "throughput": "benchmarks.peers.throughput",
    "latency": "benchmarks.peers.latency",
    "llama": "benchmarks.peers.llama",
    "host": "benchmarks.micro.host",
    "cache": "benchmarks.micro.cache",
    "refusals": "benchmarks.micro.refusals",
    "abuse": "benchmarks.micro.abuse",
    "gaps": "benchmarks.gaps.study",
    "catalogue": "benchmarks.micro.catalogue",
    "fronts": "benchmarks.micro.fronts",
    "router": "benchmarks.micro.router",
    "lora": "benchmarks.micro.lora",
    "price": "benchmarks.micro.price",
    "startup": "benchmarks.micro.startup",
    "cold": "benchmarks.micro.cold",
    "compare": "benchmarks.compare",
    "steps": "benchmarks.micro.step_model",
    "switches": "benchmarks.micro.switches",
    "tiers": "benchmarks.micro.tiers",
    "zipf": "benchmarks.micro.zipf",
    "alora": "benchmarks.studies.alora",
    "beyond": "benchmarks.studies.beyond",
    "caraserve": "benchmarks.studies.caraserve",
    "cluster-routing": "benchmarks.studies.cluster_routing",
    "cluster-migration": "benchmarks.studies.cluster_migration",
    "cluster-table": "benchmarks.studies.cluster_table",
    "cluster-real": "benchmarks.studies.cluster_real",
    "cluster-placement": "benchmarks.studies.cluster_placement",
    "failures": "benchmarks.failures.study",
    "faults": "benchmarks.faults.study",
    "soak": "benchmarks.soak.study",
    "merging": "benchmarks.studies.merging",
    "report": "benchmarks.report",
}
GROUPS: Mapping[str, Sequence[str]] = {
    "all": ("throughput", "latency", "host", "cache"),
    "peers": ("throughput", "latency"),
}
QUICK = {"engine.max_seqs": 4, "engine.max_step_tokens": 32}  # few programs to compile
BY_DTYPE = ("throughput", "latency", "lora", "price", "startup", "compare")  # measured once per --dtype


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the studies asked for; returns the exit code. Without a name it only says which there are."""
    args = parser().parse(list(sys.argv[1:] if argv is None else argv))
    if args.name is None:
        print(__doc__)
        return 2
    try:
        if args.commits and args.name != "compare":
            raise ConfigError(f"{args.commits[0]}: only compare takes commits")
        for name in GROUPS.get(args.name, (args.name,)):
            for dtype in args.dtype if name in BY_DTYPE else args.dtype[:1]:
                importlib.import_module(STUDIES[name]).run(options(args, dtype))
    except (JloraError, RuntimeError) as e:
        print(f"jlora bench: {e}", file=sys.stderr)
        return 1
    print(options(args, args.dtype[0]).out)
    return 0


def parser() -> Parser:
    """The flags."""
    made = Parser("jlora bench", __doc__ or "")
    made.add_argument("name", nargs="?", choices=[*GROUPS, *STUDIES], help="which study")
    made.add_argument("commits", nargs="*", metavar="COMMIT", help="compare: OLD and NEW")
    made.add_argument("--studies", nargs="+", default=[], metavar="STUDY", help="compare: which (default: all five)")
    made.add_argument("--peer-python", default="", metavar="PATH", help="interpreter with torch, transformers, peft")
    made.add_argument("--llama-server", default="", metavar="PATH", help="llama-server of llama.cpp")
    made.add_argument("--llama-convert", default="", metavar="PATH", help="a program that makes GGUF files")
    made.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    made.add_argument("--rounds", type=int, default=0, help="interleaved rounds (default: 5; latency, lora 15)")
    made.add_argument(
        "--minutes", type=float, default=13.0, help="start no round that would end later than this; soak: of load"
    )
    made.add_argument("--data", type=Path, metavar="DIR", help="public traces (default: their synthetic equivalents)")
    made.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="jlora configuration")
    made.add_argument(
        "--out", type=Path, help="where results go (default: build/bench/results; quick: build/bench/quick)"
    )
    made.add_argument("--work", type=Path, default=Path("build/bench"), help="weights")
    made.add_argument("--no-grpc", action="store_true", help="throughput: skip the run behind the gRPC server")
    made.add_argument("--seconds", type=float, default=0.0, help="of simulated traffic (default 100)")
    made.add_argument("--only", nargs="+", default=[], metavar="F", help="faults, gaps: which (default: all)")
    made.add_argument("--cluster", type=int, default=0, metavar="N", help="soak: a router with so many replicas")
    made.add_argument("--replicas", type=int, default=0, metavar="N", help="failures: how many (default: 3)")
    made.add_argument("--leak", action="store_true", help="soak: a server that leaks, which must be found")
    made.add_argument("--quick", action="store_true", help="a tiny model and workload: whether it works at all")
    return made


def options(args: argparse.Namespace, dtype: str) -> Options:
    """The flags as a record."""
    pairs = [(key, value) for key, _, value in (item.partition("=") for item in args.set)]
    return Options(
        out=args.out or Path("build/bench") / ("quick" if args.quick else "results"),
        work=args.work,
        quick=args.quick,
        dtype=dtype,
        rounds=args.rounds,
        minutes=args.minutes,
        seconds=args.seconds,
        data=args.data,
        settings={**(QUICK if args.quick else {}), **dict(pairs)},
        grpc=not args.no_grpc,
        peer_python=args.peer_python,
        llama_server=args.llama_server,
        llama_convert=args.llama_convert,
        commits=tuple(args.commits),
        studies=tuple(args.studies),
        only=tuple(args.only),
        cluster=args.cluster,
        replicas=args.replicas,
        leak=args.leak,
    )


if __name__ == "__main__":
    sys.exit(main())
