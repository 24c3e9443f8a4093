"""Every kernel against the reference on this device: small cases in full, large ones while both are timed.

The kernels are those that dispatch would choose for the platform if asked for them. On a CPU the TPU's
LoRA kernel runs in jax's interpreter. A case without a kernel is reported with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlora.doctor.fit import Rates
from jlora.doctor.rates import seconds
from jlora.errors import ConfigError
from jlora.pallas import cases, counts
from jlora.pallas.cases import AttentionCase, LoraCase
from jlora.pallas.dispatch import Site, choose
from jlora.pallas.gpu_support import Gpu, fit_units
from jlora.pallas.ops import GROUPS, Adapted, Ops, Pages
from jlora.pallas.reference import XLA
from jlora.pallas.tiles import chip_of

TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}  # of the largest value: products may use lower precision
CALLS = {"cpu": 1, "gpu": 20, "tpu": 20}  # in the one program that is timed
MODERATE = ("8 adapters", "4 adapters")  # how the names of the cases end that have neither one adapter nor many
JUNK = 100.0  # in memory that a kernel must not use; NaN would only show in one place

Case = AttentionCase | LoraCase


def kernels_for(case: Case) -> Ops:
    """This platform's kernels for a case; raises ConfigError with the reason where there are none."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _interpreted(case)
    one = isinstance(case, AttentionCase)
    shapes = ((len(case.rows) + case.padding, case.chunk),) if one else ((case.count, 1),)
    width = case.layout.blocks_for(case.spec.max_len)
    # Attention reads no units: those of its case need not be such as a GPU's adapter kernel reads.
    layout = fit_units(case.layout) if one and device.platform == "gpu" else case.layout
    site = Site(device.platform, device.device_kind, layout, case.spec.heads, shapes, width, 64, Gpu.of(device))
    chosen = choose(site, "auto" if device.platform == "tpu" else "pallas")
    op = chosen.choices[0 if one else 1]
    if op.implementation == "xla":
        raise ConfigError(op.reason)
    return chosen.ops


def _interpreted(case: Case) -> Ops:
    if isinstance(case, AttentionCase):
        raise ConfigError("jax's attention kernel for TPUs does not run on a CPU")
    from jlora.pallas.tpu_lora import TpuLora  # other platforms do not load the TPU compiler's front end

    chip = chip_of("interpreter")
    assert chip is not None
    return replace(XLA, lora=TpuLora(chip, interpret=True))


def fitted(case: Case) -> Case:
    """The case with its units as the platform's kernels read them."""
    if isinstance(case, AttentionCase) or jax.default_backend() != "gpu":
        return case
    return replace(case, fit=fit_units)


def quick_cases() -> list[Case]:
    """One of each form, of the shapes that kernels of every platform serve: bfloat16, heads of 128, pages of 32."""
    half = replace(cases.TINY, dtype="bfloat16")
    attention = [c for c in cases.SMALL_ATTENTION if c.spec == half and c.block_tokens == 32]
    return [*attention, *(c for c in cases.SMALL_LORA if c.spec == half)]


def large_cases(small: bool, quick: bool = False) -> list[Case]:
    """The cases that are timed, whenever time ends: in turn of each model and op, the most telling first.

    `small`: two small cases, for a CPU. `quick`: four of each op, of one model.
    """
    if small:
        return [cases.SMALL_ATTENTION[0], cases.SMALL_LORA[0]]
    specs = (cases.LLAMA3_8B,) if quick else (cases.LLAMA3_8B, cases.LLAMA2_7B)
    every = [c for c in (*cases.LARGE_ATTENTION, *cases.LARGE_LORA) if c.tp == 1]
    kinds = (AttentionCase, LoraCase)
    lists = [_telling([c for c in every if c.spec == s and isinstance(c, k)]) for s in specs for k in kinds]
    turns = itertools.zip_longest(*(each[:4] if quick else each for each in lists))
    return [case for turn in turns for case in turn if case is not None]


def _telling(todo: Sequence[Case]) -> list[Case]:
    """One op's cases in order: full decode and long prompts; q, k, v before o; the MLP last, and two of its loads."""
    order = ("64 x 1k", "2048", "1 x 1k", "512", "8 adapters", "mixed ranks", "4 adapters", "1 adapter", "8 x 1k")

    def place(case: Case) -> tuple[int, int]:
        group = 0 if isinstance(case, AttentionCase) else GROUPS.index(case.group)
        return group, next((i for i, end in enumerate(order) if case.name.endswith(f" {end}")), len(order))

    left = [c for c in todo if isinstance(c, AttentionCase) or c.group in GROUPS[:2] or c.name.endswith(MODERATE)]
    return sorted(left, key=place)


def compare(case: Case) -> dict[str, Any]:
    """A small case's largest difference to the reference, or why it has no kernel."""
    case = fitted(case)
    row: dict[str, Any] = {"case": case.name}
    try:
        ops = kernels_for(case)
    except ConfigError as e:
        return {**row, "ok": None, "reason": str(e)}
    attends = isinstance(case, AttentionCase)
    inputs = cases.attention_inputs(case, junk=JUNK) if attends else cases.lora_inputs(case, junk=JUNK)
    got, want = (run(*args) for run, args in (launch(case, each, inputs) for each in (ops, XLA)))
    error = difference(case, got, want, least=1.0)
    return {**row, "ok": error < TOLERANCE[case.spec.dtype], "error": error}  # NaN is not less


