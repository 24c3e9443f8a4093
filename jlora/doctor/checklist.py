"""Further checks of the NVIDIA kernels on a GPU.

They check what neither the interpreter nor the compiler shows: numerics of the tensor cores, races
among the warps of a group (results that change from run to run), deadlocks (the job is their
watchdog), copies at the end of an array, and whether the pool stays in place. Errors are against the
float32 reference, absolute for attention and relative to the largest value for LoRA. The bounds are
those of bfloat16 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlora.doctor.checks import difference, launch
from jlora.model.spec import ModelSpec
from jlora.pallas import reference
from jlora.pallas.cases import (
    LLAMA2_7B,
    LLAMA3_8B,
    AttentionCase,
    LoraCase,
    attention_inputs,
    attention_valid,
    lora_inputs,
    prompt_rows,
)
from jlora.pallas.gpu_decode import DecodeTiles
from jlora.pallas.gpu_lora import lora
from jlora.pallas.gpu_ops import GpuTiles, attention_op, runtime_refusal
from jlora.pallas.gpu_plan import Room
from jlora.pallas.gpu_prefill import PrefillTiles
from jlora.pallas.gpu_support import fit_units, refusal_of
from jlora.pallas.ops import Ops
from jlora.pallas.reference import XLA

ATTENTION_BOUND, LORA_BOUND = 0.02, 0.03


class Finding(NamedTuple):
    """Whether a check passed (None: it could not run), and the number it found."""

    passed: bool | None
    seen: str


class Check(NamedTuple):
    """One line of the checklist."""

    name: str
    run: Callable[[], Finding]


def checklist() -> list[Check]:
    """The checks of this GPU, or the reason why there are none."""
    if reason := runtime_refusal() or refusal_of(jax.devices()[0]):
        return [Check("all", lambda: Finding(None, reason))]
    return checks(LARGE)


def checked(check: Check) -> dict[str, Any]:
    """A row of the report."""
    found = check.run()
    return {"case": check.name, "ok": found.passed, "seen": found.seen}


def ops_of(case: AttentionCase | LoraCase, tiles: GpuTiles) -> Ops:
    """The kernels with these sizes."""
    if isinstance(case, AttentionCase):
        return replace(XLA, attention=attention_op(tiles))
    room = room_of(case)
    return replace(XLA, lora=lambda *args: lora(*args, room=room, tiles=tiles.lora))


def room_of(case: LoraCase) -> Room:
    """Room for exactly a case's adapters."""
    largest = max((max(r) if isinstance(r, tuple) else r for r in case.ranks), default=1)
    return Room(max(1, len(case.ranks)), largest)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the checks."""

    specs: tuple[ModelSpec, ...]  # bfloat16
    block_tokens: tuple[int, ...]
    lengths: tuple[int, ...]  # contexts of decode, in addition to those around the borders of pages and tiles
    prompts: tuple[int, ...]  # their lengths; rows have 32 tokens
    repeats: int  # runs whose results must be equal bit for bit
    steps: int  # over which the pool must stay in place
    decode: tuple[DecodeTiles, ...]  # to try; one cuts contexts, and one does not
    prefill: tuple[PrefillTiles, ...]


LARGE = Sizes(
    specs=tuple(replace(spec, max_len=32768) for spec in (LLAMA3_8B, LLAMA2_7B)),
    block_tokens=(32, 64),
    lengths=(1000, 8192),
    prompts=(2048, 777, 31),
    repeats=1000,
    steps=10,
    decode=(DecodeTiles(), DecodeTiles(blocks=1), DecodeTiles(stages=3)),
    prefill=(PrefillTiles(), PrefillTiles(registers=True), PrefillTiles(stages=2)),
)


def checks(sizes: Sizes) -> list[Check]:
    """The checks, most basic first."""
    found = [check for spec in sizes.specs for tokens in sizes.block_tokens for check in _of_pool(sizes, spec, tokens)]
    spec, tokens, tiles = sizes.specs[0], sizes.block_tokens[0], GpuTiles(sizes.decode[0])
    longest = AttentionCase("longest", spec, tokens, ((spec.max_len, 1), (5, 1)))
    found.append(Check(f"{spec.name} B={tokens} decode {spec.max_len} tokens", partial(_compared, longest, tiles)))
    found.append(Check("the pool stays in place over steps", partial(_in_place, spec, tokens, tiles, sizes.steps)))
    return found


def _of_pool(sizes: Sizes, spec: ModelSpec, tokens: int) -> Iterator[Check]:
    """The checks of one model with pages of `tokens` tokens."""
    where = f"{spec.name} B={tokens}"
    edges = (1, tokens - 1, tokens, tokens + 1, 63, 64, 65, *sizes.lengths)
    decode = AttentionCase("decode", spec, tokens, tuple((n, 1) for n in edges), 1, frozenset(), 2)
    prompts = _prompts(sizes, spec, tokens)
    for tiles in sizes.decode:
        yield Check(f"{where} decode {tiles}", partial(_compared, decode, GpuTiles(decode=tiles)))
    for tiles in sizes.prefill:
        yield Check(f"{where} prompts {tiles}", partial(_compared, prompts, GpuTiles(prefill=tiles)))
    for case in (decode, prompts):
        run = partial(_repeated, case, GpuTiles(sizes.decode[0], sizes.prefill[0]), sizes.repeats)
        yield Check(f"{where} {case.name}: {sizes.repeats} runs are equal", run)
    for case in _lora_cases(spec, tokens):
        yield Check(f"{where} {case.name}", partial(_lora, case))
    yield Check(f"{where} no adapter: the base, bit for bit", partial(_no_adapter, spec, tokens))


def _prompts(sizes: Sizes, spec: ModelSpec, block_tokens: int) -> AttentionCase:
    """Several prompts in rows of 32 tokens, and a short row far into a context."""
    rows: list[tuple[int, int]] = []
    continued: set[int] = set()
    for length in sizes.prompts:
        prompt = prompt_rows(length, 0, 32)
        continued.update(range(len(rows) + 1, len(rows) + len(prompt)))
        rows += prompt
    rows.append((sizes.lengths[0], 5))
    return AttentionCase("prompts", spec, block_tokens, tuple(rows), 32, frozenset(continued), 1)


def _compared(case: AttentionCase, tiles: GpuTiles) -> Finding:
    q, pool, first, pages = attention_inputs(case)
    got = np.asarray(jax.jit(attention_op(tiles))(q, pool, first, pages).astype(jnp.float32))
    want = jax.jit(reference.attention)(q.astype(jnp.float32), pool.astype(jnp.float32), first, pages)
    valid = attention_valid(case)
    error = float(np.abs(got[valid] - np.asarray(want)[valid]).max())
    return Finding(bool(np.isfinite(got).all() and error <= ATTENTION_BOUND), f"largest error {error:.1e}")


def _repeated(case: AttentionCase, tiles: GpuTiles, repeats: int) -> Finding:
    args, run = attention_inputs(case), jax.jit(attention_op(tiles))
    # Compared on the device, because copying the results of a thousand runs takes long.
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.uint16)
    differs = jax.jit(lambda a, b: jnp.any(bits(a) != bits(b)).astype(jnp.int32))
    first, unlike = run(*args), jnp.int32(0)
    for _ in range(repeats - 1):
        unlike += differs(first, run(*args))
    return Finding(int(unlike) == 0, f"{int(unlike)} of {repeats - 1} differ from the first")


def _lora_cases(spec: ModelSpec, block_tokens: int) -> list[LoraCase]:
    """Few and many adapters, decode and prompts, full blocks and blocks that end in zeros."""

    def case(name: str, group: tuple[str, ...], ranks: tuple[Any, ...], tokens: Sequence[tuple[int, int]]) -> LoraCase:
        return LoraCase(name, spec, block_tokens, group, ranks, tuple(tokens), fit=fit_units)

    qkv = ("q", "k", "v")
    return [
        case("q k v, mixed ranks", qkv, (16, (3, 0, 20), 8), ((0, 3), (-1, 2), (1, 1), (2, 7), (-1, 3))),
        case("gate up, few units to a block", ("gate", "up"), (16, 5), ((0, 4), (-1, 2), (1, 2))),
        case("o, one adapter, a prompt", ("o",), (64,), ((0, 96), (-1, 32))),
        case("q k v, all distinct", qkv, (8, 16, 32, 64) * 4, [(i, 1) for i in range(16)]),
    ]


def _lora(case: LoraCase) -> Finding:
    inputs = lora_inputs(case)
    x, pool, first, projections, adapters = inputs
    run, args = launch(case, ops_of(case, GpuTiles()), inputs)
    wide = [p._replace(base=p.base.astype(jnp.float32)) for p in projections]
    want = reference.lora(x.astype(jnp.float32), pool.astype(jnp.float32), first, wide, adapters)
    error = difference(case, run(*args), want)  # NaN is not below the bound
    return Finding(error <= LORA_BOUND, f"largest error {error:.1e} of the largest value")


def _no_adapter(spec: ModelSpec, block_tokens: int) -> Finding:
    case = LoraCase("none", spec, block_tokens, ("q", "k", "v"), (), ((-1, 64),), fit=fit_units)
    inputs = lora_inputs(case)
    run, args = launch(case, ops_of(case, GpuTiles()), inputs)
    pairs = zip(run(*args), inputs[3], strict=True)
    equal = all(bool((y == projection.base).all()) for y, projection in pairs)
    return Finding(equal, "equal" if equal else "differs")


def _in_place(spec: ModelSpec, block_tokens: int, tiles: GpuTiles, steps: int) -> Finding:
    """Writes new keys and attends over them, several times over a donated pool."""
    rows = 2
    case = AttentionCase("in place", spec, block_tokens, ((block_tokens + 1, 1),) * rows)
    q, pool, first, pages = attention_inputs(case, junk=0.0)
    attend = attention_op(tiles)
    at = first + pages.table[:, 1]
    new = jnp.ones((rows, spec.kv_heads, spec.head_dim), pool.dtype)

    @partial(jax.jit, donate_argnums=0)
    def step(pool, q):
        pool = reference.write_kv(pool, at, jnp.zeros(rows, jnp.int32), new, new)
        pool, q = jax.lax.optimization_barrier((pool, q))
        return pool, attend(q, pool, first, pages)

    pool, _ = step(pool, q)
    where = pool.unsafe_buffer_pointer()
    for _ in range(steps - 1):
        pool, _ = step(pool, q)
    stays = pool.unsafe_buffer_pointer() == where
    return Finding(stays, "same address" if stays else "moved")
