"""`jlora doctor tune` on an NVIDIA GPU: block sizes of the Mosaic GPU kernels, by chip and model shape.

The result is `tiles.json` with this chip's part under `gpu`; a size that is the default is not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import jax

from jlora.doctor import checks
from jlora.doctor.checklist import ops_of
from jlora.doctor.tune import Tried, descend, launch_seconds
from jlora.errors import ConfigError
from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.pallas import cases, gpu_ops
from jlora.pallas.gpu_ops import GpuTiles, key_of, tiles_of
from jlora.pallas.gpu_support import fit_units, refusal_of
from jlora.pallas.tiles import load

# kernel -> size -> values to try
CANDIDATES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "decode": {"stages": (2, 3), "blocks": (264, 396, 528)},
    "prefill": {"stages": (2, 3), "registers": (False, True)},
    "lora": {"chunks": ((2, 4), (4, 8), (8, 16)), "blocks": (132, 264, 396), "stages": ((2, 3, 3), (3, 3, 4))},
}


def run(quick: bool) -> dict[str, Any]:
    """Tunes both models' shapes (`quick`: one's) on this GPU.

    Raises:
        ConfigError: this jax or this GPU cannot run the kernels.
    """
    device = jax.devices()[0]
    if reason := gpu_ops.runtime_refusal() or refusal_of(device):
        raise ConfigError(f"tune: {reason}")
    kind = device.device_kind
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, Any] = {}
    for spec in (cases.LLAMA3_8B,) if quick else (cases.LLAMA3_8B, cases.LLAMA2_7B):
        layout = fit_units(PoolLayout.of(spec, 1, 32))
        key, best = key_of(layout, spec.heads), tiles_of(kind, layout, spec.heads)
        for kernel in CANDIDATES:
            tried = tune(best, kernel, cases_of(spec, kernel))
            best = replace(best, **{kernel: replace(getattr(best, kernel), **tried.best)})
            times[f"{key} {kernel}"] = dict(tried.times)
            print(f"{key}: {kernel}: {dict(tried.best)}", flush=True)
        found[key] = {name: changed for name in CANDIDATES if (changed := _changed(getattr(best, name)))}
    table = load()
    return {"chip": kind, "times": times, "tiles": {**table, "gpu": {**table["gpu"], kind: found}}}


def cases_of(spec: ModelSpec, kernel: str) -> list[checks.Case]:
    """The large cases that a kernel is timed on."""
    if kernel == "lora":
        return [replace(c, fit=fit_units) for c in cases.LARGE_LORA if c.spec == spec and c.tp == 1]
    form = {"decode": 1, "prefill": 32}[kernel]
    return [c for c in cases.LARGE_ATTENTION if c.spec == spec and c.tp == 1 and c.chunk == form]


def tune(start: GpuTiles, kernel: str, todo: Sequence[checks.Case]) -> Tried:
    """Searches one kernel's sizes, from `start`."""
    inputs = [checks.random_inputs(case) for case in todo]
    sizes_now = getattr(start, kernel)

    def time(sizes: Mapping[str, Any]) -> float:
        tiles = replace(start, **{kernel: replace(sizes_now, **sizes)})
        return sum(launch_seconds(c, ops_of(c, tiles), x) for c, x in zip(todo, inputs, strict=True))

    return descend({name: getattr(sizes_now, name) for name in CANDIDATES[kernel]}, CANDIDATES[kernel], time)


def _changed(sizes: Any) -> dict[str, Any]:
    plain = {field.name: field.default for field in fields(sizes)}
    return {name: value for name, value in asdict(sizes).items() if value != plain[name]}
