"""`jlora doctor tune` on an NVIDIA GPU: block sizes of the Mosaic GPU kernels, by chip and model shape.

The result is `tiles.json` with this chip's part under `gpu`; a size that is the default is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import jax

from jlora.doctor import checks
from jlora.doctor.checklist import ops_of
from jlora.doctor.tune import Plan, Tried, descend, kernel_of, launch_seconds
from jlora.errors import ConfigError
from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.pallas import cases, gpu_ops
from jlora.pallas.cases import LoraCase
from jlora.pallas.gpu_ops import GpuTiles, key_of, tiles_of
from jlora.pallas.gpu_support import fit_units, refusal_of
from jlora.pallas.ops import GROUPS
from jlora.pallas.tiles import load

# kernel -> size -> values to try
CANDIDATES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "decode": {"stages": (2, 3), "blocks": (264, 396, 528)},
    "prefill": {"stages": (2, 3), "registers": (False, True)},
    "lora": {"chunks": ((2, 4), (4, 8), (8, 16)), "blocks": (132, 264, 396), "stages": ((2, 3, 3), (3, 3, 4))},
}


def run(plan: Plan, save: Callable[[dict[str, Any]], None] = lambda found: None) -> dict[str, Any]:
    """Tunes both models' shapes (quick: one's) on this GPU; `save` is given what is found after each kernel.

    Raises:
        ConfigError: this jax or this GPU cannot run the kernels.
    """
    device = jax.devices()[0]
    if reason := gpu_ops.runtime_refusal() or refusal_of(device):
        raise ConfigError(f"tune: {reason}")
    kind = device.device_kind
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for spec in (cases.LLAMA3_8B,) if plan.quick else (cases.LLAMA3_8B, cases.LLAMA2_7B):
        layout = fit_units(PoolLayout.of(spec, 1, 32))
        key, best = key_of(layout, spec.heads), tiles_of(kind, layout, spec.heads)
        for kernel in CANDIDATES:
            if kernel not in plan.only or plan.late:
                continue
            tried = tune(best, kernel, cases_of(spec, kernel, plan.quick), plan)
            best = replace(best, **{kernel: replace(getattr(best, kernel), **tried.best)})
            times[f"{key} {kernel}"] = dict(tried.times)
            print(f"{key}: {kernel}: {dict(tried.best)}", flush=True)
            found[key] = {name: changed for name in CANDIDATES if (changed := _changed(getattr(best, name)))}
            result = _result(kind, found, times)
            save(result)
    return result or _result(kind, found, times)


def _result(kind: str, found: Mapping[str, Any], times: Mapping[str, Any]) -> dict[str, Any]:
    table = load()
    known = {**table["gpu"].get(kind, {}), **found}  # what was tuned before stays
    return {"chip": kind, "times": dict(times), "tiles": {**table, "gpu": {**table["gpu"], kind: known}}}


def cases_of(spec: ModelSpec, kernel: str, quick: bool = False) -> list[checks.Case]:
    """The large cases that a kernel is timed on; `quick`: of LoRA, decode and prompts of attention's projections."""
    every: list[checks.Case] = [*cases.LARGE_ATTENTION, *(replace(c, fit=fit_units) for c in cases.LARGE_LORA)]
    mine = [c for c in every if c.spec == spec and c.tp == 1 and kernel_of(c) == kernel]
    if not quick or kernel != "lora":
        return mine
    return [c for c in mine if isinstance(c, LoraCase) and c.group in GROUPS[:2] and c.name.endswith(checks.MODERATE)]


def tune(start: GpuTiles, kernel: str, todo: Sequence[checks.Case], plan: Plan) -> Tried:
    """Searches one kernel's sizes, from `start`."""
    inputs = [checks.random_inputs(case) for case in todo]
    sizes_now = getattr(start, kernel)

    def timed(sizes: Mapping[str, Any]) -> float:
        tiles, total = replace(start, **{kernel: replace(sizes_now, **sizes)}), 0.0
        for case, x in zip(todo, inputs, strict=True):
            total += float("inf") if plan.late else launch_seconds(case, ops_of(case, tiles), x)
            if total == float("inf"):
                break
        return total

    return descend({name: getattr(sizes_now, name) for name in CANDIDATES[kernel]}, CANDIDATES[kernel], timed)


def _changed(sizes: Any) -> dict[str, Any]:
    plain = {field.name: field.default for field in fields(sizes)}
    return {name: value for name, value in asdict(sizes).items() if value != plain[name]}
