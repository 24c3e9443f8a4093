"""`jlora bench beyond`: cells with their sizes, hints at the rates of the cell without, and a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jlora.bench import beyond
from jlora.bench.paper import Case


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
    assert {run["policy"] for run in cell["runs"]} >= set(beyond.POLICIES)
    assert beyond.run(replace(plan, minutes=0.0)) == json.loads(json.dumps(result))
    beyond.write(tmp_path, result)
    text = (tmp_path / beyond.PAGE).read_text()
    for head in ("Every cell", "`jlora` and the bound", "`Prefetch` before the next turn"):
        assert f"## {head}" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| W3-7B-20-hbm0.5-link2 |") and ";" in line]
    bound = row.split("|")[-2]
    assert float(bound.partition(";")[2]) == pytest.approx(1.0, abs=0.5)
