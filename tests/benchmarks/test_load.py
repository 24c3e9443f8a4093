"""Loading from safetensors and from Orbax: both forms, on one device and on two, and a table of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import load, report
from benchmarks.load import FULL
from jlora.loadgen.rounds import Budget


def test_both_forms_are_loaded_over_one_device_and_two_and_give_the_same_weights(tmp_path: Path):
    words = ["load", "--quick", "--rounds", "1", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert bench.main(words) == 0
    record = json.loads((tmp_path / "load-float32.json").read_text())
    (finished,) = record["rounds"]
    assert list(finished) == ["safetensors tp 1", "orbax tp 1", "safetensors tp 2", "orbax tp 2"]
    assert all(sample["seconds"] > 0 and sample["again_s"] > 0 for sample in finished.values())
    assert len({sample["checksum"] for sample in finished.values()}) == 1
    assert [row["tp"] for row in record["summary"]] == [1, 2]
    assert all(row[which]["ratio"]["median"] > 0 for row in record["summary"] for which in ("first", "again"))
    assert "| float32 | 2 | again |" in (tmp_path / report.PAGE).read_text()


def test_forms_that_give_other_weights_void_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No process is started: the samples are made up."""
    sums = iter([1, 2, 1, 1])
    monkeypatch.setattr(load, "_write", lambda spec, work: dict.fromkeys(load.FORMS, work))
    monkeypatch.setattr(load, "_apart", lambda *args: {"seconds": 1.0, "again_s": 1.0, "checksum": next(sums)})
    with pytest.raises(RuntimeError, match=r"weights differ.*\('orbax tp 1', 2\)"):
        load.run(load.QUICK, "float32", Budget(1, 1.0), tmp_path)


def test_the_full_comparison_is_of_the_benchmarks_own_model():
    assert 120e6 < FULL.spec.parameters < 130e6 and FULL.tps == (1, 2)
