"""Kernels whose time depends on the ranks in the batch, as CaraServe models them. No jax.

`StepModel` has the product's own kernel: each adapter of the batch is read once. Punica's and S-LoRA's read an
adapter once for each of its requests, padded to the largest rank of the batch, or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from jlora.cluster.routing.costs import RankCosts
from jlora.engine.plan import StepPlan
from jlora.layout import BYTES
from jlora.sim.hardware import Hardware, StepModel

Kernel = Literal["own", "unpadded", "padded"]
KERNELS: tuple[Kernel, ...] = ("own", "unpadded", "padded")


class RankedKernel:
    """Seconds of the adapters of a step. `ranks` are by uid, and may grow."""

    def __init__(self, costs: RankCosts, ranks: Mapping[int, int]):
        self._costs = costs
        self._ranks = ranks

    def __call__(self, plan: StepPlan) -> float:
        requests = total = largest = 0
        for work in plan.work:
            if work.adapted:
                rank = self._ranks[work.sequence.adapter.uid]
                requests, total, largest = requests + 1, total + rank, max(largest, rank)
        return self._costs.adapters_s(requests, total, largest)


def costs_of(hardware: Hardware, step: StepModel, kernel: Kernel) -> RankCosts:
    """What a router may know of this hardware.

    A rank costs the reading of its rows and columns; the other lines are the step model's. The product's own kernel
    counts as unpadded: it reads at most the sum of ranks.
    """
    spec, chip = hardware.spec, hardware.chip
    shapes = spec.projection_shapes
    size = sum(sum(shapes[name]) for name in hardware.projections) * spec.layers * BYTES[spec.dtype]
    rank_s = size / (hardware.chips * chip.hbm_bps * chip.memory)
    return RankCosts(
        step.fixed_s, step.weights_s, step.prompt_token_s, step.context_token_s, rank_s, kernel == "padded"
    )


def without_adapters(step: StepModel) -> StepModel:
    """The step model with adapters that take no time, for a `RankedKernel` beside it."""
    return replace(step, adapter_block_s=0.0, adapter_token_s=0.0)
