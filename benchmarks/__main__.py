"""`jlora bench STUDY`: measures, and writes tidy JSON lines into --out; `report` makes pages of them.

{studies}
    serve, workloads     the load generator and its traffic; each has its own --help

An interrupted study goes on where it stopped. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.runner import Options
from jlora.errors import ConfigError, JloraError
from jlora.serve.flags import Parser

# Study -> (module, what it measures).
STUDIES: Mapping[str, tuple[str, str]] = {
    "throughput": ("peers.throughput", "R1: tokens per second; --peer-python adds transformers + PEFT"),
    "latency": ("peers.latency", "R1b: prefill and decode of one request; likewise"),
    "llama": ("peers.llama", "R2; --llama-server adds llama.cpp"),
    "host": ("micro.host", "Python's time per step"),
    "cache": ("micro.cache", "cost growth of tree and scheduler (R7)"),
    "refusals": ("micro.refusals", "what a full queue costs: time to a refusal, refusals per second of a core"),
    "abuse": ("micro.abuse", "what idle connections and rapid resets cost a good client and the server's memory"),
    "prefix-timing": ("micro.prefix_timing", "C19: whether time tells which prompts another tenant has asked"),
    "gaps": ("gaps.study", "the longest gaps of loop, engine and streams under all that hostile clients send"),
    "compiling": ("gaps.compiling", "the longest gap between tokens while programs compile in the background"),
    "catalogue": ("micro.catalogue", "a registered adapter: seconds of a start, bytes of memory and registry"),
    "fronts": ("micro.fronts", "the server's processor time per token, HTTP against gRPC"),
    "router": ("micro.router", "what a router adds between a client and its replicas"),
    "lora": ("micro.lora", "adapters by active blocks against dense slots"),
    "price": ("micro.price", "R4: whole steps with 1, 8 and 64 adapters over the same steps of the base"),
    "startup": ("micro.startup", "seconds until a server is ready, with and without compiled programs"),
    "cold": ("micro.cold", "the first token of a request whose adapter is not on the device, by how it starts"),
    "exchange": ("micro.exchange", "what leaves and enters the device when the host helps: programs against callbacks"),
    "arrivals": (
        "micro.arrivals",
        "Poisson traffic to missing adapters, by how it starts; CaraServe's Figures 10, 13, 14",
    ),
    "compare": ("compare", "OLD NEW: two commits or checkouts: throughput, latency, llama, host, startup"),
    "steps": ("micro.step_model", "what `jlora doctor fit` predicts of unseen steps, beside CaraServe's forms"),
    "switches": ("micro.switches", "merging on this engine: seconds of a switch, of a step merged and unmerged"),
    "skew": ("micro.skew", "merged against unmerged inference by skew, on this engine (dLoRA, Figure 10)"),
    "tiers": ("micro.tiers", "the first token by the adapter's tier, and what a load costs those who run"),
    "catalogue-tiers": ("micro.catalogue_tiers", "the first token by the adapter's tier, with 10,000 registered"),
    "zipf": ("micro.zipf", "whether answers stay exact with most adapters on the disk"),
    "alora": ("studies.alora", "R6: activated against plain LoRAs in pipelines, on this engine"),
    "beyond": ("studies.beyond", "R3: every cache policy in the simulator, against a bound"),
    "caraserve": ("studies.caraserve", "cold starts of adapters in the simulator, beside CaraServe's numbers"),
    "cluster-routing": ("studies.cluster_routing", "many replicas by routing policy; CaraServe's Figures 19 and 20"),
    "cluster-migration": ("studies.cluster_migration", "requests that move; dLoRA's Figures 11, 12 and 15"),
    "cluster-load": ("studies.cluster_load", "R8: routing policies by load, with steps measured on an H100"),
    "cluster-table": ("studies.cluster_table", "routing policies on seven kinds of traffic, 4 to 60 replicas"),
    "cluster-real": ("studies.cluster_real", "simulated TTFT and TPOT beside those of replicas over a paced device"),
    "cluster-placement": ("studies.cluster_placement", "where adapters are; LoRAServe's Figures 17 to 22"),
    "failures": ("failures.study", "R9: what replicas deliver while one of them is killed every minute"),
    "pauses": ("failures.pauses", "F1: how long answers pause when their replica is killed, or stands still"),
    "faults": ("faults.study", "F1 to F19 of docs/reliability.md on real processes, at their full counts"),
    "soak": ("soak.study", "an hour of all that users do to a server: memory, threads, TTFT, wrong answers"),
    "merging": ("studies.merging", "merged against unmerged inference by skew, simulated (dLoRA, Figure 10)"),
    "report": ("report", "the pages and figures of the files in --out"),
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
        print(description())
        return 2
    try:
        if args.commits and args.name != "compare":
            raise ConfigError(f"{args.commits[0]}: only compare takes commits")
        for name in GROUPS.get(args.name, (args.name,)):
            for dtype in args.dtype if name in BY_DTYPE else args.dtype[:1]:
                importlib.import_module(f"benchmarks.{STUDIES[name][0]}").run(options(args, dtype))
    except (JloraError, RuntimeError) as e:
        print(f"jlora bench: {e}", file=sys.stderr)
        return 1
    print(options(args, args.dtype[0]).out)
    return 0


def description() -> str:
    """What `jlora bench` is, and a line for each study and group."""
    told = {**{name: what for name, (_, what) in STUDIES.items()}, **{name: ", ".join(g) for name, g in GROUPS.items()}}
    return (__doc__ or "").format(studies="\n".join(f"    {name:<20} {what}" for name, what in told.items()))


def parser() -> Parser:
    """The flags."""
    made = Parser("jlora bench", description())
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
    made.add_argument(
        "--no-grpc", dest="grpc", action="store_false", help="throughput: skip the run behind the gRPC server"
    )
    made.add_argument("--seconds", type=float, default=0.0, help="of simulated traffic (default 100)")
    made.add_argument(
        "--only", nargs="+", default=[], metavar="F", help="cluster-migration, cluster-table, faults, gaps, skew: which"
    )
    made.add_argument("--cluster", type=int, default=0, metavar="N", help="soak: a router with so many replicas")
    made.add_argument("--replicas", type=int, default=0, metavar="N", help="failures: how many (default: 3)")
    made.add_argument("--leak", action="store_true", help="soak: a server that leaks, which must be found")
    made.add_argument("--quick", action="store_true", help="a tiny model and workload: whether it works at all")
    return made


def options(args: argparse.Namespace, dtype: str) -> Options:
    """The flags as a record."""
    known = {each.name for each in fields(Options)}
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()
    }
    pairs = [(key, value) for key, _, value in (item.partition("=") for item in args.set)]
    made = Options(**{name: value for name, value in plain.items() if name in known - {"dtype", "settings"}})
    out = args.out or Path("build/bench") / ("quick" if args.quick else "results")
    return replace(made, out=out, dtype=dtype, settings={**(QUICK if args.quick else {}), **dict(pairs)})


if __name__ == "__main__":
    sys.exit(main())
