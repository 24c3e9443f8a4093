"""Tables of simulated runs for a terminal. No jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Column -> (part of a result, key, factor, digits).
COLUMNS: Mapping[str, tuple[str, str, float, int]] = {
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


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row per policy, in aligned columns."""
    rows = [["policy", *COLUMNS], *([str(result["policy"]), *_row(result)] for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _row(result: Mapping[str, Any]) -> list[str]:
    return [f"{result[part][key] * factor:.{digits}f}" for part, key, factor, digits in COLUMNS.values()]
