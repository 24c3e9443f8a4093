"""The reference ops against the textbook: dense softmax attention and a loop over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.layout import PoolLayout, UnitLayout
from jlora.model.spec import ModelSpec
from jlora.pallas.reference import (
    CPU,
    ActiveBlocks,
    Adapted,
    Pages,
    attention,
    lora,
    write_blocks,
    write_kv,
)

LAYERS, BLOCKS, B, K, G, H = 2, 40, 4, 2, 3, 8
SPEC = ModelSpec(vocab=8, width=16, mlp=24, layers=LAYERS, heads=6, kv_heads=K, head_dim=H, max_len=64)


def paged(lengths: list[int], width: int, seed: int = 0):
    """A pool with each sequence's KV scattered over blocks, and the same KV dense."""
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((LAYERS * BLOCKS, B, 2 * K, H), dtype=np.float32)  # junk everywhere else
    free = list(rng.permutation(np.arange(1, BLOCKS)))
    table = np.zeros((len(lengths), width), np.int32)
    dense = []
    for i, length in enumerate(lengths):
        kv = rng.standard_normal((length, 2 * K, H), dtype=np.float32)
        for page in range(-(-length // B)):
            table[i, page] = free.pop()
            part = kv[page * B : (page + 1) * B]
            pool[BLOCKS + table[i, page], : len(part)] = part
        dense.append(kv)
    return jnp.asarray(pool), table, dense


def textbook(q: np.ndarray, kv: np.ndarray, start: int) -> np.ndarray:
    """[C, N, H] queries at positions start.. over [length, 2K, H]."""
    out = np.zeros_like(q)
    for i in range(q.shape[0]):
        for n in range(q.shape[1]):
            k, v = kv[: start + i + 1, 2 * (n // G)], kv[: start + i + 1, 2 * (n // G) + 1]
            s = k @ q[i, n] / np.sqrt(H)
            p = np.exp(s - s.max())
            out[i, n] = (p / p.sum()) @ v
    return out


@pytest.mark.parametrize(
    ("chunk", "lengths"),
    [(1, [1, 4, 5, 40]), (1, [3, 0]), (3, [3, 7, 12]), (8, [8, 30]), (16, [16])],
    ids=["decode", "decode with padding row", "short chunks", "chunks over a prefix", "one whole prompt"],
)
def test_attention_equals_the_textbook_over_scattered_pages(chunk: int, lengths: list[int]):
    pool, table, dense = paged(lengths, width=12)
    q = np.random.default_rng(1).standard_normal((len(lengths), chunk, K * G, H), dtype=np.float32)
    starts = np.array([max(n - chunk, 0) for n in lengths], np.int32)
    pages = Pages(jnp.asarray(table), jnp.asarray(lengths, jnp.int32), jnp.asarray(starts))
    got = np.asarray(jax.jit(attention)(jnp.asarray(q), pool, BLOCKS, pages))
    for i, length in enumerate(lengths):
        if length:
            np.testing.assert_allclose(got[i], textbook(q[i], dense[i], starts[i]), atol=2e-6)
        else:
            assert not got[i].any()


def test_write_kv_interleaves_heads_and_drops_padding():
    pool = jnp.zeros((6, B, 2 * K, H))
    k, v = (jnp.asarray(np.random.default_rng(s).standard_normal((3, K, H), dtype=np.float32)) for s in (0, 1))
    out = np.asarray(write_kv(pool, jnp.array([2, 5, 6]), jnp.array([3, 0, 0]), k, v))
    np.testing.assert_array_equal(out[2, 3, 0::2], k[0])
    np.testing.assert_array_equal(out[5, 0, 1::2], v[1])
    assert np.count_nonzero(out) == 2 * 2 * K * H


def test_blocks_come_back_as_they_were_written_and_outside_ids_are_dropped():
    pool = jnp.zeros((LAYERS * 6, B, 2 * K, H))
    data = np.random.default_rng(0).standard_normal((3, LAYERS, B, 2 * K, H), dtype=np.float32)
    pool = write_blocks(pool, jnp.array([4, -1, 1]), jnp.asarray(data))
    blocks = np.asarray(pool).reshape(LAYERS, 6, B, 2 * K, H).swapaxes(0, 1)
    np.testing.assert_array_equal(blocks[[1, 4]], data[[2, 0]])
    assert not blocks[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("units", [1, 5, 64])
@pytest.mark.parametrize("tile", [None, 1, 4, 100])
@pytest.mark.parametrize("tokens", [[-1, -1, -1, 0, 0, -1, 2, 1], [0, -1, 2, 1, 0], [-1] * 6], ids=str)
def test_lora_sums_only_the_blocks_of_each_tokens_adapter(tokens: list[int], tile: int | None, units: int):
    """Two projections in one call, unequal block counts, entries of other projections around them."""
    blocks, owners = [[3, 9, 4, 20, 7], [11]], [[0, 0, 1, 2, 2], [2]]
    x, base, run, matrices = _adapted(blocks, owners, len(tokens))
    got = run(tokens, tile, units=lambda count: units)
    for out, start, mats, owner in zip(got, base, matrices, owners, strict=True):
        delta = out - start
        want = np.zeros(delta.shape, np.float32)
        for i, token in enumerate(tokens):
            want[i] = sum((x[i] @ a.T @ b for (a, b), o in zip(mats, owner, strict=True) if o == token), want[i])
        np.testing.assert_allclose(delta, want, atol=2e-4)
        assert not np.asarray(delta)[np.array(tokens) < 0].any()


@pytest.mark.parametrize(
    ("tokens", "tile", "multiplied"),
    [
        ([-1] * 8 + [0] * 4, 4, 4),  # an activated LoRA's last tokens
        ([-1] * 4 + [0] * 4 + [-1] * 4, 4, 4),
        (([-1] * 4 + [0] * 2) * 2, 2, 4),  # two of them in one launch
        ([-1] * 9 + [0] * 3, 5, 4),  # tiles are equal: of 12 tokens, 4 each
        ([0] * 12, 4, 12),
        ([-1] * 12, 4, 0),
        ([-1] * 8 + [0] * 4, None, 12),
    ],
)
def test_tokens_in_tiles_that_no_adapter_acts_on_are_not_multiplied(
    tokens: list[int], tile: int | None, multiplied: int
):
    rows: list[int] = []

    def psum(h):
        jax.debug.callback(lambda part: rows.append(part.shape[0]), h)
        return h

    _, _, run, _ = _adapted([[3], [11]], [[0], [0]], len(tokens))
    jax.block_until_ready(run(tokens, tile, psum))
    jax.effects_barrier()
    assert sum(rows) == multiplied


@pytest.mark.parametrize(("count", "most"), [(16, 20), (17, 64)])
def test_a_launch_of_few_tokens_takes_few_units_at_a_time_on_a_cpu(count: int, most: int):
    taken: list[int] = []

    def psum(h):
        jax.debug.callback(lambda part: taken.append(part.shape[1]), h)
        return h

    tokens, blocks = [0] * count, [[*range(2, 37)], [38]]  # more than a turn takes
    _, _, run, _ = _adapted(blocks, [[0] * len(blocks[0]), [0]], count)
    jax.block_until_ready(run(tokens, None, psum, op=CPU.lora))
    jax.effects_barrier()
    per = [PoolLayout.of(SPEC, BLOCKS, B).units[name].per_block for name in ("q", "k")]
    assert set(taken) == {sum(most // n * n for n in per)}


def _adapted(blocks: list[list[int]], owners: list[list[int]], count: int):
    """Inputs and base products of q and k with some active blocks; how to run them; their matrices."""
    units = [PoolLayout.of(SPEC, BLOCKS, B).units[name] for name in ("q", "k")]
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((LAYERS * BLOCKS, B, 2 * K, H), dtype=np.float32)  # junk everywhere else
    matrices = [
        [_fill(pool, BLOCKS + block, unit, rng) for block in ids] for ids, unit in zip(blocks, units, strict=True)
    ]
    flat, who = jnp.array([5, *blocks[0], *blocks[1], 6]), jnp.array([1, *owners[0], *owners[1], 1])
    ends = jnp.array([1, 1 + len(blocks[0]), 1 + len(blocks[0]) + len(blocks[1])])
    active = [ActiveBlocks(flat, who, ends[i], ends[i + 1]) for i in range(2)]
    x = rng.standard_normal((count, 16), dtype=np.float32)
    base = [rng.standard_normal((count, unit.b), dtype=np.float32) for unit in units]

    def run(tokens: list[int], tile: int | None, psum=None, op=lora, **sizes):
        def products(x, base, pool, active, tokens):
            adapted = [Adapted(*p) for p in zip(base, active, units, strict=True)]
            tiles = {"token_tile": lambda count: tile} if tile else {}
            return op(x, pool, BLOCKS, adapted, tokens, psum, **tiles, **sizes)

        return jax.jit(products)(x, base, jnp.asarray(pool), active, jnp.array(tokens))

    return x, base, run, matrices


def _fill(pool: np.ndarray, row: int, unit: UnitLayout, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random units written into one pool row; their A and B."""
    a = rng.standard_normal((unit.per_block, unit.a), dtype=np.float32)
    b = rng.standard_normal((unit.per_block, unit.b), dtype=np.float32)
    cells = np.zeros((unit.per_block, unit.slots * 2 * K * H), np.float32)
    cells[:, : unit.a], cells[:, unit.b_start : unit.b_start + unit.b] = a, b
    pool[row] = np.resize(np.append(cells.reshape(-1), np.zeros(pool[row].size)), pool[row].size).reshape(B, 2 * K, H)
    return a, b
