"""Bytes and operations of the ops, counted by hand."""

from __future__ import annotations

from dataclasses import replace

from jlora.pallas import counts
from jlora.pallas.cases import LLAMA3_8B, AttentionCase, LoraCase
from jlora.pallas.counts import Chip, Count

H200 = Chip("H200", 4.8e12, 989e12)


def test_decode_reads_every_key_and_value_once():
    case = AttentionCase("decode", LLAMA3_8B, 32, ((1024, 1),) * 32)
    count = counts.attention(case)
    kv, q = 32 * 1024 * 2 * 8 * 128 * 2, 32 * 32 * 128 * 2
    assert count == Count(kv + 2 * q, 4 * 32 * 1024 * 32 * 128)
    assert count.bound(H200) == "memory" and count.floor(H200) == count.bytes / 4.8e12


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
