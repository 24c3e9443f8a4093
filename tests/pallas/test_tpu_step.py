"""A whole step with the TPU kernels equals the step made of the reference, on one device and several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jlora.layout import PoolLayout
from jlora.model import llama, sharding, step
from jlora.model.packed import Packed
from jlora.model.spec import PROJECTIONS
from jlora.pallas import cases, reference
from jlora.pallas.ops import GROUPS, Ops
from jlora.pallas.reference import XLA
from jlora.pallas.tiles import chip_of
from jlora.pallas.tpu_attention import TpuAttention
from jlora.pallas.tpu_lora import TpuLora
from tests.pallas import _aot
from tests.pallas._interpret import interpreted

SPEC = replace(cases.TINY, width=512, mlp=512, heads=4, kv_heads=4, vocab=128, max_len=64)
BLOCKS, TOKENS = 40, 16
RANKS = {"q": (3, 20), "k": (8, 8), "v": (1, 16), "o": (4, 4), "gate": (8, 2), "up": (0, 9), "down": (17, 5)}


def kernels() -> Ops:
    chip = chip_of("interpreter")
    assert chip is not None
    return replace(XLA, lora=TpuLora(chip, True), attention=TpuAttention(chip))


def launch(tp: int, chunk: int) -> tuple[PoolLayout, np.ndarray, step.Batch]:
    """A layout, a pool with two adapters and some history in it, and three rows that use them."""
    layout = PoolLayout.of(SPEC, BLOCKS, TOKENS, tp)
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(layout.shape, dtype=np.float32)
    pool.reshape(layout.layers, BLOCKS, -1)[:, 0] = 0
    free = iter(range(1, BLOCKS))
    entries: list[tuple[int, int]] = []
    offsets = [0]
    for name in PROJECTIONS:
        for owner, rank in enumerate(RANKS[name]):
            for first in range(0, rank, layout.units[name].per_block):
                entries.append((next(free), owner))
                _fill(pool, layout, name, entries[-1][0], rank - first, rng)
        offsets.append(len(entries))
    blocks, owners = (np.array(x + (0,) * (BLOCKS - len(entries)), np.int32) for x in zip(*entries, strict=True))
    lengths = np.array([19, 5, 33, 0], np.int32)
    counts = np.minimum(lengths, [chunk, max(1, chunk - 3), chunk, 0]).astype(np.int32)
    table = np.zeros((4, layout.blocks_for(SPEC.max_len)), np.int32)
    for row, length in enumerate(lengths):
        for page in range(layout.blocks_for(int(length))):
            table[row, page] = next(free)
    starts = lengths - counts
    record = Packed.zeros(step.record_type(4, chunk, table.shape[1], 4))
    values = {
        "tokens": rng.integers(0, SPEC.vocab, (4, chunk)),
        "source": -1,
        "starts": starts,
        "counts": counts,
        "table": table,
        "adapters": (0, -1, 1, -1),
        "offsets": offsets,
        "last": np.arange(4) * chunk + np.maximum(counts - 1, 0),
    }
    return layout, pool, changed(step.Batch(record, np.stack((blocks, owners))), **values)


def changed(batch: step.Batch, **values: Any) -> step.Batch:
    """The batch with other values in its record."""
    record = Packed(batch.record.words.copy(), batch.record.type)
    for name, value in values.items():
        record.fields()[name][...] = value
    return batch._replace(record=record)


def _fill(pool: np.ndarray, layout: PoolLayout, name: str, block: int, rank: int, rng: np.random.Generator) -> None:
    """One block's units in every layer and shard, small enough that activations stay of one size."""
    width = 2 * layout.kv_heads // layout.tp
    for layer in range(layout.layers):
        for shard in range(layout.tp):
            part = pool[block + layer * layout.blocks][:, shard * width : (shard + 1) * width]
            cases.fill_block(part, layout, name, rank, rng)
            part *= 0.1


