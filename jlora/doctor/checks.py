"""Every kernel against the reference on this device: small cases in full, large ones while both are timed.

The kernels are those that dispatch would choose for the platform if asked for them; on a CPU they
are the TPU kernels in the interpreter. A kernel that a case's shape or dtype is not served by is
reported with the reason, never left out in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jlora.doctor.fit import Rates
from jlora.doctor.rates import seconds
from jlora.errors import ConfigError
from jlora.pallas import cases, counts
from jlora.pallas.cases import AttentionCase, LoraCase
from jlora.pallas.dispatch import Site, choose
from jlora.pallas.gpu_support import Gpu, refusal_of
from jlora.pallas.ops import Adapted, Ops, Pages
from jlora.pallas.reference import XLA

if TYPE_CHECKING:  # imported where there is a GPU
    from jlora.pallas.gpu_checks import Check

TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}  # of the largest value: products may use lower precision
REPEATS = {"cpu": 1, "gpu": 20, "tpu": 20}
JUNK = 100.0  # in memory that a kernel must not use; NaN would only show in one place

Case = AttentionCase | LoraCase
FAILURES = (jax.errors.JaxRuntimeError, AssertionError, NotImplementedError, TypeError, ValueError)


def kernels_for(case: Case) -> Ops:
    """This platform's kernels for a case; raises ConfigError with the reason where there are none."""
    device = jax.devices()[0]
    # On a CPU the TPU kernels, which `interpreter` runs.
    platform, kind = ("tpu", "interpreter") if device.platform == "cpu" else (device.platform, device.device_kind)
    one = isinstance(case, AttentionCase)
    shapes = ((len(case.rows) + case.padding, case.chunk),) if one else ((case.count, 1),)
    width = case.layout.blocks_for(case.spec.max_len)
    site = Site(platform, kind, case.layout, case.spec.heads, shapes, width, 64, Gpu.of(device))
    chosen = choose(site, "auto" if platform == "tpu" else "pallas")
    op = chosen.choices[0 if one else 1]
    if op.implementation == "xla":
        raise ConfigError(op.reason)
    return chosen.ops


def fitted(case: Case) -> Case:
    """The case with its units as the platform's kernels read them."""
    if isinstance(case, AttentionCase) or jax.default_backend() != "gpu":
        return case
    from jlora.pallas.gpu_support import fit_units

    return replace(case, fit=fit_units)


def interpreter() -> contextlib.AbstractContextManager[Any]:
    """On a CPU, TPU kernels inside run in the interpreter."""
    if jax.default_backend() != "cpu":
        return contextlib.nullcontext()
    from jlora.pallas.interpret import interpreted

    return interpreted()


def small_cases() -> list[Case]:
    """The cases that are compared with the reference."""
    return [*cases.SMALL_ATTENTION, *cases.SMALL_LORA]


def quick_cases() -> list[Case]:
    """One of each form, of the shapes that kernels of every platform serve: bfloat16, heads of 128, pages of 32."""
    half = replace(cases.TINY, dtype="bfloat16")
    attention = [c for c in cases.SMALL_ATTENTION if c.spec == half and c.block_tokens == 32]
    return [*attention, *(c for c in cases.SMALL_LORA if c.spec == half)]


def large_cases(small: bool) -> list[Case]:
    """The cases that are timed, those of the MLP last; `small`: two small cases, for a CPU."""
    if small:
        return [cases.SMALL_ATTENTION[0], cases.SMALL_LORA[0]]
    lora = [c for c in cases.LARGE_LORA if c.tp == 1]
    first = [c for c in lora if c.group in (("q", "k", "v"), ("o",))]
    mlp = [c for c in lora if c not in first and c.name.endswith(("8 adapters", "4 adapters"))]
    return [*(c for c in cases.LARGE_ATTENTION if c.tp == 1), *first, *mlp]


def checklist() -> Sequence[Check]:
    """Further checks of the NVIDIA kernels on a GPU (`gpu_checks`)."""
    from jlora.pallas import gpu_checks, gpu_ops

    if reason := gpu_ops.runtime_refusal() or refusal_of(jax.devices()[0]):
        return [gpu_checks.Check("all", lambda: gpu_checks.Finding(None, reason))]
    return gpu_checks.checks(gpu_checks.LARGE)


def checked(check: Check) -> dict[str, Any]:
    """A row of the checklist."""
    found = check.run()
    return {"case": check.name, "ok": found.passed, "seen": found.seen}


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
    with interpreter():
        got, want = (run(*args) for run, args in (launch(case, each, inputs) for each in (ops, XLA)))
    error = difference(case, got, want, least=1.0)
    return {**row, "ok": error < TOLERANCE[case.spec.dtype], "error": error}  # NaN is not less


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


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
            with interpreter():
                taken = seconds(calls(run, args), REPEATS[jax.default_backend()], 3)
                made[name] = run(*args)
        except ConfigError as e:
            row[f"{name}_reason"] = first_line(e)
        except FAILURES as e:
            row |= {f"{name}_reason": first_line(e)} | ({"ok": False} if name == "kernel" else {})
        else:
            row |= {f"{name}_us": taken * 1e6, f"{name}_share": floor / taken}
    if len(made) == 2:
        error = difference(case, made["kernel"], made["xla"])
        row |= {"error": error, "ok": error < TOLERANCE[case.spec.dtype]}  # NaN is not less
    return row


def difference(case: Case, got: Any, want: Any, least: float = 0.0) -> float:
    """The largest difference as a share of the largest value wanted, `least` at least. Found on the device.

    NaN where a result is NaN.
    """
    if isinstance(case, AttentionCase):
        valid = jnp.asarray(cases.attention_valid(case))[:, :, None, None]
        got, want = ([jnp.where(valid, x, 0)] for x in (got, want))

    def worst(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), least)

    return float(jnp.max(jnp.stack([jax.jit(worst)(a, b) for a, b in zip(got, want, strict=True)])))


def calls(run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[int], Any]:
    """For `seconds`: so many calls, enqueued together."""
    return lambda count: [run(*args) for _ in range(count)]


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
    for at, (name, entries) in enumerate(zip(case.group, active, strict=True)):
        unit = layout.units[name]
        ranks = [r if isinstance(r, int) else r[at] for r in case.ranks]
        counts = [min(rank - done, unit.per_block) for rank in ranks for done in range(0, rank, unit.per_block)]
        for block, count in zip(entries.blocks[entries.start : entries.stop], counts, strict=True):
            used[layout.blocks + block, : count * unit.slots] = True
    return used
