"""What the commands that play a workload make of the flags that they share: `jlora sim`, `jlora bench`.

A built-in workload is drawn as its flags say. A CSV is played as it is: what shapes a drawing is
refused beside it, so that nobody takes a flag for heeded that was not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from jlora.errors import ConfigError
from jlora.sim.trace import Trace, longest, read_csv, shrunk


def drawing(args: argparse.Namespace, defaults: Mapping[str, Any]) -> argparse.Namespace:
    """The same flags, with `defaults` for those that shape a drawing and were not given (None).

    Raises:
        ConfigError: one of them stands beside `--trace`.
    """
    given = [name for name in defaults if getattr(args, name) is not None]
    if args.trace is not None and given:
        name = given[0]
        raise ConfigError(
            f"--{name} {getattr(args, name)}: shapes a built-in workload; --trace {args.trace} is played as it is"
        )
    return argparse.Namespace(**{**vars(args), **{name: defaults[name] for name in defaults if name not in given}})


def check(args: argparse.Namespace) -> None:
    """Refuses numbers that say nothing. Raises ConfigError."""
    if args.users < 0:
        raise ConfigError(f"--users {args.users}: must be at least 1, or 0 for an open loop")
    if args.shrink < 1:
        raise ConfigError(f"--shrink {args.shrink}: must be at least 1")
    if not args.speed > 0:
        raise ConfigError(f"--speed {args.speed:g}: must be over 0")


def own(args: argparse.Namespace, vocab: int, max_len: int, whose: str) -> Trace:
    """The CSV of `--trace`, shrunk: all of it or nothing.

    Args:
        max_len: the context of `whose`, tokens of prompt and answer together.

    Raises:
        ConfigError: it cannot be read, or a request does not fit: says which `--shrink` would do.
    """
    trace = read_csv(args.trace, vocab, args.seed)
    trace = shrunk(trace, args.shrink) if args.shrink > 1 else trace
    if (most := longest(trace)) > max_len:
        raise ConfigError(
            f"trace {args.trace}: a request of {most} tokens passes {whose}'s context of {max_len}: "
            f"give --shrink {math.ceil(args.shrink * most / max_len)}"
        )
    return trace
