"""What a load run showed: percentiles, goodput, errors, an adapter's share. Plain values from calls."""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jlora.bench.load_client import Call
from jlora.serve.proto import jlora_pb2 as pb
from jlora.sim import outcome

QUANTILES = (50, 90, 95, 99)
COLD = {"queue_s": "queue_s", "adapter_s": "adapter_cold_start_s", "kv_s": "kv_cold_start_s", "prefill_s": "prefill_s"}


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user is promised, in seconds: the first token, and the mean gap between later ones."""

    ttft_s: float = 0.5
    tpot_s: float = 0.1

    def met(self, call: Call) -> bool:
        """Whether a call was answered in full and in time; one token alone has no gaps."""
        return call.ok and call.ttft <= self.ttft_s and not call.tpot > self.tpot_s


def sample(calls: Sequence[Call], slo: Slo, warmup_s: float) -> dict[str, Any]:
    """One run in numbers. Times are of what was answered in full: NaN if nothing was.

    Args:
        calls: of the trace proper.
        warmup_s: what was due before this is not counted, except as answers.

    Raises:
        RuntimeError: nothing is left to count.
    """
    counted = [call for call in calls if call.due >= warmup_s]
    if not counted:
        raise RuntimeError(f"no request was due after the warm-up of {warmup_s:g} s")
    good = [call for call in counted if call.ok]
    seconds = max(call.ended for call in counted) - warmup_s
    lateness = [call.sent - call.due for call in counted]
    met = sum(map(slo.met, counted))
    return {
        "requests": len(counted),
        "seconds": seconds,
        "status": dict(Counter(call.status for call in counted)),
        "errors": _errors(counted),
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": sum(len(call.tokens) for call in good) / seconds,
        "goodput_per_s": met / seconds,
        "attained": met / len(counted),
        "ttft": spread([call.ttft for call in good]),
        "tpot": spread([call.tpot for call in good]),
        "latency": spread([call.latency for call in good]),
        "lateness": spread(lateness),
        "server": {name: _mean([getattr(call.timing, key) for call in good]) for name, key in COLD.items()},
        "prompt_tokens": sum(call.usage.prompt_tokens for call in good),
        "cached_tokens": sum(call.usage.cached_tokens for call in good),
        "answers": {f"{c.turn.session}.{c.turn.turn}": _crc(c.tokens) for c in calls if c.ok},
        "adapters": by_adapter(counted, slo),
        # What ratios are made of: plain numbers.
        "ttft_s": _mean([call.ttft for call in good]),
        "tpot_s": _mean([call.tpot for call in good]),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, percentiles, and the whole distribution as its 0th to 100th percentile; NaNs do not count.

    Of no value: all NaN, so that nobody takes it for the best.
    """
    found = np.asarray(known(values))
    if math.isnan(found[0]):
        return {"mean": math.nan, **{f"p{q}": math.nan for q in QUANTILES}, "max": math.nan, "cdf": []}
    cdf = np.percentile(found, range(101))
    return {
        "mean": float(found.mean()),
        **{f"p{q}": float(cdf[q]) for q in QUANTILES},
        "max": float(cdf[100]),
        "cdf": [float(f"{value:.6g}") for value in cdf],
    }


def by_adapter(calls: Sequence[Call], slo: Slo) -> list[dict[str, Any]]:
    """A row per adapter, the most asked for first; "" is the base model."""
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(call.model, []).append(call)
    rows = []
    for name, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        good = [call for call in group if call.ok]
        ttft = spread([call.ttft for call in good])
        rows.append(
            {
                "adapter": name,
                "requests": len(group),
                "failed": len(group) - len(good),
                "attained": sum(map(slo.met, group)) / len(group),
                "ttft_s": ttft["mean"],
                "ttft_p99_s": ttft["p99"],
                "tpot_s": _mean([call.tpot for call in good]),
                "tokens": sum(len(call.tokens) for call in good),
                "cached": sum(call.usage.cached_tokens for call in good)
                / max(sum(call.usage.prompt_tokens for call in good), 1),
            }
        )
    return rows


def cache(before: pb.CacheState, after: pb.CacheState) -> dict[str, float]:
    """What the server's cache did between two looks."""
    return {**outcome.hits_and_bytes(before, after), "invalid_kv": after.invalid_kv}


def differing(answers: Mapping[str, int], reference: Mapping[str, int]) -> int:
    """How many of the answers that both runs finished are not the same."""
    return sum(answers[name] != reference[name] for name in answers.keys() & reference.keys())


def known(values: Sequence[float]) -> list[float]:
    """Those that are numbers; one NaN if none is."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def _errors(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Each status with its most frequent message, the most frequent first."""
    counted = Counter((call.status, call.detail) for call in calls if not call.ok)
    return [{"status": status, "message": detail, "count": n} for (status, detail), n in counted.most_common(20)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(known(values))


def _crc(tokens: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())
