"""Figures of a simulated run as plain values, and the table of several runs. No jax.

Times are seconds, as means over the counted requests. A request without a first token at the end of
the run counts in TTFT with the time that it has waited.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jlora.sim.replay import Ask
from jlora.types import CacheState, Timing

Column = Callable[[Ask], float | None]
DIGITS = 6  # significant digits of every number in a result


def _usage(name: str) -> Column:
    return lambda ask: None if ask.usage is None else getattr(ask.usage, name)


def _timing(name: str) -> Column:
    return lambda ask: None if ask.timing is None else getattr(ask.timing, name)


def swap_s(timing: Timing) -> float:
    """Seconds that a request waited for copies. Those of adapter and prefix overlap."""
    return max(timing.adapter_cold_start, timing.kv_cold_start)


# Column of the per-request table -> its value for a turn; None if the turn was not answered.
COLUMNS: Mapping[str, Column] = {
    "session": lambda ask: ask.turn.session,
    "turn": lambda ask: ask.turn.turn,
    "adapter": lambda ask: ask.turn.adapter,
    "sent_s": lambda ask: ask.sent,
    "prompt": _usage("prompt_tokens"),
    "cached": _usage("cached_tokens"),
    "output": _usage("completion_tokens"),
    "queue_s": _timing("queue"),
    "adapter_s": _timing("adapter_cold_start"),
    "kv_s": _timing("kv_cold_start"),
    "swap_s": lambda ask: None if ask.timing is None else swap_s(ask.timing),
    "prefill_s": _timing("prefill"),
    "ttft_s": _timing("ttft"),
    "tpot_s": _timing("tpot"),
}

# Column of the table of policies -> (part of a result, key, factor, digits).
TABLE: Mapping[str, tuple[str, str, float, int]] = {
    "TTFT ms": ("summary", "ttft_s", 1e3, 0),
    "p50": ("summary", "ttft_p50_s", 1e3, 0),
    "p99": ("summary", "ttft_p99_s", 1e3, 0),
    "TPOT ms": ("summary", "tpot_s", 1e3, 1),
    "queue ms": ("summary", "queue_s", 1e3, 0),
    "swap-in ms": ("summary", "swap_s", 1e3, 1),
    "adapter ms": ("summary", "adapter_s", 1e3, 1),
    "KV ms": ("summary", "kv_s", 1e3, 1),
    "adapter hits": ("cache", "adapter_hits", 1, 2),
    "KV device": ("cache", "kv_device_hits", 1, 2),
    "KV host": ("cache", "kv_host_hits", 1, 2),
    "invalid KV": ("cache", "invalid_kv", 1, 3),
    "GB in": ("cache", "bytes_in", 1e-9, 1),
    "GB out": ("cache", "bytes_out", 1e-9, 1),
    "recomputed": ("cache", "recomputed_tokens", 1, 0),
    "lost": ("cache", "blocks_lost", 1, 0),
    "preempted": ("summary", "preemptions", 1, 0),
    "unfinished": ("summary", "unfinished", 1, 0),
    "unsent": ("summary", "unsent", 1, 0),
    "refused": ("summary", "refused", 1, 0),
    "device busy": ("device", "busy", 1, 2),
    "link in": ("device", "link_in", 1, 2),
    "link out": ("device", "link_out", 1, 2),
}


def rows(asks: Sequence[Ask]) -> list[list[float | None]]:
    """A row of `COLUMNS` per turn."""
    return [[value(ask) for value in COLUMNS.values()] for ask in asks]


def summary(asks: Sequence[Ask], end: float) -> dict[str, float]:
    """Means and quantiles of a run that ended at `end`."""
    taken = [ask for ask in asks if not ask.refused]
    timings = [ask.timing for ask in taken if ask.timing is not None]
    usages = [ask.usage for ask in taken if ask.usage is not None]
    ttft = [(end if math.isinf(ask.first) else ask.first) - ask.sent for ask in taken]
    tpot = [t.tpot for t, u in zip(timings, usages, strict=True) if u.completion_tokens > 1]
    prompts = sum(u.prompt_tokens for u in usages)
    return {
        "requests": len(asks),
        "refused": len(asks) - len(taken),
        "unfinished": len(taken) - len(timings),
        "ttft_s": _mean(ttft),
        "ttft_p50_s": _quantile(ttft, 50),
        "ttft_p90_s": _quantile(ttft, 90),
        "ttft_p99_s": _quantile(ttft, 99),
        "tpot_s": _mean(tpot),
        "tpot_p99_s": _quantile(tpot, 99),
        "queue_s": _mean([t.queue for t in timings]),
        "adapter_s": _mean([t.adapter_cold_start for t in timings]),
        "kv_s": _mean([t.kv_cold_start for t in timings]),
        "swap_s": _mean([swap_s(t) for t in timings]),
        "prefill_s": _mean([t.prefill for t in timings]),
        "cached": sum(u.cached_tokens for u in usages) / max(prompts, 1),
    }


def cache(*spans: tuple[CacheState, CacheState]) -> dict[str, float]:
    """Activity of one cache or several together, each between two states."""
    return {
        **hits_and_bytes(*spans),
        "recomputed_tokens": sum(after.recomputed_tokens - before.recomputed_tokens for before, after in spans),
        "evictions": sum(after.clean_evictions - before.clean_evictions for before, after in spans),
        "streamed": sum(after.streamed - before.streamed for before, after in spans),
    }


def hits_and_bytes(*spans: tuple[Any, Any]) -> dict[str, float]:
    """The part of `cache` that both `CacheState` and its gRPC message have."""

    def grown(name: str) -> int:
        return sum(getattr(after, name) - getattr(before, name) for before, after in spans)

    looked = max(grown("kv_lookup_tokens"), 1)
    return {
        "adapter_hits": grown("adapter_hits") / max(grown("adapter_lookups"), 1),
        "kv_device_hits": (grown("kv_hit_tokens") - grown("kv_host_hit_tokens")) / looked,
        "kv_host_hits": grown("kv_host_hit_tokens") / looked,
        "bytes_in": grown("bytes_swapped_in"),
        "bytes_out": grown("bytes_swapped_out"),
        "blocks_lost": grown("blocks_lost"),
    }


def rounded(value: Any) -> Any:
    """`value` with every float rounded to `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(each) for each in value]
    return value


def table(
    results: Sequence[Mapping[str, Any]],
    columns: Mapping[str, tuple[str, str, float, int]] = TABLE,
    names: Sequence[str] = ("policy",),
) -> str:
    """A row per result, in aligned columns; `names` are the keys that tell the results apart."""
    rows = [[*names, *columns]]
    for result in results:
        figures = (f"{result[part][key] * factor:.{digits}f}" for part, key, factor, digits in columns.values())
        rows.append([*(str(result[name]) for name in names), *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0
