"""The NVIDIA LoRA kernels in the interpreter, against the reference in float32."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.doctor.checklist import room_of
from jlora.pallas import reference
from jlora.pallas.cases import TINY, TINY64, LoraCase, lora_inputs
from jlora.pallas.gpu_lora import LoraTiles, lora
from jlora.pallas.gpu_ops import Limits, lora_op, runtime_refusal
from jlora.pallas.gpu_plan import Room
from jlora.pallas.gpu_support import fit_units, lora_refusal
from tests.pallas import _gpu

pytestmark = pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal()))

SPEC = replace(TINY, dtype="bfloat16")
FEW = LoraTiles(blocks=3)  # each block of a launch takes several pairs in turn


def fitted(*args) -> LoraCase:
    """A case whose units lie as the kernels need them."""
    return LoraCase(*args, fit=fit_units)


RUNS = ((0, 3), (-1, 2), (1, 1), (2, 7), (0, 1), (-1, 2))
CASES = [
    fitted("q k v, mixed ranks", SPEC, 32, ("q", "k", "v"), (16, (3, 0, 20), 8), RUNS),
    fitted("o, one adapter", SPEC, 64, ("o",), (8,), ((0, 5), (-1, 3))),
    fitted(
        "gate up, tiles of tokens",
        replace(SPEC, width=256, mlp=256),
        32,
        ("gate", "up"),
        (8, 70, 4),
        ((0, 40), (-1, 40), (1, 30), (2, 18)),
    ),
    fitted(
        "down, all distinct",
        replace(SPEC, width=256, mlp=384),
        32,
        ("down",),
        tuple(range(1, 9)),
        tuple((i, 1) for i in range(8)),
    ),
    fitted(
        "two units to a block",
        replace(SPEC, width=256, mlp=1920, heads=2, kv_heads=1),
        32,
        ("down",),
        (5, 18),
        ((1, 9), (0, 4), (-1, 3)),
    ),
    fitted("narrow heads", replace(TINY64, dtype="bfloat16"), 32, ("q", "k", "v"), (40, 8), ((1, 9), (0, 7))),
]


def wanted(inputs) -> list[np.ndarray]:
    """The reference, with exact sums."""
    x, pool, first, projections, adapters = inputs
    wide = [p._replace(base=p.base.astype(jnp.float32)) for p in projections]
    x, pool = x.astype(jnp.float32), pool.astype(jnp.float32)
    return [np.asarray(y) for y in reference.lora(x, pool, first, wide, adapters)]


def run(case: LoraCase, tiles: LoraTiles = FEW, acts: bool | None = None) -> tuple[list[np.ndarray], tuple]:
    inputs = x, pool, first, projections, adapters = lora_inputs(case)

    @jax.jit
    def added(x, pool, bases):
        parts = [p._replace(base=base) for p, base in zip(projections, bases, strict=True)]
        acting = None if acts is None else jnp.bool_(acts)
        return lora(x, pool, first, parts, adapters, acts=acting, room=room_of(case), tiles=tiles)

    with _gpu.interpreted():
        got = jax.block_until_ready(added(x, pool, [p.base for p in projections]))
    return [np.asarray(y.astype(jnp.float32)) for y in got], inputs


FAST = ("q k v, mixed ranks", "down, all distinct")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name not in FAST)) for c in CASES]
)
def test_lora_equals_the_reference(case: LoraCase):
    assert lora_refusal(case.layout, [case.layout.units[name] for name in case.group]) is None
    got, inputs = run(case)
    nobody = np.asarray(inputs[4]) < 0
    for out, want, projection in zip(got, wanted(inputs), inputs[3], strict=True):
        np.testing.assert_allclose(out, want, atol=0.03 * np.abs(want).max())
        base = np.asarray(projection.base.astype(jnp.float32))
        np.testing.assert_array_equal(out[nobody], base[nobody])


def test_where_no_adapter_acts_the_base_stays_bit_for_bit():
    case = next(c for c in CASES if c.name == "q k v, mixed ranks")
    (acting, _), (still, inputs) = run(case, acts=True), run(case, acts=False)
    for got, want, base, projection in zip(acting, wanted(inputs), still, inputs[3], strict=True):
        np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max())
        np.testing.assert_array_equal(base, np.asarray(projection.base.astype(jnp.float32)))


@pytest.mark.slow
def test_how_the_input_is_split_does_not_matter():
    """Spans of three chunks, the last of them shorter; other stages."""
    got, inputs = run(CASES[1], LoraTiles(stages=(3, 1, 2), chunks=(3, 3), blocks=2))
    (want,) = wanted(inputs)
    np.testing.assert_allclose(got[0], want, atol=0.03 * np.abs(want).max())


def test_a_group_that_kernels_cannot_read_goes_to_the_plain_op():
    case = LoraCase("unfitted", SPEC, 32, ("gate", "up"), (8,), ((0, 8),))  # units of 3 slots: 10 in a block
    op = lora_op(case.layout, Limits(sequences=8, rank=8, row=32), reference.lora)
    inputs = lora_inputs(case)
    got, want = op(*inputs), reference.lora(*inputs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


def test_prompt_launches_need_little_room():
    limits = Limits(sequences=64, rank=64, row=32)
    assert limits.room(64) == Room(64, 64, 1)
    assert limits.room(2048) == Room(64, 64, 32)
    assert limits.room(96) == Room(3, 64, 32)


def test_a_jitted_step_may_follow_itself():
    """In place on the base, twice in one program: the second adds to the first's result."""
    case = CASES[1]
    x, pool, first, (projection,), adapters = lora_inputs(case)

    @jax.jit
    def twice(base):
        options = {"room": room_of(case), "tiles": FEW}
        (once,) = lora(x, pool, first, [projection._replace(base=base)], adapters, **options)
        return lora(x, pool, first, [projection._replace(base=once)], adapters, **options)[0]

    with _gpu.interpreted():
        got = np.asarray(twice(projection.base).astype(jnp.float32))
    inputs = (x, pool, first, [projection], adapters)
    base = np.asarray(projection.base.astype(jnp.float32))
    want = base + 2 * (wanted(inputs)[0] - base)
    np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max())
