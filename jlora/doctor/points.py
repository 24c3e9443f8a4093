"""Operating points of the engine that was profiled, for LoRAServe's placement. No jax."""

from __future__ import annotations

from dataclasses import replace

from jlora.cluster.demand import lenient_s, operating_points
from jlora.step_model import FittedSteps, Objective, Points

RANKS = (8, 16, 32, 64, 128)
# Tokens of a prompt, none of them cached, and of an answer.
PROMPT, ANSWER = 512, 128


def added(steps: FittedSteps, slo_s: float = 0.0) -> FittedSteps:
    """The same steps with operating points of `RANKS`, by the formula of `operating_points` on the fitted steps.

    A sequence is halfway through its answer. The batch is at most the largest that the engine has compiled.

    Args:
        slo_s: seconds that a step may take; 0: 1.5 times one of one sequence without an adapter.
    """
    objective = Objective(slo_s or lenient_s(steps), PROMPT + ANSWER // 2, PROMPT / ANSWER, max(steps.decode.forms))
    return replace(steps, points=Points(objective, operating_points(steps, RANKS, objective)))
