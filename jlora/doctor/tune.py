"""`jlora doctor tune`: measures block sizes of the kernels on this chip, for `jlora/pallas/tiles.json`.

The TPU's sizes are tuned here, an NVIDIA GPU's in `tune_gpu`. The result is the table with this chip's
part: a file to put in the package's place after review. On a CPU the LoRA kernel runs in the interpreter
on a small case, which says nothing about speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jlora.doctor import checks
from jlora.errors import ConfigError
from jlora.model.sharding import all_devices
from jlora.pallas import cases
from jlora.pallas.cases import AttentionCase
from jlora.pallas.ops import Ops
from jlora.pallas.reference import XLA
from jlora.pallas.tiles import AttentionShape, Chip, LoraShape, chip_of, load
from jlora.pallas.tpu_attention import TpuAttention
from jlora.pallas.tpu_lora import TpuLora

CANDIDATES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "lora": {"units": (64, 128, 256), "tokens": (128, 256, 512), "rows": (128, 256, 512)},
    "attention": {"kv_tokens": (128, 256, 512, 1024), "queries": (8, 16, 32, 64, 128)},
}
QUICK: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "lora": {"units": (16, 32)},
}
PASSES, ROUNDS = 2, 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tuned: of which kernels, and how long.

    Attributes:
        quick: fewer shapes.
        until: no launch is timed later, on the monotonic clock.
    """

    quick: bool = False
    only: Collection[str] = ("decode", "prefill", "lora")
    until: float = float("inf")

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until


@dataclass(frozen=True, slots=True)
class Tried:
    """One search: every choice of sizes that ran with its seconds, and the fastest."""

    times: Mapping[str, float]
    best: Mapping[str, Any]


def descend(
    start: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]], timed: Callable[[Mapping[str, Any]], float]
) -> Tried:
    """Coordinate descent: varies one size at a time, keeps the fastest; `timed` is infinite if it does not compile."""
    best, times = dict(start), {}

    def known(sizes: Mapping[str, Any]) -> float:
        name = ", ".join(f"{key}={value}" for key, value in sizes.items())
        if name not in times:
            times[name] = timed(sizes)
            print(f"{name}: {1e6 * times[name]:.1f} us", flush=True)
        return times[name]

    for _ in range(PASSES):
        for name, values in candidates.items():
            best = min(({**best, name: value} for value in (best[name], *values)), key=known)
    return Tried({name: taken for name, taken in times.items() if taken < float("inf")}, best)


def launch_seconds(case: checks.Case, ops: Ops, inputs: tuple[Any, ...]) -> float:
    """Seconds of a kernel's launch on the case; infinite where its sizes do not fit or do not compile."""
    run, args = checks.launch(case, ops, inputs)
    try:
        return checks.call_seconds(case, run, args, ROUNDS)
    except Exception as e:  # whatever a compiler refuses a choice with, the others go on
        print(f"passed over: {checks.first_line(e)}", flush=True)
        return float("inf")


def run(plan: Plan, save: Callable[[dict[str, Any]], None] = lambda found: None) -> dict[str, Any]:
    """Tunes large cases of this chip (a small one on a CPU); `save` is given what is found after each.

    Raises:
        ConfigError: the device is unknown, or jax finds none although it was installed for one.
    """
    device = all_devices()[0]
    if device.platform == "gpu":
        from jlora.doctor import tune_gpu  # jax's front of Mosaic GPU needs a GPU

        return tune_gpu.run(plan, save)
    small = device.platform == "cpu"
    chip = chip_of("interpreter" if small else device.device_kind)
    if chip is None or device.platform not in ("cpu", "tpu"):
        raise ConfigError(f"tiles.json has no TPU {device.device_kind!r}: add its memory sizes first")
    found: dict[str, Tried] = {}
    for case in cases_for(plan.quick, small):
        key, _ = _start(case, chip)
        if key in found or kernel_of(case) not in plan.only or plan.late:
            continue
        found[key] = tune(case, chip, QUICK if small else CANDIDATES, plan)
        print(f"{key}: {dict(found[key].best)}", flush=True)
        save(_result(chip, found))
    return _result(chip, found)


def _result(chip: Chip, found: Mapping[str, Tried]) -> dict[str, Any]:
    table = load()
    tuned = {key: dict(tried.best) for key, tried in found.items() if tried.times}
    known = {**table["tuned"].get(chip.name, {}), **tuned}  # what was tuned before stays
    table = {**table, "tuned": {**table["tuned"], chip.name: known}}
    return {"chip": chip.name, "times": {key: dict(t.times) for key, t in found.items()}, "tiles": table}


def kernel_of(case: checks.Case) -> str:
    """The name that `--only` has for its kernel."""
    return "lora" if not isinstance(case, AttentionCase) else "decode" if case.chunk == 1 else "prefill"


def tune(case: checks.Case, chip: Chip, candidates: Mapping[str, Mapping[str, tuple[int, ...]]], plan: Plan) -> Tried:
    """Searches one shape's sizes."""
    inputs = checks.random_inputs(case)
    key, start = _start(case, chip)

    def timed(sizes: Mapping[str, Any]) -> float:
        if plan.late:
            return float("inf")
        sized = replace(chip, tuned={key: sizes})
        interpret = jax.default_backend() == "cpu"
        return launch_seconds(case, replace(XLA, attention=TpuAttention(sized), lora=TpuLora(sized, interpret)), inputs)

    return descend(start, candidates["attention" if isinstance(case, AttentionCase) else "lora"], timed)


def _start(case: checks.Case, chip: Chip) -> tuple[str, dict[str, int]]:
    """The shape's name in the table, and the sizes it has now."""
    if isinstance(case, AttentionCase):
        shape = AttentionShape.of(case.layout, case.spec.heads, len(case.rows) + case.padding, case.chunk)
        tiles = chip.attention(shape)
        return shape.key, {"kv_tokens": tiles.kv_tokens, "queries": tiles.queries}
    shape = LoraShape.of(case.layout, case.group, case.count)
    tiles = chip.lora(shape)
    return shape.key, {"tokens": tiles.tokens, "rows": tiles.rows, "units": tiles.units}


def cases_for(quick: bool, small: bool) -> list[checks.Case]:
    """What a TPU is tuned on; `quick`: one model on one chip. `small`: for a CPU."""
    if small:
        return [cases.SMALL_LORA[1]]
    todo: list[checks.Case] = [*cases.LARGE_ATTENTION, *cases.LARGE_LORA]
    return [c for c in todo if not quick or (c.tp == 1 and c.spec == cases.LLAMA3_8B)]