def run(ops: Ops, tp: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """The pool after a step, and the last hidden state of each row with tokens."""
    layout, pool, batch = launch(tp, chunk)
    mesh = sharding.make_mesh(tp)
    programs = step.build(SPEC, layout, mesh, True, ops)
    params = llama.stack_layers(llama.plain(nnx.state(llama.Llama(SPEC, nnx.Rngs(0)))))
    params = jax.tree.map(
        lambda w, s: jax.device_put(w, NamedSharding(mesh, s)),
        params,
        sharding.stacked_specs(sharding.param_specs(SPEC)),
    )
    placed = jax.device_put(jnp.array(pool), NamedSharding(mesh, sharding.POOL))
    after, rows, _ = programs.forward(params, placed, np.zeros(4, np.int32), batch)
    return np.array(after), np.array(rows)[:3]


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "chunk"), [(1, 1), *(pytest.param(*sizes, marks=SLOW) for sizes in ((1, 8), (2, 1), (4, 8)))]
)
def test_a_step_of_kernels_equals_a_step_of_the_reference(tp: int, chunk: int):
    with interpreted():
        pool, rows = run(kernels(), tp, chunk)
    want_pool, want_rows = run(XLA, tp, chunk)
    np.testing.assert_allclose(rows, want_rows, atol=2e-3)
    np.testing.assert_allclose(pool, want_pool, atol=2e-3)


@SLOW
def test_the_step_above_depends_on_its_adapters():
    layout, pool, batch = launch(1, 1)
    with_adapters = run(XLA, 1, 1)[1]
    programs = step.build(SPEC, layout, sharding.make_mesh(1), True)
    params = llama.stack_layers(llama.plain(nnx.state(llama.Llama(SPEC, nnx.Rngs(0)))))
    base = changed(batch, adapters=-1)
    _, rows, _ = programs.forward(params, jnp.array(pool), np.zeros(4, np.int32), base)
    change = np.abs(np.array(rows)[:3] - with_adapters).max(1)
    assert change[0] > 0.1 and change[2] > 0.1 and change[1] < 1e-5  # the row between has no adapter


@SLOW
@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_by_tiles_of_tokens_equals_a_step_of_the_reference(tp: int):
    pool, rows = run(tiled(), tp, 8)
    want_pool, want_rows = run(XLA, tp, 8)
    np.testing.assert_allclose(rows, want_rows, atol=1e-4)
    np.testing.assert_allclose(pool, want_pool, atol=1e-4)


def tiled() -> Ops:
    """As on a CPU, with tiles so small that a launch has several."""
    return replace(XLA, lora=partial(reference.lora, token_tile=lambda tokens: 8))


@pytest.mark.parametrize(
    ("made", "tp"), [("reference", 2), pytest.param("tiled", 2, marks=SLOW), pytest.param("kernels", 4, marks=SLOW)]
)
def test_a_layer_has_two_large_sums_and_one_small_one_per_group_of_projections(made: str, tp: int):
    ops = {"reference": lambda: XLA, "tiled": tiled, "kernels": kernels}[made]()
    layout, pool, batch = launch(tp, 8 if made == "tiled" else 1)
    mesh = sharding.make_mesh(tp)
    programs = step.build(SPEC, layout, mesh, True, ops)
    params = jax.eval_shape(llama.stack_layers, llama.abstract(SPEC)[0])
    specs = sharding.stacked_specs(sharding.param_specs(SPEC))
    values: tuple[Any, ...] = (
        _aot.placed(params, mesh, specs),
        _aot.placed(jax.ShapeDtypeStruct(pool.shape, pool.dtype), mesh, sharding.POOL),
        *_aot.placed((np.zeros(4, np.int32), batch), mesh),
    )
    with interpreted():
        found = _aot.collectives(programs.forward.lower(*values).compile().as_text())
    ways = 2 if made == "tiled" else 1  # all tokens at once, or tile by tile: a launch goes one of them
    assert found == {"all-gather": 1, "all-reduce": 2 + ways * len(GROUPS)}
