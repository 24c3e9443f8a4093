"""`jlora bench beyond`: cells with their sizes, hints at the rates of the cell without, and a page."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import beyond, beyond_page
from benchmarks.paper import SPLITS, Case


def test_a_cells_name_says_what_is_special_and_its_scenario_has_it():
    case = Case("W3", "7B", 100, hbm_share=0.25, link_gbps=2.0)
    assert case.name == "W3-7B-100-hbm0.25-link2"
    assert (case.scenario.hbm_share, case.scenario.link_gbps, case.scenario.hint_s) == (0.25, 2.0, 0.0)
    assert replace(case, hint_s=1.0, adapter_load_s=4.4).name == "W3-7B-100-hbm0.25-link2-load4.4-hint1"
    names = [case.name for case in (*beyond.CELLS, *beyond.HINTED)]
    assert len(names) == len(set(names))
    plain = {case.name for case in beyond.CELLS}
    assert all(case.name.partition("-hint")[0] in plain for case in beyond.HINTED)


def test_the_quick_run_gives_every_table_and_goes_on_from_its_journal(tmp_path: Path):
    plan = beyond.quick(tmp_path / "work", None)
    result = beyond.run(plan)
    (cell,) = [study for study in result["studies"] if study["kind"] == "cell"]
    (hint,) = [study for study in result["studies"] if study["kind"] == "hint"]
    assert hint["rates"] == cell["rates"] and len(cell["rates"]) == len(beyond.LEVELS)
    runs = beyond.by_rate(cell)
    assert set(runs) >= {(rate, policy) for rate in cell["rates"] for policy in beyond.POLICIES}
    best = SPLITS.index(beyond.best_share(runs, cell["rates"]))
    around = SPLITS[max(best - 1, 0) : best + 2]
    assert {(rate, beyond.static(share)) for rate in cell["rates"] for share in around} <= set(runs)
    assert cell["commits"] == hint["commits"] != []
    assert beyond.run(replace(plan, minutes=0.0)) == json.loads(json.dumps(result))
    beyond_page.write(tmp_path, result)
    text = (tmp_path / beyond_page.PAGE).read_text()
    for head in ("Overall", "Every cell", "`jlora` and the bound", "`Prefetch` before the next turn"):
        assert f"## {head}" in text
    (row,) = [
        line for line in text.splitlines() if line.startswith("| W3-7B-20-hbm0.5-link2 | ") and line.count(",") > 5
    ]
    assert row.count(",") == 3 * 6  # four rates, times and ratios to four policies
    assert (tmp_path / "beyond.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_a_cell_without_all_of_its_runs_is_not_shown(tmp_path: Path):
    plan = beyond.quick(tmp_path / "work", None)
    result = beyond.run(replace(plan, minutes=0.0))
    assert all(study["rates"] == [] for study in result["studies"])
    beyond_page.write(tmp_path, result)
    assert "## Overall" not in (tmp_path / beyond_page.PAGE).read_text()


def made(ours: float, theirs: list[float]) -> beyond_page.Point:
    """A point whose batches have these TTFTs."""
    runs = [
        {"ttft_s": sum(b) / len(b), "tpot_s": 0.02, "batches_s": b, "adapter_hits": 0.5, "kv_device_hits": 0.5}
        for b in ([ours] * len(theirs), theirs)
    ]
    return beyond_page.Point("cell", 0.7, 1.0, "lru", *runs)


def test_a_ratio_comes_with_the_error_that_its_batches_tell():
    steady, wild = made(0.1, [0.09] * 5), made(0.1, [0.05, 0.13, 0.05, 0.13, 0.09])
    assert (steady.ratio(), steady.error) == (pytest.approx(0.9), pytest.approx(0.0))
    assert wild.ratio() == pytest.approx(0.9) and wild.error == pytest.approx(0.4 / 5**0.5)
    table = beyond_page._ahead([steady, wild, made(0.1, [0.12] * 5)])
    assert "0.90 ± 0.00" in table and "1.20" not in table


def test_batches_are_equal_parts_of_the_requests_in_the_order_in_which_they_were_sent():
    rows = [[float(10 - i), float(i)] for i in range(10)]
    assert beyond.batch_means({"columns": ["sent_s", "ttft_s"], "rows": rows}) == [8.5, 6.5, 4.5, 2.5, 0.5]
    unanswered = beyond.batch_means({"columns": ["sent_s", "ttft_s"], "rows": [[0.0, None]]})
    assert unanswered == []