def first_line(error: BaseException) -> str:
    """An error in one line."""
    kind = "not on this device" if isinstance(error, ConfigError) else type(error).__name__
    return f"{kind}: {error}".partition("\n")[0][:300]


def launch(case: Case, ops: Ops, inputs: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The case's op as a compiled function, and its arguments: arrays only."""
    if isinstance(case, AttentionCase):
        return jax.jit(ops.attention), inputs
    x, pool, first, projections, adapters = inputs
    units = [p.unit for p in projections]

    def call(x: Any, pool: Any, first: Any, bases: Any, active: Any, adapters: Any) -> Any:
        return ops.lora(x, pool, first, [Adapted(*p) for p in zip(bases, active, units, strict=True)], adapters)

    return jax.jit(call), (x, pool, first, [p.base for p in projections], [p.active for p in projections], adapters)


def timed(case: Case, rates: Rates) -> dict[str, Any]:
    """A large case: seconds of kernel and reference, and of the roofline's floor; whether both agree."""
    case = fitted(case)
    inputs, made = random_inputs(case), {}
    count = counts.attention(case) if isinstance(case, AttentionCase) else counts.lora(case)
    floor = count.floor(rates.chip)
    row: dict[str, Any] = {"case": case.name, "bytes": count.bytes, "flops": count.flops, "floor_us": floor * 1e6}
    for name in ("kernel", "xla"):
        try:
            ops = XLA if name == "xla" else kernels_for(case)
            run, args = launch(case, ops, inputs)
            taken = call_seconds(case, run, args, 3)
            made[name] = run(*args)
        except ConfigError as e:
            row[f"{name}_reason"] = first_line(e)
        except Exception as e:  # compilers have errors of their own
            row |= {f"{name}_reason": first_line(e)} | ({"ok": False} if name == "kernel" else {})
        else:
            row |= {f"{name}_us": taken * 1e6, f"{name}_share": floor / taken}
    if len(made) == 2:
        error = difference(case, made["kernel"], made["xla"])
        row |= {"error": error, "ok": error < TOLERANCE[case.spec.dtype]}  # NaN is not less
    return row


def difference(case: Case, got: Any, want: Any, least: float = 0.0) -> float:
    """The largest difference as a share of the largest value wanted, `least` at least; NaN where a result is NaN."""
    if isinstance(case, AttentionCase):
        valid = jnp.asarray(cases.attention_valid(case))[:, :, None, None]
        got, want = ([jnp.where(valid, x, 0)] for x in (got, want))

    def worst(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), least)

    return float(jnp.max(jnp.stack([jax.jit(worst)(a, b) for a, b in zip(got, want, strict=True)])))


def call_seconds(case: Case, run: Callable[..., Any], args: tuple[Any, ...], rounds: int) -> float:
    """Seconds of one call of the case's op among many in one program, as in a step: each takes the last one's result.

    To dispatch a program takes the host longer than a small kernel runs.
    """
    count, at = CALLS[jax.default_backend()], 0 if isinstance(case, AttentionCase) else 3  # the queries; the bases

    @jax.jit
    def many(*args: Any) -> Any:
        turn = list(args)
        for _ in range(count):
            turn[at] = run(*turn)
        return turn[at]

    return seconds(lambda n: [many(*args) for _ in range(n)], 1, rounds) / count


def random_inputs(case: Case) -> tuple[Any, ...]:
    """The case's index lists with contents made on the device: a large pool never crosses the link.

    Of a size that shows what is wrong: scores of attention are of the order of 1, and what adapters
    add is about as large as their base.
    """
    attends = isinstance(case, AttentionCase)
    abstract = cases.attention_shapes(case) if attends else cases.lora_shapes(case)
    scale = 1.0 if attends else 0.05
    random = jax.jit(
        lambda shape, dtype, seed: (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype),
        static_argnums=(0, 1),
    )
    x, pool = (random(a.shape, a.dtype, seed) for seed, a in enumerate(abstract[:2]))
    first = jnp.int32(case.layout.blocks)
    if isinstance(case, AttentionCase):
        return x, pool, first, Pages(*(jnp.asarray(v) for v in cases.attention_pages(case)))
    active, adapters = cases.lora_lists(case)
    pool = jnp.where(used_slots(case)[:, :, None, None], pool, 0)
    bases = [random(p.base.shape, p.base.dtype, 2 + i) for i, p in enumerate(abstract[3])]
    units = [case.layout.units[name] for name in case.group]
    placed = [type(a)(*(jnp.asarray(v) for v in a)) for a in active]
    return x, pool, first, [Adapted(*p) for p in zip(bases, placed, units, strict=True)], jnp.asarray(adapters)


def used_slots(case: LoraCase) -> np.ndarray:
    """[rows, B] which slots of the pool hold units of adapters: the others are zero, as kernels may rely on."""
    layout = case.layout
    active, _ = cases.lora_lists(case)
    used = np.zeros((layout.layers * layout.blocks, layout.block_tokens), bool)
    for name, entries in zip(case.group, active, strict=True):
        unit = layout.units[name]
        left = [rank - done for rank in case.ranks_of(name) for done in range(0, rank, unit.per_block)]
        for block, rank in zip(entries.blocks[entries.start : entries.stop], left, strict=True):
            used[layout.blocks + block, : min(rank, unit.per_block) * unit.slots] = True
    return used
