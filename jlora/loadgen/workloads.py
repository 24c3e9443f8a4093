"""`jlora bench workloads`: facts of the workloads, before anything is measured with them.

    jlora bench workloads                      all of them, from their shape alone
    jlora bench workloads W1 W5 --data DIR     two of them, from the public traces
    jlora bench workloads --trace mine.csv     a trace of your own

Sizes are those of Llama-2-7B in blocks of 32 tokens: an adapter of rank r on q, k, v, o is as large
as the KV of 4 r tokens. W1b's and W8's lengths are divided by 8 and 16, and so are block and ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jlora.errors import ConfigError, JloraError
from jlora.serve.flags import Parser
from jlora.sim.trace import Trace, facts, read_csv
from jlora.sim.workloads import SOURCES, flags, mixes, play

BLOCK_TOKENS = 32
TOKENS_PER_RANK = 4  # 2 r MiB of adapter, 0.5 MiB of KV a token: 7B, q k v o, 16 bit
SHRINK: Mapping[str, int] = {"W1b": 8, "W8": 16}
MAX_LEN = 131072
DRAWN: Mapping[str, Any] = {"data": None, "rate": 4.0, "seconds": 300.0, "adapters": 50, "popularity": None}


def main(argv: Sequence[str]) -> int:
    """Prints the facts; returns the exit code."""
    args = parser().parse(list(argv))
    args.gap = args.arrivals = None
    try:
        args = flags.drawing(args, DRAWN)
        flags.at_least(args, 0, "seed")
        flags.above_0(args, "rate", "seconds")
        if args.trace is not None and args.names:
            raise ConfigError(f"{args.names[0]}: is a built-in workload; leave it out, or --trace {args.trace}")
        if args.trace is not None:
            print(_told(read_csv(args.trace, args.vocab, args.seed), 1, args.ranks, args.seed))
            return 0
        if unknown := [name for name in args.names if name not in SOURCES]:
            raise ConfigError(f"workload {unknown[0]!r}: must be one of {', '.join(SOURCES)}")
        for name in args.names or SOURCES:
            args.shrink = shrink = SHRINK.get(name, 1)
            load = flags.load_of(args, args.adapters, args.vocab, MAX_LEN // shrink)
            print(_told(play(SOURCES[name](args.data), load), shrink, args.ranks, args.seed), flush=True)
    except JloraError as e:
        print(f"jlora bench workloads: {e}", file=sys.stderr)
        return 1
    return 0


def parser() -> Parser:
    """The flags of `jlora bench workloads`."""
    made = Parser("jlora bench workloads", __doc__ or "")
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)} (default: all)")
    made.add_argument("--trace", type=Path, metavar="CSV", help="a trace of your own")
    made.add_argument("--data", type=Path, metavar="DIR", help="public traces (default: the synthetic equivalents)")
    made.add_argument("--rate", type=float, help="requests per second (default 4)")
    made.add_argument("--seconds", type=float, help="length (default 300)")
    made.add_argument("--adapters", type=int, help="how many there are (default 50)")
    made.add_argument(
        "--popularity", metavar="LAW", help="zipf:0.9, uniform, distinct, skewed:0.1, drift:300, real ..."
    )
    made.add_argument("--ranks", default="32,64", metavar="MIX", help="32,64 or hot:32,64 (default 32,64)")
    made.add_argument("--vocab", type=int, default=32000)
    made.add_argument("--seed", type=int, default=0)
    return made


def _told(trace: Trace, shrink: int, ranks: str, seed: int) -> str:
    sizes = [-(-TOKENS_PER_RANK * rank // BLOCK_TOKENS) for rank in mixes.ranks_of(ranks, trace, seed)]
    text = facts(trace, BLOCK_TOKENS // shrink, sizes).text(
        trace.name + (f", lengths / {shrink}" if shrink > 1 else "")
    )
    return "\n".join([text, f"  trace {trace.digest()}", *flags.remarks(trace)])
