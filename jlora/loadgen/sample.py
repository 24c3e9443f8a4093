"""What one run of a load shows: percentiles, goodput, errors, each adapter's share. Plain values from calls."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jlora.loadgen.player import Call, answers
from jlora.serve.proto import jlora_pb2 as pb
from jlora.sim import outcome

ERRORS = 20  # kinds of errors that are kept: a message may be of a single request
QUANTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What users are promised, in seconds: the first token, and the mean gap between later ones."""

    ttft_s: float = 0.5
    tpot_s: float = 0.1

    def met(self, call: Call) -> bool:
        """Whether a call was answered in full and in time. An answer of one token has no gaps."""
        return call.ok and call.ttft <= self.ttft_s and not call.tpot > self.tpot_s


def sample(calls: Sequence[Call], slo: Slo, warmup_s: float = 0.0) -> dict[str, Any]:
    """One run in numbers. Times are of full answers, and NaN if there is none.

    Requests that were due before `warmup_s` count in "answers" only. Raises RuntimeError if they are all.
    """
    counted = [call for call in calls if call.due >= warmup_s]
    if not counted:
        raise RuntimeError(f"no request was due after the warm-up of {warmup_s:g} s")
    good = [call for call in counted if call.ok]
    seconds = max(call.ended for call in counted) - warmup_s
    met = sum(map(slo.met, counted))
    ttft, tpot = spread([call.ttft for call in good]), spread([call.tpot for call in good])
    errors = Counter((call.status, call.detail) for call in counted if not call.ok)
    return {
        "requests": len(counted),
        "seconds": seconds,
        "status": dict(Counter(call.status for call in counted)),
        "errors": [{"status": s, "message": detail, "count": n} for (s, detail), n in errors.most_common(ERRORS)],
        "error_kinds": len(errors),
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": sum(len(call.tokens) for call in good) / seconds,
        "goodput_per_s": met / seconds,
        "attained": met / len(counted),
        "ttft_s": ttft["mean"],
        "tpot_s": tpot["mean"],
        "ttft": ttft,
        "tpot": tpot,
        "latency": spread([call.latency for call in good]),
        "lateness": spread([call.sent - call.due for call in counted]),
        "server": {name: mean([asdict(call.timing)[name] for call in good]) for name in SERVER},
        "prompt_tokens": sum(call.usage.prompt_tokens for call in good),
        "cached_tokens": sum(call.usage.cached_tokens for call in good),
        "answers": answers(calls),
        "adapters": by_adapter(counted, slo),
    }


SERVER = ("queue", "adapter_cold_start", "kv_cold_start", "prefill")  # seconds that the server reports


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, percentiles, and the distribution as its 0th to 100th percentile. NaNs do not count; none left: all NaN."""
    found = np.asarray(known(values))
    if math.isnan(found[0]):
        return {"mean": math.nan, **{f"p{q}": math.nan for q in QUANTILES}, "max": math.nan, "cdf": []}
    cdf = [float(f"{value:.6g}") for value in np.percentile(found, range(101))]
    return {"mean": float(found.mean()), **{f"p{q}": cdf[q] for q in QUANTILES}, "max": cdf[100], "cdf": cdf}


def by_adapter(calls: Sequence[Call], slo: Slo) -> list[dict[str, Any]]:
    """A row per adapter, the most requested first; "" is the base model."""
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(call.model, []).append(call)
    rows = []
    for name, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        good = [call for call in group if call.ok]
        ttft = spread([call.ttft for call in good])
        prompts = sum(call.usage.prompt_tokens for call in good)
        rows.append(
            {
                "adapter": name,
                "requests": len(group),
                "failed": len(group) - len(good),
                "attained": sum(map(slo.met, group)) / len(group),
                "ttft_s": ttft["mean"],
                "ttft_p99_s": ttft["p99"],
                "tpot_s": mean([call.tpot for call in good]),
                "cached": sum(call.usage.cached_tokens for call in good) / max(prompts, 1),
            }
        )
    return rows


def cache(before: pb.CacheState, after: pb.CacheState) -> dict[str, float]:
    """What the server's cache did between two snapshots."""
    return {**outcome.hits_and_bytes((before, after)), "invalid_kv": after.invalid_kv}


def known(values: Sequence[float]) -> list[float]:
    """Those that are numbers; one NaN if none is."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def mean(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN if none is."""
    return statistics.fmean(known(values))
