"""Adapters by blocks against dense slots: the same result, and a table of what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import lora, report
from benchmarks.lora import FULL, QUICK, Batch


def test_the_comparison_writes_every_case_and_a_table(tmp_path: Path):
    words = ["lora", "--quick", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert bench.main([*words, "--dtype", "float32", "bfloat16"]) == 0
    for dtype in ("float32", "bfloat16"):
        record = json.loads((tmp_path / f"lora-{dtype}.json").read_text())
        assert [(r["batch"], r["registered"]) for r in record["summary"]] == [
            (b.name, n) for b in QUICK.batches for n in (2, 8)
        ]
        assert all(r[key] > 0 for r in record["summary"] for key in ("base_s", "blocks_s", "dense_s"))
        assert len(record["rounds"]) == 2
    page = (tmp_path / report.PAGE).read_text()
    assert page.count("| prefill 32 | 2 | 8 |") == 2


def test_both_ways_are_compared_before_they_are_timed():
    batch = Batch("decode 4", 4, 2)
    adapters = lora.register(QUICK, 4)
    assert set(lora.compared(QUICK, batch, adapters)) == {"blocks", "dense"}
    wrong = {name: (a, b[::-1]) for name, (a, b) in adapters.stacks.items()}  # B of other adapters
    with pytest.raises(RuntimeError, match="differs by"):
        lora.compared(QUICK, batch, adapters._replace(stacks=wrong))


def test_the_full_comparison_is_the_one_in_the_target():
    assert FULL.registered == (8, 32, 128, 512)
    assert {(b.name, b.tokens) for b in FULL.batches} == {("decode 64", 64), ("prefill 512", 512)}
    assert len(FULL.cases()) == 10 and all(s >= b.adapters for b, s in FULL.cases())
    assert FULL.batches[2].owners().tolist() == np.repeat(np.arange(4), 128).tolist()
