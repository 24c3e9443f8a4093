"""`jlora doctor tune`: measures block sizes of the kernels on this chip, for `jlora/pallas/tiles.json`.

Here the TPU's; an NVIDIA GPU's are in `tune_gpu`.

Each shape starts from what the table has; one number at a time is varied, and what is fastest is
kept (coordinate descent, two passes). Sizes that do not fit or do not compile are passed over. The
result is the table with a `tuned` part for this chip: a file to put in the package's place after
looking at it. On a CPU the kernels run in the interpreter on small cases, which tests the way and
says nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jlora.doctor import checks
from jlora.doctor.rates import seconds
from jlora.errors import ConfigError
from jlora.layout import BYTES
from jlora.pallas import cases
from jlora.pallas.cases import AttentionCase
from jlora.pallas.tiles import AttentionShape, Chip, LoraShape, chip_of, load
from jlora.pallas.tpu_attention import TpuAttention
from jlora.pallas.tpu_lora import TpuLora

CANDIDATES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "lora": {"units": (64, 128, 256), "tokens": (128, 256, 512), "rows": (128, 256, 512)},
    "attention": {"kv_tokens": (128, 256, 512, 1024), "queries": (8, 16, 32, 64, 128)},
}
QUICK: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "lora": {"units": (16, 32)},
    "attention": {"kv_tokens": (32, 64)},
}
PASSES = 2


@dataclass(frozen=True, slots=True)
class Tried:
    """One shape's search: every size that ran with its seconds, and the best."""

    key: str
    times: Mapping[str, float]
    best: Mapping[str, int]


def run(quick: bool) -> dict[str, Any]:
    """Tunes every large case of this chip (small ones in miniature).

    Raises:
        ConfigError: the device is no GPU, no TPU that the table knows, and no CPU.
    """
    if jax.default_backend() == "gpu":
        from jlora.doctor import tune_gpu  # jax's front of Mosaic GPU is for those who have one

        return tune_gpu.run(quick)
    small = jax.default_backend() == "cpu"
    device = jax.devices()[0]
    chip = chip_of("interpreter" if small else device.device_kind)
    if chip is None or device.platform not in ("cpu", "tpu"):
        raise ConfigError(f"tiles.json has no TPU {device.device_kind!r}: add its memory sizes first")
    found: dict[str, Tried] = {}
    for case in _cases(quick or small, small):
        tried = tune(case, chip, QUICK if small else CANDIDATES)
        if tried.key not in found:
            found[tried.key] = tried
            print(f"{tried.key}: {dict(tried.best)}", flush=True)
    tuned = {key: dict(tried.best) for key, tried in found.items()}
    table = {**load(), "tuned": {**load()["tuned"], chip.name: tuned}}
    return {"chip": chip.name, "times": {key: dict(t.times) for key, t in found.items()}, "tiles": table}


def tune(case: checks.Case, chip: Chip, candidates: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Tried:
    """Coordinate descent over one shape's sizes."""
    inputs = checks.random_inputs(case)
    kind = "attention" if isinstance(case, AttentionCase) else "lora"
    key, best = _start(case, chip)
    times: dict[str, float] = {}

    def time(sizes: Mapping[str, int]) -> float:
        name = ", ".join(f"{k}={v}" for k, v in sizes.items())
        if name not in times:
            times[name] = _seconds(case, inputs, replace(chip, tuned={key: sizes}))
        return times[name]

    for _ in range(PASSES):
        for field, values in candidates[kind].items():
            best = min(({**best, field: value} for value in (best[field], *values)), key=time)
    ran = {name: taken for name, taken in times.items() if taken < float("inf")}
    return Tried(key, ran, best)


def _start(case: checks.Case, chip: Chip) -> tuple[str, dict[str, int]]:
    """The shape's name in the table, and the sizes it has now."""
    layout, size = case.layout, BYTES[case.spec.dtype]
    if isinstance(case, AttentionCase):
        heads, kv_heads = case.spec.heads // case.tp, layout.kv_heads // case.tp
        tokens = (len(case.rows) + case.padding) * case.chunk
        shape = AttentionShape(tokens, case.chunk, heads, kv_heads, layout.head_dim, case.block_tokens, size)
        tiles = chip.attention(shape)
        return shape.key, {"kv_tokens": tiles.kv_tokens, "queries": tiles.queries}
    units = [layout.units[name] for name in case.group]
    outputs, slots, per_block = (tuple(getattr(u, n) for u in units) for n in ("b", "slots", "per_block"))
    slot = 2 * layout.kv_heads // case.tp * layout.head_dim * size
    shape = LoraShape(case.count, case.input_width, outputs, slots, per_block, slot, size)
    tiles = chip.lora(shape)
    return shape.key, {"tokens": tiles.tokens, "rows": tiles.rows, "units": tiles.units}


def _seconds(case: checks.Case, inputs: tuple[Any, ...], chip: Chip) -> float:
    """Seconds of a launch; infinite where these sizes do not fit or do not compile."""
    if isinstance(case, AttentionCase):
        run: Callable[..., Any] = jax.jit(TpuAttention(chip))
        args = inputs
    else:
        run, args = checks.jitted(TpuLora(chip), inputs), checks.flat(inputs)
    try:
        with checks.interpreter():
            return seconds(checks.calls(run, args), checks.REPEATS[jax.default_backend()], 3)
    except (ConfigError, *checks.FAILURES) as e:
        print(f"passed over: {checks.first_line(e)}", flush=True)
        return float("inf")


def _cases(few: bool, small: bool) -> list[checks.Case]:
    if small:
        return [cases.SMALL_LORA[1], cases.SMALL_ATTENTION[0]]
    todo: list[checks.Case] = [*cases.LARGE_ATTENTION, *cases.LARGE_LORA]
    return [c for c in todo if not few or c.tp == 1]
