"""The TPU kernels against the reference, in both interpreters, on the shared cases.

Unnamed memory holds NaN and fast memory starts as NaN, so a kernel that reads what it must not
shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from jlora.pallas import cases, reference
from jlora.pallas.ops import Adapted
from jlora.pallas.tiles import Chip, chip_of
from jlora.pallas.tpu_attention import TpuAttention, sequences
from jlora.pallas.tpu_lora import TpuLora, entry_spans, product_rows
from tests.pallas._interpret import interpreted
from tests.pallas._tp import Shards

FEW = ((0, 3), (-1, 2), (2, 3), (1, 4))  # tokens of a launch
MANY = ((0, 20), (-1, 50), (2, 20), (1, 30))  # two tiles, and in the first a product without an adapter
MODES = {"plain": True, "tpu": pltpu.InterpretParams(detect_races=True)}
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
ATTENTION = [c for c in cases.SMALL_ATTENTION if c.spec.head_dim == 128]


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """With TPU semantics copies may not meet a read or another copy: jax 0.12 raises there, 0.10 remembers it."""
    pltpu.reset_tpu_interpret_mode_state()
    yield
    races, interpret_pallas_call.races = interpret_pallas_call.races, None
    pltpu.reset_tpu_interpret_mode_state()
    assert races is None or not races.races_found


@pytest.fixture(scope="module")
def chip() -> Chip:
    found = chip_of("interpreter")
    assert found is not None
    return found


def of(values: list[Any], name: str) -> Any:
    return next(c for c in values if c.name.endswith(name))


def run_lora(op: Any, inputs: tuple[Any, ...], psum: Any = None) -> list[np.ndarray]:
    """An op on a case's arrays, jitted as a step does it; float32 results."""
    x, pool, first, projections, adapters = inputs
    units = [p.unit for p in projections]

    def call(x, pool, first, bases, active, adapters):
        made = [Adapted(*parts) for parts in zip(bases, active, units, strict=True)]
        return op(x, pool, first, made, adapters, psum)

    outs = jax.jit(call)(x, pool, first, [p.base for p in projections], [p.active for p in projections], adapters)
    return [np.asarray(out, np.float32) for out in outs]


def close(got: list[np.ndarray], want: list[np.ndarray], dtype: str) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype] * max(1, np.abs(b).max()))


def in_modes(values: list[Any], fast: dict[str, str]) -> list[Any]:
    """Every case in both interpreters; those not in `fast` (end of the name -> mode) are slow."""
    return [
        pytest.param(case, mode, id=f"{case.name}-{mode}", marks=[pytest.mark.slow] * (not quick(case, mode, fast)))
        for case in values
        for mode in MODES
    ]


def quick(case: Any, mode: str, fast: dict[str, str]) -> bool:
    return any(case.name.endswith(name) and mode == chosen for name, chosen in fast.items())


@pytest.mark.parametrize(
    ("case", "mode"),
    in_modes(cases.SMALL_LORA, {"bfloat16 q k v, mixed ranks": "plain", "float32 o, one adapter": "tpu"}),
)
def test_lora_equals_the_reference(case: cases.LoraCase, mode: str, chip: Chip):
    inputs = cases.lora_inputs(case)
    got = run_lora(TpuLora(chip, MODES[mode]), inputs)
    want = run_lora(reference.lora, inputs)
    close(got, want, case.spec.dtype)
    alone = np.asarray(inputs[-1]) < 0
    for out, p in zip(got, inputs[3], strict=True):  # bit for bit the base where there is no adapter
        np.testing.assert_array_equal(out[alone], np.asarray(p.base, np.float32)[alone])
        assert not case.ranks or np.abs(out - np.asarray(p.base, np.float32)).max() > 0.1


@pytest.mark.slow
def test_a_last_tile_of_tokens_may_be_filled_in_part(chip: Chip):
    case = replace(of(cases.SMALL_LORA, "bfloat16 gate up, many tokens"), tokens=((1, 90), (-1, 20), (0, 9)))
    inputs = cases.lora_inputs(case)
    close(run_lora(TpuLora(chip, True), inputs), run_lora(reference.lora, inputs), "bfloat16")


