"""The step-time model, fitted to measured steps. numpy and scipy only.

    seconds = fixed + FLOPs / flops_per_s + bytes / bytes_per_s + adapter blocks · per_adapter_block

with all terms positive (non-negative least squares on relative errors). Memory and products
overlap on an accelerator, so the true time lies between their sum and their larger one; the fit
says how well the sum does (`error`: median and worst relative error over the steps it was fitted to).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from jlora.bench.device_rates import Rates
from jlora.pallas.counts import Count


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: what it had to do, adapter blocks in its batch (over all layers), seconds it took."""

    name: str
    count: Count
    adapter_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """The coefficients; a rate of 0 means that the term did not matter."""

    fixed_s: float
    flops_per_s: float
    bytes_per_s: float
    adapter_block_s: float
    median_error: float
    worst_error: float

    def seconds(self, count: Count, adapter_blocks: int) -> float:
        """Predicted seconds of a step."""
        work = [
            amount / rate for amount, rate in ((count.flops, self.flops_per_s), (count.bytes, self.bytes_per_s)) if rate
        ]
        return self.fixed_s + sum(work) + adapter_blocks * self.adapter_block_s

    def describe(self, rates: Rates) -> dict[str, Any]:
        """What a simulator reads: the model and the link."""
        return {**asdict(self), "link": {"to_device": asdict(rates.to_device), "to_host": asdict(rates.to_host)}}


def fit(steps: Sequence[Measured]) -> StepModel:
    """Fits the model; with fewer steps than coefficients the fit is exact and says little."""
    taken = np.array([s.seconds for s in steps])
    terms = np.array([[1.0, s.count.flops, s.count.bytes, s.adapter_blocks] for s in steps])
    scale = terms.max(axis=0)
    scale[scale == 0] = 1.0
    relative = terms / scale / taken[:, None]
    found = nnls(relative, np.ones(len(steps)))[0] / scale
    errors = np.abs(terms @ found / taken - 1)
    fixed, per_flop, per_byte, per_block = (float(x) for x in found)
    flops, moved = (1 / x if x > 0 else 0.0 for x in (per_flop, per_byte))
    return StepModel(fixed, flops, moved, per_block, float(np.median(errors)), float(errors.max()))
