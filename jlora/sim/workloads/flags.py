"""Flags shared by the commands that play a workload: `jlora sim` and `jlora bench`.

Some flags shape a named workload. A trace from a CSV ignores them, so they are refused beside it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jlora.errors import ConfigError
from jlora.sim.script import user_of
from jlora.sim.trace import Trace, longest, read_csv, shrunk
from jlora.sim.workloads import SOURCES, Load, arrivals, popularity


def add(parser: argparse._ActionsContainer, defaults: Mapping[str, Any]) -> None:
    """Adds the flags of a workload; `defaults` are of those that shape a named one."""
    parser.add_argument("--workload", choices=list(SOURCES), help=f"a named one (default: {defaults['workload']})")
    parser.add_argument("--trace", type=Path, metavar="CSV", help="your own trace instead")
    parser.add_argument("--data", type=Path, metavar="DIR", help="public files for the workload (default: synthetic)")
    parser.add_argument("--rate", type=float, help=f"requests per second (default: {defaults['rate']:g})")
    parser.add_argument("--seconds", type=float, help=f"length of the trace (default: {defaults['seconds']:g})")
    parser.add_argument("--gap", type=float, metavar="S", help="mean seconds between a session's turns")
    parser.add_argument("--popularity", metavar="LAW", help="zipf:0.9, uniform, ... (default: the workload's)")
    parser.add_argument("--arrivals", metavar="LAW", help="poisson, gamma:CV (default: the workload's)")
    parser.add_argument("--shrink", type=int, default=1, metavar="K", help="divide all lengths by K (default: 1)")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="play it X times as fast (default: 1)")
    parser.add_argument("--users", type=int, default=0, metavar="N", help="closed loop: N users take sessions in turn")
    parser.add_argument("--seed", type=int, default=0)


def load_of(args: argparse.Namespace, adapters: int, vocab: int, max_len: int) -> Load:
    """The load that the flags ask for. Raises ConfigError."""
    return Load(
        rate=args.rate,
        seconds=args.seconds,
        adapters=adapters,
        shrink=args.shrink,
        vocab=vocab,
        max_len=max_len,
        seed=args.seed,
        gap_s=args.gap,
        popularity=popularity.parse(args.popularity, args.data) if args.popularity else None,
        arrivals=arrivals.parse(args.arrivals) if args.arrivals else None,
    )


def drawing(args: argparse.Namespace, defaults: Mapping[str, Any]) -> argparse.Namespace:
    """The flags, with `defaults` for those that shape a named workload. Raises ConfigError for one beside `--trace`."""
    given = [name for name in defaults if getattr(args, name) is not None]
    if args.trace is not None and given:
        name = given[0]
        raise ConfigError(
            f"--{name} {getattr(args, name)}: shapes a named workload, and cannot be given with --trace {args.trace}"
        )
    return argparse.Namespace(**{**vars(args), **{name: defaults[name] for name in defaults if name not in given}})


def check(args: argparse.Namespace) -> None:
    """Checks the numbers. Raises ConfigError."""
    if args.users < 0:
        raise ConfigError(f"--users {args.users}: must be at least 1, or 0 for an open loop")
    at_least(args, 1, "shrink")
    at_least(args, 0, "seed")
    above_0(args, "rate", "seconds", "gap", "speed")


def at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raises ConfigError for a flag that is less, or not finite."""
    for name in names:
        _check(args, name, f"at least {least}", lambda value: value >= least)


def above_0(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for a flag that is 0 or less, or not finite. One that is not given may be None."""
    for name in names:
        _check(args, name, "above 0", lambda value: value > 0)


def _check(args: argparse.Namespace, name: str, limit: str, holds: Callable[[float], bool]) -> None:
    value = getattr(args, name)
    if value is None or (math.isfinite(value) and holds(value)):
        return
    told = f"{value:g}" if isinstance(value, float) else value
    limit = limit if math.isfinite(value) else f"{limit}, and finite"
    raise ConfigError(f"--{name.replace('_', '-')} {told}: must be {limit}")


def writable(path: Path | None) -> None:
    """Raises ConfigError if `--json` cannot be written, before hours are spent on what it would hold."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: {path.parent} is no directory")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {path}: cannot be written")


def remarks(trace: Trace) -> list[str]:
    """What the trace leaves out of what the flags ask for, a line each."""
    found, asking = [], len({user_of(turn) for turn in trace.turns if turn.at >= 0})
    if trace.lost:
        every = trace.lost + sum(turn.at >= 0 for turn in trace.turns)
        found.append(f"{trace.lost} of {every} requests do not fit the context and are left out; see --shrink")
    if asking < trace.users:
        found.append(f"only {asking} of {trace.users} users have a request; see --seconds and --rate")
    return found


def own(args: argparse.Namespace, vocab: int, max_len: int, whose: str) -> Trace:
    """The trace of `--trace`, divided by `--shrink`. Raises ConfigError if a request exceeds the context of `whose`."""
    trace = read_csv(args.trace, vocab, args.seed)
    trace = shrunk(trace, args.shrink) if args.shrink > 1 else trace
    if (most := longest(trace)) > max_len:
        raise ConfigError(
            f"trace {args.trace}: a request of {most} tokens exceeds {whose}'s context of {max_len}: "
            f"give --shrink {math.ceil(args.shrink * most / max_len)}"
        )
    return trace
