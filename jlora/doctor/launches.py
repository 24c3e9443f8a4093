"""Fits `jlora.step_model.FittedSteps` to the timed steps of an engine, beside CaraServe's two forms. No jax.

Least squares of the relative errors, with coefficients of at least 0 and a loss that forgives outliers:
another program on the machine delays single steps.

Source of `padded` and `unpadded`: CaraServe (Li et al. 2024), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import least_squares

from jlora.doctor.profile import Timed
from jlora.step_model import Launches, StepLoad

FORGIVEN = 0.05  # relative error beyond which a step counts less
TERMS = ("context_s", "pair_s", "adapters_s", "block_s", "spread_s", "token_s")

Forms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted part of `FittedSteps`."""

    fixed_s: float
    decode: Launches
    prompt: Launches

    def seconds(self, step: Timed) -> float:
        """Of a step, as predicted."""
        launches = ((self.decode, step.decode), (self.prompt, step.prompt))
        return self.fixed_s + sum(kind.seconds(load) for kind, load in launches if load is not None)


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a form describes some steps: R², and relative errors."""

    r2: float
    median: float
    p90: float
    steps: int


def fit(steps: Sequence[Timed], decode: Forms, prompt: Forms) -> Fit:
    """Fits all coefficients at once; the forms are those that are compiled. At least one step."""
    rows = np.array([_terms(step, decode, prompt) for step in steps])
    found = _solve(rows, np.array([step.least_s for step in steps]))
    middle = 1 + len(decode) + len(TERMS)
    seen = rows.any(axis=0)
    return Fit(
        float(found[0]),
        _launches(decode, found[1:middle], seen[1:middle]),
        _launches(prompt, found[middle:], seen[middle:]),
    )


def caraserve(steps: Sequence[Timed], decode: Forms) -> dict[str, Callable[[Timed], float]]:
    """Both of CaraServe's forms for steps that decode: a line each, and a line beside our terms of the base."""
    seconds = np.array([step.least_s for step in steps])
    made: dict[str, Callable[[Timed], float]] = {}
    for name, size in (("padded", padded), ("unpadded", unpadded)):
        for more, base in (("", lambda _: [1.0]), (" and the base's terms", partial(_base, decode))):
            made[name + more] = _line(steps, seconds, lambda step, size=size, base=base: [*base(step), size(step)])
    return made


def _line(steps: Sequence[Timed], seconds: np.ndarray, row: Callable[[Timed], list[float]]) -> Callable[[Timed], float]:
    found = _solve(np.array([row(step) for step in steps]), seconds)
    return lambda step: float(found @ row(step))


def _base(decode: Forms, step: Timed) -> list[float]:
    """Our terms of a decode step, without its adapters'."""
    assert step.decode is not None
    terms = _of_launch(step.decode._replace(adapter_blocks=0, adapter_tokens=0), decode)
    return [1.0, *terms]


def padded(step: Timed) -> float:
    """Sequences times the highest rank."""
    return len(step.ranks) * max(step.ranks, default=0)


def unpadded(step: Timed) -> float:
    """Sum of ranks."""
    return sum(step.ranks)


def quality(predict: Callable[[Timed], float], steps: Sequence[Timed]) -> Quality:
    """Of predictions for some steps; at least two."""
    seconds, told = (np.array(list(map(of, steps))) for of in (lambda step: step.least_s, predict))
    errors = np.abs(told / seconds - 1)
    r2 = 1 - float(((seconds - told) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum())
    return Quality(r2, float(np.median(errors)), float(np.percentile(errors, 90)), len(steps))


def noise(steps: Sequence[Timed]) -> Quality:
    """The same of repeats: the least of a step's even rounds against that of its odd rounds."""
    halves = [(min(step.seconds[::2]), min(step.seconds[1::2])) for step in steps]
    errors = np.array([abs(one / other - 1) for one, other in halves])
    return Quality(float("nan"), float(np.median(errors)), float(np.percentile(errors, 90)), len(steps))


def _terms(step: Timed, decode: Forms, prompt: Forms) -> list[float]:
    return [1.0, *_of_launch(step.decode, decode), *_of_launch(step.prompt, prompt)]


def _of_launch(load: StepLoad | None, forms: Forms) -> list[float]:
    """The numbers beside a launch's coefficients: its form's, and `TERMS`'."""
    if load is None:
        return [0.0] * (len(forms) + len(TERMS))
    padded_rows = next(size for size in forms if size >= load.rows)
    blocks = load.adapter_blocks
    # Of a sequence that decodes, context and pairs are the same.
    pairs = load.pairs if load.prompt else 0.0
    terms = [load.context, pairs, padded_rows * float(blocks > 0), blocks, blocks * padded_rows, load.adapter_tokens]
    return [float(size == padded_rows) for size in forms] + terms


def _solve(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    used = rows.any(axis=0)
    scale = np.where(used, rows.max(axis=0), 1.0)
    weighed = (rows / scale)[:, used] / seconds[:, None]

    def residuals(factors: np.ndarray) -> np.ndarray:
        return weighed @ factors - 1

    start = np.full(weighed.shape[1], seconds.min() / weighed.shape[1])
    found = least_squares(residuals, start, bounds=(0, np.inf), loss="soft_l1", f_scale=FORGIVEN)
    whole = np.zeros(rows.shape[1])
    whole[used] = found.x
    return whole / scale


def _launches(forms: Forms, found: np.ndarray, seen: np.ndarray) -> Launches:
    """Forms that no step had lie on the line between their neighbours."""
    count = len(forms)
    known = [i for i in range(count) if seen[i]]
    table = np.interp(forms, [forms[i] for i in known], found[known]) if known else np.zeros(count)
    made = {size: float(value) for size, value in zip(forms, table, strict=True)}
    return Launches(made, **dict(zip(TERMS, map(float, found[count:]), strict=True)))