@pytest.mark.slow
def test_lora_tells_adapters_apart(chip: Chip):
    """The check above must be able to fail: with two owners exchanged it does."""
    case = of(cases.SMALL_LORA, "float32 q k v, mixed ranks")
    x, pool, first, projections, adapters = cases.lora_inputs(case)
    swapped = jnp.asarray([1, 0, 2, -1])[adapters]
    got = run_lora(TpuLora(chip, True), (x, pool, first, projections, swapped))
    want = run_lora(reference.lora, (x, pool, first, projections, adapters))
    assert max(np.abs(a - b).max() for a, b in zip(got, want, strict=True)) > 0.1


def test_lora_of_long_prompts_visits_only_each_tiles_own_adapters():
    """Entries per token tile: two adapters of 100 tokens each, 64 tokens per tile."""
    case = of(cases.SMALL_LORA, "float32 gate up, many tokens")
    _, _, _, projections, adapters = cases.lora_inputs(case)
    spans = np.asarray(entry_spans(projections, adapters, 64))
    per_adapter = case.blocks("gate")
    assert spans.shape == (5, 2, 2)
    # tokens 0-63: adapter 0; 64-127: 0 and the base; 128-191: base and 1; 192-255: 1 and 2; 256-: 2
    held = (spans[:, 0, 1] - spans[:, 0, 0]).tolist()
    zero, one, two = per_adapter
    assert held == [zero, zero, one, one + two, two]


@pytest.mark.parametrize("mode", list(MODES))
def test_tokens_before_an_invocation_are_not_multiplied(mode: str, chip: Chip):
    """An activated LoRA from token 100 of 128 on: tiles of 64 tokens, products of 32.

    A base of -0.0 tells: what is added to it, even 0.0, makes it +0.0.
    """
    case = replace(of(cases.SMALL_LORA, "float32 gate up, many tokens"), ranks=(16, 16), tokens=((-1, 100), (1, 28)))
    x, pool, first, projections, adapters = cases.lora_inputs(case)
    negative = [Adapted(jnp.full_like(p.base, -0.0), p.active, p.unit) for p in projections]
    for out in run_lora(TpuLora(chip, MODES[mode]), (x, pool, first, negative, adapters)):
        touched = ~np.signbit(out) | (out != 0)
        assert not touched[:96].any() and (out[:100] == 0).all()
        assert touched[96:].all() and (np.abs(out[100:]).max(1) > 0.1).all()


@pytest.mark.parametrize(
    ("tokens", "most", "rows"),
    [(8, 128, 8), (512, 128, 128), (384, 128, 128), (192, 128, 96), (176, 128, 176), (200, 128, 200), (64, 32, 32)],
)
def test_a_tile_is_multiplied_in_equal_parts(tokens: int, most: int, rows: int):
    assert product_rows(tokens, most) == rows


@pytest.mark.parametrize(
    ("case", "mode"), in_modes(ATTENTION, {"bfloat16 B=32 chunks": "plain", "float32 B=16 decode": "tpu"})
)
def test_attention_equals_the_reference(case: cases.AttentionCase, mode: str, chip: Chip):
    inputs = cases.attention_inputs(case)
    with interpreted(MODES[mode]):
        got = np.asarray(jax.jit(TpuAttention(chip))(*inputs), np.float32)
    want = np.asarray(jax.jit(reference.attention)(*inputs), np.float32)
    valid = cases.attention_valid(case)
    close([got[valid]], [want[valid]], case.spec.dtype)
    assert np.isfinite(got).all()


def with_many_heads(form: str) -> cases.AttentionCase:
    """A case with several blocks of heads, each a row of grid steps that takes over from the one before."""
    spec = replace(cases.TINY, heads=32, kv_heads=16)
    return replace(of(cases.SMALL_ATTENTION, f"tiny128 float32 B=16 {form}"), spec=spec)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("form", ["decode", "chunks"])
