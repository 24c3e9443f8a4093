"""Which measurements may be compared."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks import tables
from benchmarks.records import Study, ratios, steady


def test_a_round_in_which_the_machine_changed_is_not_compared() -> None:
    rows = pd.DataFrame([
        {"round": number, "side": side, "mean_s": mean_s, "pace_s": [before, after]}
        for number, side, mean_s, before, after in [
            (0, "off", 2.0, 1.0, 1.0), (0, "auto", 1.0, 1.0, 1.05), (0, "merged", 9.0, 1.05, 1.5),
            (1, "off", 3.0, 1.0, 1.2), (1, "auto", 1.0, 1.2, 1.2),
            (2, "off", 4.0, 1.2, 1.2), (2, "auto", 1.0, 1.0, 1.0),
        ]
    ])  # fmt: skip
    kept = steady(rows, "off", "auto")  # what happened beside another side does not count
    assert ratios(kept, "off", "auto", "mean_s").to_dict() == {0: 2.0}
    assert ratios(steady(rows, "off", "merged"), "merged", "off", "mean_s").empty


def test_a_page_says_how_many_pairs_were_dropped_and_what_all_of_them_say() -> None:
    keys = ("cell", "round", "side", "mean_s", "p90_s", "pace_s", "switches", "others_queue_s", "decide_s")
    rows = pd.DataFrame([
        dict(zip(keys, (cell, number, side, mean_s, mean_s, pace_s, n, 0.1, 1e-5), strict=True), steps=100, seconds=10)
        for cell, paces in (("rank 8, 0.5", ([1.0, 1.0], [1.0, 1.2])), ("rank 8, 1", ([1.0, 1.2], [1.0, 1.2])))
        for number, pace_s in enumerate(paces)
        for side, mean_s, n in (("off", 1.2 + number, 0), ("auto", 1.0, int(cell.endswith(", 1"))), ("merged", 0.9, 1))
    ])  # fmt: skip
    study = Study({}, {}, rows)
    table = tables.skew(study).set_index("hottest")
    assert table.loc["0.5", "steady"] == "1 of 2 / 1 of 2" and table.loc["1", "steady"] == "0 of 2 / 0 of 2"
    assert table.loc["0.5", "off / auto, mean"] == "1.200" and table.loc["1", "off / auto, mean"] == ""
    assert table.loc["1", "off / auto, all"].startswith("1.625 ±")
    found = tables.merges_by_skew(study)
    assert found["merged"] == {"rank 8, 1": ""} and found["pairs"] == 1 and found["ratio"] == "1.200"
    assert found["always"] == ({"rank 8, 0.5": pytest.approx(0.9)}, {})
    assert found["decide_us"] == pytest.approx(10) and found["decide_share"] == pytest.approx(1e-4)
    assert tables.merges_by_skew(Study({}, {}, rows[rows["cell"] == "rank 8, 1"]))["pairs"] == 0
