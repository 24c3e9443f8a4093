"""The trace that a load run plays: a built-in workload or a CSV, within the servers' limits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jlora.config import listed
from jlora.errors import ConfigError
from jlora.sim.trace import Trace, lengths, sped_up
from jlora.sim.workloads import SOURCES, DoesNotFit, Load, Source, closed, flags, play

# A workload is refused when more of its requests than this do not fit the server's context.
LOST = 0.05
BEYOND = 8  # contexts are drawn up to so many times the limit, to see what is lost
MOST_SHRINK = 1 << 20  # a trace whose lengths are divided by more has nothing of itself left
NONE = (
    "no adapters to ask for: the server has none; load some, name them with --adapters, or give a --trace without any"
)
DRAWN: Mapping[str, Any] = {
    "workload": "W7",
    "data": None,
    "rate": 1.0,
    "seconds": 60.0,
    "gap": None,
    "popularity": None,
    "arrivals": None,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The servers' limits: tokens of prompt and answer together, token ids, adapters."""

    max_len: int
    vocab: int
    adapters: Sequence[str]


def draw(args: argparse.Namespace, limits: Limits) -> Trace:
    """The trace that the flags ask for. Raises ConfigError, which says what `--shrink` would make lengths fit."""
    args = flags.drawing(args, DRAWN)
    own = args.trace is not None
    trace = flags.own(args, limits.vocab, limits.max_len, "the server") if own else _built_in(args, limits)
    trace = sped_up(_dealt(trace, limits) if own else trace, args.speed)
    return closed(trace, args.users) if args.users else trace


def models(trace: Trace, limits: Limits) -> list[str]:
    """The server's adapter for each of the trace's: of the same name, or by number if it lacks any of these."""
    there = set(trace.adapters) <= set(limits.adapters)
    return list(trace.adapters if there else limits.adapters[: len(trace.adapters)])


def describe(args: argparse.Namespace, trace: Trace) -> dict[str, Any]:
    """Names the trace in a results file."""
    args = flags.drawing(args, DRAWN)
    always = ("shrink", "users", "seed")
    names = ("rate", "seconds", "gap", "popularity", "arrivals", *always) if args.trace is None else always
    chosen = {name: getattr(args, name) for name in names}
    return {"name": trace.name, "digest": trace.digest(), "data": bool(args.data), **chosen}


def _dealt(trace: Trace, limits: Limits) -> Trace:
    """A trace of the server's names, or of others: no more than it has adapters, because several share one in turn.

    Raises ConfigError if the server has some of the names and not others.
    """
    have, count = set(limits.adapters), len(limits.adapters)
    known = [name for name in trace.adapters if name in have]
    if len(known) == len(trace.adapters):
        return trace
    if known:
        unknown = next(name for name in trace.adapters if name not in have)
        raise ConfigError(
            f"trace {trace.name}: asks for adapter {unknown!r}, which is not on every server, and for {known[0]!r}, "
            f"which is; they have {listed(limits.adapters)}"
        )
    if not have:
        raise ConfigError(NONE)
    if len(trace.adapters) <= count:
        return trace
    turns = (replace(turn, adapter=None if turn.adapter is None else turn.adapter % count) for turn in trace.turns)
    name = f"{trace.name}, {len(trace.adapters)} names dealt to {count}"
    return replace(trace, name=name, turns=tuple(turns), adapters=trace.adapters[:count])


def _built_in(args: argparse.Namespace, limits: Limits) -> Trace:
    """A workload whose sessions end at the server's context. Refused when that cuts too many requests."""
    if not limits.adapters:
        raise ConfigError(NONE)
    source = SOURCES[args.workload](args.data)
    load = flags.load_of(args, len(limits.adapters), limits.vocab, limits.max_len)
    if (lost := _lost(source, load)) > LOST:
        fitting = (k for k in _doubled(args.shrink) if _lost(source, replace(load, shrink=k)) <= LOST)
        raise ConfigError(
            f"workload {args.workload}: {lost:.0%} of its requests pass the server's context of {limits.max_len} "
            f"tokens: give --shrink {next(fitting, MOST_SHRINK)}"
        )
    trace = play(source, load)
    if any(turn.acts_from is not None for turn in trace.turns):
        raise ConfigError(
            f"--workload {args.workload}: invokes activated LoRAs, which the tokens of a trace cannot do on a server; "
            "W6 asks plain adapters the same"
        )
    return trace


def _lost(source: Source, load: Load) -> float:
    """The share of the requests that do not fit."""
    try:
        trace = play(source, replace(load, max_len=BEYOND * load.max_len))
    except DoesNotFit:
        return 1.0
    asked = [n for turn, n in zip(trace.turns, lengths(trace), strict=True) if turn.at >= 0]
    return float(np.mean(np.asarray(asked) > load.max_len))


def _doubled(shrink: int) -> Iterator[int]:
    while shrink < MOST_SHRINK:
        shrink *= 2
        yield shrink