def test_attention_of_several_blocks_of_heads_equals_the_reference(form: str, mode: str, chip: Chip):
    case = with_many_heads(form)
    inputs = cases.attention_inputs(case)
    with interpreted(MODES[mode]):
        got = np.asarray(jax.jit(TpuAttention(chip))(*inputs))
    valid = cases.attention_valid(case)
    close([got[valid]], [np.asarray(reference.attention(*inputs))[valid]], "float32")


def test_a_page_fetched_over_one_that_is_being_read_is_seen_as_a_race(chip: Chip, monkeypatch: pytest.MonkeyPatch):
    """The attention kernel with one buffer where it has two: the interpreter must not let it pass."""
    pages = kernel.MultiPageAsyncCopyDescriptor
    real = pages.__init__
    monkeypatch.setattr(pages, "__init__", lambda self, hbm, buf, *rest: real(self, hbm, buf.ref.at[0], *rest))
    inputs = cases.attention_inputs(with_many_heads("decode"))
    with interpreted(MODES["tpu"]):
        try:
            jax.block_until_ready(jax.jit(TpuAttention(chip))(*inputs))
        except jax.errors.JaxRuntimeError as e:
            assert "race" in str(e).lower()
        else:
            assert interpret_pallas_call.races.races_found
    interpret_pallas_call.races = None


def test_prompt_rows_become_sequences_and_their_padding_is_kept_apart():
    """Three rows of one prompt (8, 8, 4 of 8 tokens behind 5 cached), one of another, one of padding."""
    case = of(cases.SMALL_ATTENTION, "tiny128 float32 B=16 chunks")
    pages = cases.attention_inputs(case)[3]
    made = jax.tree.map(np.asarray, sequences(pages, case.chunk))
    assert made.count == 5
    assert made.kv_lens[:5].tolist() == [25, 4, 8, 33, 5]
    assert made.cu_q_lens[:6].tolist() == [0, 20, 24, 32, 35, 40]
    assert not made.table[[1, 4]].any() and (made.table[0] == pages.table[2]).all()


@pytest.mark.parametrize(
    ("tp", "group", "mode", "tokens"),
    # The interpreter with TPU semantics calls back from every device: on all four host devices it may wait for ever.
    [
        (2, ("q",), "plain", FEW),
        pytest.param(4, ("gate", "up"), "plain", FEW, marks=pytest.mark.slow),
        pytest.param(2, ("q",), "tpu", FEW, marks=pytest.mark.slow),
        pytest.param(2, ("gate", "up"), "plain", MANY, marks=pytest.mark.slow),
    ],
    ids=["q on 2", "gate and up on 4", "q on 2, TPU semantics", "tiles of several products on 2"],
)
def test_lora_on_several_devices_adds_up_to_the_reference(
    tp: int, group: tuple[str, ...], mode: str, tokens: tuple[tuple[int, int], ...], chip: Chip
):
    spec = replace(cases.TINY, kv_heads=4, heads=8, width=1024, mlp=2048, dtype="bfloat16")
    shards = Shards.of(cases.LoraCase("tp", spec, 32, group, (16, 5, 8), tokens, tp))
    kernel = TpuLora(chip, MODES[mode])
    got = shards.run(kernel)
    close(got, shards.run(reference.lora), "bfloat16")
    assert max(np.abs(a - np.asarray(b, np.float32)).max() for a, b in zip(got, shards.bases, strict=True)) > 0.1
    # A product without an adapter is left out: anything added to -0.0 makes it 0.0.
    owned = np.pad(np.asarray(shards.adapters), (0, -len(shards.adapters) % 32), constant_values=-1) >= 0
    idle = np.repeat(~owned.reshape(-1, 32).any(1), 32)[: len(shards.adapters)]
    assert idle.any() == (tokens is MANY)
    for out in shards.run(kernel, [jnp.full_like(base, -0.0) for base in shards.bases]):
        assert np.signbit(out[:, idle]).all()
