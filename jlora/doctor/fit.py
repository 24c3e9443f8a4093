"""The simulator's step-time model (`jlora.sim.hardware.StepModel`), fitted to measured steps. No jax.

A step's time is linear in the eight coefficients once the deciding side of each roofline is known.
So the fit starts from a prior, finds the deciding sides, solves the linear problem and repeats until
the sides stay. Errors are relative, coefficients positive (non-negative least squares; Lawson and
Hanson 1974). Coefficients that the steps do not tell apart stay near the prior.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from jlora.model.spec import ModelSpec
from jlora.pallas.counts import Chip as Rated
from jlora.sim.hardware import FORMAT, Chip, Hardware, StepLoad, StepModel

WISH = 0.01  # weight of the prior beside one measured step
STEP_S = 5e-4  # prior of a step's fixed part
TURNS = 50
NAMES = tuple(field.name for field in dataclasses.fields(StepModel))


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

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Rates:
        """The inverse of `asdict`."""
        links = (Link(**found[name]) for name in ("to_device", "to_host"))
        return cls(found["bytes_per_s"], found["flops_per_s"], *links)


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
    known = np.array([getattr(prior, name) for name in NAMES])
    taken = np.array([step.seconds for step in steps])
    found, best, seen = known, (np.inf, known), set()
    for _ in range(TURNS):
        amounts = np.array([_amounts(found, step.load) for step in steps])
        sides = (amounts > 0).tobytes()
        if sides in seen:
            break
        seen.add(sides)
        # In units of the prior, so that the wish is the same for each.
        rows = np.vstack([amounts * known / taken[:, None], WISH * np.eye(len(known))])
        wanted = np.concatenate([np.ones(len(steps)), np.full(len(known), WISH)])
        found = nnls(rows, wanted)[0] * known
        error = float(np.sum(_errors(found, steps) ** 2))
        best = min(best, (error, found), key=lambda pair: pair[0])
    errors = np.abs(_errors(best[1], steps))
    return Fitted(_model(best[1]), float(np.median(errors)), float(errors.max()))


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
    facts = {
        "model": model,
        "device": report["device"]["kind"],
        "chips": 1,
        "date": report["date"],
        "link": {name: report["rates"][name] for name in ("to_device", "to_host")},
    }
    measured = [Measured(StepLoad(**row["load"]), row["seconds"]) for row in rows]
    return record(StepModel(**values["prior"]), measured, facts)


def write(made: Mapping[str, Any], out: Path) -> Path:
    """Writes OUT/step-MODEL.json, which `jlora sim --steps` reads."""
    path = out / f"step-{made['model']}.json"
    path.write_text(json.dumps(made, indent=1) + "\n")
    return path


def _model(values: np.ndarray) -> StepModel:
    return StepModel(**dict(zip(NAMES, map(float, values), strict=True)))


def _amounts(values: np.ndarray, load: StepLoad) -> list[float]:
    """How much of each coefficient a step has, where `values` say which sides decide (`StepModel.seconds`)."""
    c = _model(values)
    compute = load.prompt * c.prompt_token_s + load.decode * c.decode_token_s
    weights = c.weights_s >= compute
    context = load.context * c.context_token_s >= load.pairs * c.pair_s
    blocks = load.adapter_blocks * c.adapter_block_s >= load.adapter_tokens * c.adapter_token_s
    return [
        1.0,
        float(weights),
        load.prompt * float(not weights),
        load.decode * float(not weights),
        load.context * float(context),
        load.pairs * float(not context),
        load.adapter_blocks * float(blocks),
        load.adapter_tokens * float(not blocks),
    ]


def _errors(values: np.ndarray, steps: Sequence[Measured]) -> np.ndarray:
    model = _model(values)
    return np.array([model.seconds(step.load) / step.seconds - 1 for step in steps])
