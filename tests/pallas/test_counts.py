"""Counting by hand, and by the work lists that the kernels follow."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas import counts, gpu_counts, gpu_plan
from jlora.pallas.cases import (
    LARGE_ATTENTION,
    LARGE_LORA,
    LLAMA2_7B,
    LLAMA3_8B,
    SMALL_ATTENTION,
    AttentionCase,
    LoraCase,
    attention_inputs,
)
from jlora.pallas.counts import CHIPS, Count
from jlora.pallas.gpu_layout import fit_units
from jlora.pallas.ops import ActiveBlocks


def test_decode_reads_every_key_and_value_once():
    case = AttentionCase("decode", LLAMA3_8B, 32, ((1024, 1),) * 32)
    count = counts.attention(case)
    kv, q = 32 * 1024 * 2 * 8 * 128 * 2, 32 * 32 * 128 * 2
    assert count == Count(kv + 2 * q, 4 * 32 * 1024 * 32 * 128)
    assert count.bound(CHIPS["H200"]) == "memory" and count.floor(CHIPS["H200"]) == count.bytes / 4.8e12


def test_a_prompt_cut_into_rows_counts_as_one():
    whole = AttentionCase("one row", LLAMA3_8B, 32, ((2048, 2048),), 2048)
    rows = tuple((at + 32, 32) for at in range(0, 2048, 32))
    cut = AttentionCase("rows", LLAMA3_8B, 32, rows, 32, frozenset(range(1, 64)))
    assert counts.attention(whole) == counts.attention(cut)
    assert counts.attention(cut).flops == 4 * (2048 * 2049 // 2) * 32 * 128


def test_adapters_count_their_own_ranks_only():
    unit_q, unit_k = 4096 + 4096, 4096 + 1024
    case = LoraCase("two", LLAMA3_8B, 32, ("q", "k"), (16, (8, 0), 64), ((0, 3), (-1, 2), (1, 5)))
    count = counts.lora(case)
    moved = 24 * unit_q + 16 * unit_k + 2 * 8 * 4096 + 2 * 3 * 1024 + 8 * 4096
    assert count == Count(2 * moved, 2 * ((3 * 16 + 5 * 8) * unit_q + 3 * 16 * unit_k))
    assert counts.lora(replace(case, tokens=((-1, 10),))) == Count(0, 0)


@pytest.mark.parametrize("case", [c for c in SMALL_ATTENTION if c.block_tokens == 32], ids=lambda c: c.name)
def test_tiles_are_counted_as_they_are_planned(case: AttentionCase):
    pages = attention_inputs(case)[3]
    kv_heads, group = case.spec.kv_heads, case.spec.heads // case.spec.kv_heads
    if case.chunk == 1:
        plan = gpu_plan.splits(pages.lengths, 64, 7, 4)
        tiles, rows = int((plan.work[:, 2] - plan.work[:, 1]).sum()), 8
    else:
        plan = gpu_plan.prompt_tiles(pages, gpu_plan.Pieces(case.chunk, group), 64)
        tiles, rows = int(jnp.where(plan[:, 1] > 0, plan[:, 4], 0).sum()), 128
    assert gpu_counts.attention(case).flops == tiles * kv_heads * 4 * 64 * rows * case.spec.head_dim


def test_pairs_are_counted_as_they_are_planned():
    runs = ((0, 40), (-1, 40), (1, 30), (2, 18))
    case = LoraCase("runs", LLAMA2_7B, 32, ("gate", "up"), (8, 70, 4), runs)
    layout = fit_units(case.layout)
    units = [layout.units[name] for name in case.group]
    owned = [who for who, rank in enumerate(case.ranks) for _ in range(-(-rank // units[0].per_block))]
    lists = jnp.arange(len(owned)), jnp.array(owned)
    active = ActiveBlocks(*lists, jnp.int32(0), jnp.int32(len(owned)))
    adapters = jnp.asarray(np.repeat([a for a, _ in runs], [n for _, n in runs]))
    plan = gpu_plan.unit_pairs([active] * 2, adapters, units[0].per_block, gpu_plan.Room(3, 70))
    pairs = int(plan.starts[-1])
    assert gpu_counts.lora(case, units, 4).flops == pairs * 2 * 64 * 64 * (4096 + 11008)


def test_kernels_never_issue_less_than_is_needed():
    for case in SMALL_ATTENTION:
        need, issued = counts.attention(case), gpu_counts.attention(case)
        assert issued.flops >= need.flops and issued.bytes >= need.bytes


def test_the_table_has_a_line_for_each_case_of_one_device(capsys: pytest.CaptureFixture[str]):
    gpu_counts.main(["H100"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "floor on H100" in head
    listed = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert listed == [c.name for c in (*LARGE_ATTENTION, *LARGE_LORA) if c.tp == 1] and len(listed) == 44
    assert any("llama3-8b tp=1 decode 64 x 1k" in line and "memory" in line for line in lines)
