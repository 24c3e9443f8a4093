"""The work lists of the NVIDIA kernels: everything is done, once, by somebody, and there is room."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jlora.layout import PoolLayout
from jlora.pallas import gpu_plan, gpu_support
from jlora.pallas.cases import LLAMA2_7B, LLAMA3_8B
from jlora.pallas.gpu_plan import Pieces, Room
from jlora.pallas.ops import GROUPS, ActiveBlocks, Pages

TILE = 64


@pytest.mark.parametrize(
    ("lengths", "spare", "most"),
    [([1, 64, 65, 0, 1000], 4, 8), ([0, 0], 3, 4), ([32768, 5, 5, 5], 50, 4), ([100] * 16, 1, 64)],
    ids=["uneven", "nothing", "one long", "no spare"],
)
def test_every_tile_of_every_context_is_in_one_item(lengths: list[int], spare: int, most: int):
    plan = gpu_plan.splits(jnp.array(lengths), TILE, spare, most)
    assert len(plan.work) == len(lengths) + spare
    seen = [np.zeros(-(-n // TILE), int) for n in lengths]
    for row, first, end, length in np.asarray(plan.work):
        assert first <= end and length == lengths[row]
        seen[row][first:end] += 1
    assert all((tiles == 1).all() for tiles in seen)
    assert np.asarray(plan.count).max() <= most
    for row, (begin, count) in enumerate(zip(plan.begin, plan.count, strict=True)):
        items = np.asarray(plan.work)[begin : begin + count]
        assert (items[:, 0] == row).all() and (items[:, 2] > items[:, 1]).all()


def test_merged_items_are_the_softmax_of_the_whole_context():
    lengths, most, heads, group, width = [200, 0, 64, 500], 6, 2, 3, 4
    plan = gpu_plan.splits(jnp.array(lengths), TILE, 6, most)
    rng = np.random.default_rng(0)
    logits = [rng.standard_normal((heads, group, n)) * 4 for n in lengths]
    values = [rng.standard_normal((heads, n, width)) for n in lengths]
    out = np.full((len(plan.work), heads, group, width), np.nan)  # what an idle item leaves
    weight = np.full(out.shape[:-1], np.nan)
    for i, (row, first, end, length) in enumerate(np.asarray(plan.work)):
        if end > first:
            part = slice(first * TILE, min(end * TILE, length))
            p = 2.0 ** logits[row][..., part]
            out[i], weight[i] = p @ values[row][:, part] / p.sum(-1)[..., None], np.log2(p.sum(-1))
    got = np.asarray(gpu_plan.merged(jnp.asarray(out), jnp.asarray(weight), plan, most))
    for row, n in enumerate(lengths):
        p = 2.0 ** logits[row]
        want = p @ values[row] / p.sum(-1)[..., None] if n else np.zeros((heads, group, width))
        np.testing.assert_allclose(got[row], want, atol=1e-5)


def launch(rows: list[tuple[int, int, int]]) -> Pages:
    """Pages of rows (sequence, position, tokens): sequences share their first page, as a prefix would be."""
    table = np.array([[1, 10 + s, 20 + s, 30 + s] if n else [0] * 4 for s, _, n in rows], np.int32)
    starts, counts = (np.array(x, np.int32) for x in ([p for _, p, _ in rows], [n for _, _, n in rows]))
    return Pages(jnp.asarray(table), jnp.asarray(starts + counts), jnp.asarray(starts))


@pytest.mark.parametrize(
    ("group", "want"),
    [
        (1, [(0, 3), (3, 1), (4, 2), (6, 1), (7, 1), (8, 1)]),
        (2, [(0, 2), (2, 1), (3, 1), (4, 2), (6, 1), (7, 1), (8, 1)]),
        (4, [(i, 1) for i in range(9)]),
    ],
)
def test_a_tile_holds_rows_of_one_sequence_only(group: int, want: list[tuple[int, int]]):
    """Three rows of one prompt; the same position in another; two rows; a one-token row; padding."""
    rows = [
        (0, 0, 32),
        (0, 32, 32),
        (0, 64, 7),
        (1, 64, 32),
        (2, 32, 32),
        (2, 64, 32),
        (3, 96, 1),
        (0, 0, 0),
        (0, 0, 0),
    ]
    tiles = np.asarray(gpu_plan.prompt_tiles(launch(rows), Pieces(32, group), TILE))
    assert [(int(t[0]), int(t[1])) for t in tiles if t[1]] == want
    for first, count, head, start, kv_tiles, length, *_ in tiles[tiles[:, 1] > 0]:
        assert head == 0 and start == rows[first][1]
        assert length == sum(rows[first + count - 1][1:]) and kv_tiles == -(-length // TILE)


def test_many_heads_take_several_tiles_of_one_row():
    rows = [(0, 0, 32), (0, 32, 32), (0, 0, 0)]
    pieces = Pieces(32, 6)
    tiles = np.asarray(gpu_plan.prompt_tiles(launch(rows), pieces, TILE))
    assert pieces.parts == 2
    assert [tuple(t[:3]) for t in tiles] == [(r, 1, h) for r in range(3) for h in (0, 4)]


def active(owned: list[list[int]], offset: int = 2) -> list[ActiveBlocks]:
    """Active lists behind one another: owned[p] has the owner of each block of projection p."""
    owners = [7] * offset + [o for of in owned for o in of] + [7] * 3
    ends = np.cumsum([offset] + [len(of) for of in owned])
    blocks = jnp.arange(100, 100 + len(owners), dtype=jnp.int32)
    lists = blocks, jnp.array(owners, jnp.int32)
    return [ActiveBlocks(*lists, jnp.int32(a), jnp.int32(b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]


@pytest.mark.parametrize(
    ("owned", "tokens"),
    [
        ([[0, 0, 1, 3], [0] * 9 + [2] * 9], [0] * 5 + [-1] * 3 + [3] * 8),
        ([[0] * 20], [0] * 100 + [-1] * 28),
        ([[], []], [-1] * 8),
        ([[i // 2 for i in range(32)], [], [5]], list(range(16)) + [-1] * 8),
    ],
    ids=["two projections", "one adapter, two tiles of tokens", "none", "all distinct"],
)
def test_pairs_are_the_tiles_that_share_an_adapter(owned: list[list[int]], tokens: list[int]):
    adapters, tile = np.array(tokens), gpu_plan.token_tile(len(tokens))
    # A rank that holds the adapter with the most blocks, and as many adapters as there are.
    rank = 8 * max([of.count(o) for of in owned for o in of], default=1)
    room = Room(adapters=8 if len(tokens) < 24 else 16, rank=rank)
    pairs = gpu_plan.unit_pairs(active(owned), jnp.asarray(adapters, jnp.int32), 8, room)
    got = [tuple(map(int, w)) for w in pairs.work[: pairs.starts[-1]]]
    want, starts = [], [0]
    per_projection = len(pairs.blocks) // len(owned)
    for p, of in enumerate(owned):
        for t in range(len(tokens) // tile):
            here = set(adapters[t * tile : (t + 1) * tile].tolist())
            used = [u for u in range(-(-len(of) // 8)) if here & set(of[u * 8 : u * 8 + 8])]
            want += [(t, p * per_projection + u * 8) for u in used]
            starts.append(starts[-1] + len(used))
    assert got == want
    assert np.asarray(pairs.starts).tolist() == starts
    flat = np.asarray(pairs.blocks).reshape(len(owned), -1)
    units = np.asarray(pairs.owners).reshape(len(owned), -1)
    first = 102
    for p, of in enumerate(owned):
        assert units[p].tolist() == np.repeat([*of, *[gpu_plan.NOBODY] * (per_projection - len(of))], 8).tolist()
        assert flat[p, : len(of)].tolist() == list(range(first, first + len(of))) and not flat[p, len(of) :].any()
        first += len(of)


def test_there_is_room_for_the_worst_launch():
    """Every token of every tile with an adapter of its own, of the largest rank, not aligned to unit tiles."""
    room = Room(adapters=16, rank=40, run=4)
    owned = [[o for o in range(16) for _ in range(5)]]
    tokens = np.repeat(np.arange(16), 4)
    pairs = gpu_plan.unit_pairs(active(owned), jnp.asarray(tokens, jnp.int32), 8, room)
    assert int(pairs.starts[-1]) == 10 <= len(pairs.work)


@pytest.mark.parametrize("spec", [LLAMA3_8B, LLAMA2_7B], ids=lambda s: s.name)
@pytest.mark.parametrize("block_tokens", [32, 64])
@pytest.mark.parametrize("tp", [1, 4])
def test_fitted_units_can_be_read(spec, block_tokens: int, tp: int):
    layout = gpu_support.fit_units(PoolLayout.of(spec, 10, block_tokens, tp))
    for group in GROUPS:
        assert gpu_support.lora_refusal(layout, [layout.units[name] for name in group]) is None
    for name, unit in layout.units.items():
        before = PoolLayout.of(spec, 10, block_tokens, tp).units[name]
        assert (unit.a, unit.b) == (before.a, before.b) and unit.slots >= before.slots
        assert unit.slots * unit.per_block <= block_tokens


def test_a_refusal_says_what_is_in_the_way():
    layout = PoolLayout.of(LLAMA3_8B, 10, 32)
    assert "3 units of 9 slots" in str(gpu_support.lora_refusal(layout, [layout.units["gate"], layout.units["up"]]))
    assert "float32" in str(gpu_support.attention_refusal(PoolLayout.of(replace(LLAMA2_7B, dtype="float32"), 10, 32)))
    assert "block_tokens = 8" in str(gpu_support.attention_refusal(replace(layout, block_tokens=8)))
