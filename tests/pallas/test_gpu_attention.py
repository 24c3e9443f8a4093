"""The NVIDIA attention kernels in the interpreter, against the reference in float32."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas import gpu_common, reference
from jlora.pallas.cases import SMALL_ATTENTION, TINY, AttentionCase, attention_inputs, attention_valid
from jlora.pallas.gpu_decode import DecodeTiles
from jlora.pallas.gpu_ops import GpuTiles, attention_op, runtime_refusal
from tests.pallas import _gpu

pytestmark = pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal()))

SPEC = replace(TINY, dtype="bfloat16")
# Few items, so that the interpreter is quick; still more than one per row.
TILES = GpuTiles(decode=DecodeTiles(blocks=8))


def check(case: AttentionCase, tiles: GpuTiles = TILES) -> None:
    """Kernel and reference agree where rows mean something; all else is finite."""
    q, pool, first, pages = attention_inputs(case)
    with _gpu.interpreted():
        got = np.asarray(attention_op(tiles)(q, pool, first, pages).astype(jnp.float32))
    want = np.asarray(reference.attention(q.astype(jnp.float32), pool.astype(jnp.float32), first, pages))
    valid = attention_valid(case)
    assert got.shape == want.shape and np.isfinite(got).all()
    np.testing.assert_allclose(got[valid], want[valid], atol=0.02)
    assert not got[len(case.rows) :].any()


SLOW = pytest.mark.slow
NAMES = {"tiny128 bfloat16 B=32 decode": (), "tiny128 bfloat16 B=32 mixed": SLOW, "tiny64 bfloat16 B=32 chunks": SLOW}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=NAMES[c.name]) for c in SMALL_ATTENTION if c.name in NAMES]
)
def test_attention_equals_the_reference(case: AttentionCase):
    check(case)


@SLOW
@pytest.mark.parametrize(
    ("block_tokens", "chunk", "rows", "continued"),
    [(16, 1, ((1, 1), (70, 1), (200, 1)), frozenset()), (64, 8, ((8, 8), (16, 8), (90, 3)), frozenset({1}))],
)
def test_other_page_sizes_are_read(block_tokens: int, chunk: int, rows: tuple, continued: frozenset):
    spec = replace(SPEC, heads=2, kv_heads=1)
    whole = GpuTiles(decode=DecodeTiles(blocks=1))  # no context is cut
    check(AttentionCase("pages", spec, block_tokens, rows, chunk, continued), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "chunk", "rows"),
    [
        pytest.param(12, 1, ((130, 1), (9, 1)), marks=SLOW),
        pytest.param(1, 32, ((32, 32), (64, 32), (80, 16), (130, 5)), marks=SLOW),
        (6, 32, ((32, 32), (40, 8))),
    ],
)
def test_any_number_of_heads_may_share_keys(group: int, chunk: int, rows: tuple):
    """With one head per KV head, rows of a prompt share a tile; with many, a row takes several."""
    continued = frozenset({1, 2}) & frozenset(range(len(rows))) if chunk > 1 else frozenset()
    spec = replace(SPEC, heads=group, kv_heads=1, head_dim=64)
    check(AttentionCase("heads", spec, 32, rows, chunk, continued))


@SLOW
def test_a_long_context_among_short_ones_is_cut_into_many_spans():
    spec = replace(SPEC, max_len=448, heads=2, kv_heads=1)
    case = AttentionCase("cuts", spec, 32, ((440, 1), (1, 1), (64, 1)))
    check(case, GpuTiles(decode=DecodeTiles(blocks=12)))


@SLOW
def test_long_rows_are_cut_into_pieces():
    check(AttentionCase("long row", replace(SPEC, heads=1, kv_heads=1), 32, ((100, 70), (5, 5)), 70))


@SLOW
def test_a_long_page_list_is_brought_in_parts(monkeypatch: pytest.MonkeyPatch):
    """More entries than a copy takes, 16 here: several copies, of which a span needs some."""
    monkeypatch.setattr(gpu_common, "COPY", 16)
    spec = replace(SPEC, max_len=16 * 40, kv_heads=1, heads=2, head_dim=64)
    tiles = GpuTiles(decode=DecodeTiles(blocks=3))
    check(AttentionCase("long list", spec, 16, ((600, 1), (30, 1))), tiles)
