"""The simulator's step-time model (`jlora.step_model.StepModel`), fitted to measured steps. No jax.

Least squares of the relative errors, with positive coefficients, from a prior. Coefficients that the
steps do not tell apart stay near it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from jlora.doctor import output
from jlora.model.spec import ModelSpec
from jlora.pallas.counts import Chip as Rated
from jlora.sim.hardware import Chip, Hardware
from jlora.step_model import FORMAT, StepLoad, StepModel

WISH = 0.01  # weight of the prior beside one measured step
STEP_S = 5e-4  # prior of a step's fixed part


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of the link: seconds of a copy = latency_s + bytes / bytes_per_s."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of memory (the better of reading alone and of copying), products, links."""

    bytes_per_s: float
    flops_per_s: float
    to_device: Link
    to_host: Link

    @property
    def chip(self) -> Rated:
        """For `Count.floor`: this device as it was measured."""
        return Rated("measured", self.bytes_per_s, self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: what it had to do, and the seconds it took."""

    load: StepLoad
    seconds: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """The model, and its median and worst relative error over the steps it was fitted to."""

    model: StepModel
    median_error: float
    worst_error: float


def hardware(spec: ModelSpec, rates: Rates) -> Hardware:
    """One device as it was measured, for the simulator: all of it reached, so the shares are 1."""
    link = min(rates.to_device.bytes_per_s, rates.to_host.bytes_per_s)
    chip = Chip("measured", rates.flops_per_s, 0.0, rates.bytes_per_s, link, link, 1.0, 1.0, 1.0, STEP_S, "measured")
    return Hardware(chip, 1, spec)


def fit(prior: StepModel, steps: Sequence[Measured]) -> Fitted:
    """Fits the model to at least one step, from a prior by counting (`hardware(...).step_model()`)."""
    known = np.array(astuple(prior))

    def model(factors: np.ndarray) -> StepModel:
        return StepModel(*map(float, factors * known))

    def errors(factors: np.ndarray) -> np.ndarray:
        made = model(factors)
        return np.array([made.seconds(step.load) / step.seconds - 1 for step in steps])

    def residuals(factors: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(factors), WISH * (factors - 1)])

    found = least_squares(residuals, np.ones(len(known)), bounds=(0, np.inf)).x
    off = np.abs(errors(found))
    return Fitted(model(found), float(np.median(off)), float(off.max()))


def record(prior: StepModel, steps: Sequence[Measured], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The file for the simulator; `facts` (model, device, ...) are for its readers."""
    fitted = fit(prior, steps)
    errors = {"median": fitted.median_error, "worst": fitted.worst_error, "steps": len(steps)}
    return {"format": FORMAT, **facts, "coefficients": asdict(fitted.model), "errors": errors, "prior": asdict(prior)}


def of_report(report: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    """`record` of one model's steps in a report of `jlora doctor`; None if it holds none."""
    values = report["models"][model]
    rows = [*values.get("steps", []), *values.get("adapters", [])]
    if not rows:
        return None
    name, _, kernels = model.partition(" ")
    facts = {
        "model": name,
        "kernels": kernels,  # "" where the job timed one kind
        "device": report["device"]["kind"],
        "chips": 1,
        "date": report["date"],
        "link": {name: report["rates"][name] for name in ("to_device", "to_host")},
    }
    measured = [Measured(StepLoad(**row["load"]), row["seconds"]) for row in rows]
    return record(StepModel(**values["prior"]), measured, facts)


def write(made: Mapping[str, Any], out: Path) -> Path:
    """Writes OUT/step-MODEL.json, which `jlora sim --steps` reads; named by its kernels too where there are two."""
    path = out / f"step-{'-'.join(filter(None, (made['model'], made.get('kernels'))))}.json"
    return output.write(path, json.dumps(made, indent=1) + "\n")
