"""`jlora bench paper`: rates as asked for, means and peaks as the paper makes them, and a run that goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import paper, paper_details, paper_page, paper_points
from benchmarks.paper import Case, Curves, OverTime, Plan, Runs, Study
from benchmarks.paper_numbers import Curve, Table, average, invalid_share

CASE = Case("W3", "7B", 20)


def plan(tmp_path: Path) -> Plan:
    return replace(paper.quick(tmp_path, None), processes=1)


@pytest.mark.parametrize("workload", ["W1", "W2", "W3"])
@pytest.mark.parametrize("rate", [2.0, 10.0])
def test_a_trace_has_the_rate_asked_for(tmp_path: Path, workload: str, rate: float):
    study = Curves(plan(tmp_path), Case(workload, "7B", 20))
    trace, ranks = study.traffic(rate)
    proper = [turn.at for turn in trace.turns if turn.at >= 0]
    assert len(proper) / proper[-1] == pytest.approx(rate)
    assert len(ranks) == 20 and set(ranks) == {32, 64}


def test_every_rate_has_the_same_requests_and_all_its_times_are_scaled(tmp_path: Path):
    study = Curves(plan(tmp_path), Case("W1", "7B", 20))
    slow, fast = (study.traffic(rate)[0].turns for rate in (2.0, 10.0))
    assert [replace(turn, at=0.0) for turn in slow] == [replace(turn, at=0.0) for turn in fast]
    pairs = [(a.at, b.at) for a, b in zip(slow, fast, strict=True)]
    assert all(a == pytest.approx(5 * b) for a, b in pairs if b >= 0)
    settled = {round(a - 5 * b, 6) for a, b in pairs if b < 0}  # a history is so much earlier that it is computed
    assert len(settled) == 1 and settled.pop() > 0


def test_the_half_hour_rises_and_falls_and_keeps_its_mean(tmp_path: Path):
    study = OverTime(replace(plan(tmp_path), long=60.0), Case("W1", "13B", 100))
    trace, _ = study.traffic(study.RATE)
    times = np.asarray([turn.at for turn in trace.turns if turn.at >= 0])
    last = times[-1]
    assert len(times) / last == pytest.approx(study.RATE)
    edges = np.asarray((0.0, *study.ENDS)) * last
    rates = np.histogram(times, edges)[0] / np.diff(edges)
    assert rates[0] < rates[1] < rates[2] > rates[3]


def curve(*points: tuple[float, float]) -> Curve:
    return Curve(tuple((rate, {"ttft_s": ttft, "tpot_s": 0.03}) for rate, ttft in points))


def test_a_peak_lies_where_the_mean_crosses_half_a_second():
    assert curve((1.0, 0.1), (2.0, 0.3), (3.0, 0.7)).peak == pytest.approx(2.5)
    assert curve((1.0, 0.1), (2.0, 0.3)).peak == 2.0
    assert curve((1.0, 1.0), (2.0, 3.0)).peak == pytest.approx(0.5)


def test_a_mean_is_over_all_rates_from_zero_however_they_are_spaced():
    dense, sparse = curve((1.0, 0.1), (2.0, 0.2), (3.0, 0.3), (4.0, 0.4)), curve((1.0, 0.1), (4.0, 0.4), (5.0, 9.0))
    for made in (dense, sparse):
        rates = [rate for rate, _ in made.points if rate <= 4]
        assert made.mean("ttft_s", rates) == pytest.approx((0.1 + 3 * 0.25) / 4)
    assert dense.mean("ttft_s", [2.0]) == pytest.approx(0.2)


def study(name: str, points: dict[str, list[float]], best: str = "vllm-fair:0.3") -> dict:
    """Runs at rates 1, 2, 3, ... with these TTFTs, of which the first two make the means; ablations at 2 only."""
    runs = [
        {"rate": float(i), "policy": policy, "ttft_s": ttft, "tpot_s": 0.03, "invalid_kv": 0.1, "history_kv": 0.3,
         "running_kv": 0.1}
        for policy, values in points.items() for i, ttft in enumerate(values, 1)
    ]  # fmt: skip
    case = {"name": name, "workload": "W1", "model": "7B", "adapters": 20, "popularity": ""}
    few = {"fastlibra-wom": [2.0]}
    return {"kind": "curves", "case": case, "runs": runs, "rates": [1.0, 2.0], "few": few, "best": best}


def test_ratios_are_of_means_over_rates_and_calm_ones_leave_saturation_out():
    points = {"fastlibra": [0.1, 0.3, 0.9], "vllm": [0.1, 0.9, 2.0], "vllm-fair:0.3": [0.1, 0.2]}
    table = Table([study("W1-7B-20", points)])
    assert table.ratios("fastlibra", "vllm", "ttft_s") == {"W1-7B-20": pytest.approx(0.15 / 0.3)}
    assert table.ratios("fastlibra", "vllm", "ttft_s", calm=True) == {"W1-7B-20": pytest.approx(1.0)}
    assert table.ratios("fastlibra", "vllm", "peak")["W1-7B-20"] == pytest.approx((2 + 1 / 3) / 1.5)
    assert average(table.ratios("fastlibra", "best", "ttft_s")) == pytest.approx(0.15 / 0.125)
    assert table.curve("W1-7B-20", "slora") is None and average(table.ratios("fastlibra", "slora", "ttft_s")) is None


def test_an_ablation_is_compared_at_the_rates_it_has_been_run_at():
    half = study("W1-7B-20", {"fastlibra": [0.1, 0.3], "fastlibra-wom": [9.0, 0.6]})
    half["runs"] = [run for run in half["runs"] if (run["policy"], run["rate"]) != ("fastlibra-wom", 1.0)]
    table = Table([half])
    assert average(table.ratios("fastlibra-wom", "fastlibra", "ttft_s")) == pytest.approx(2.0)
    assert table.mean("W1-7B-20", "fastlibra-wom", "ttft_s") == pytest.approx(0.6)


def test_a_policy_or_a_case_that_is_not_complete_is_left_out():
    half = study("W1-7B-50", {"fastlibra": [0.1, 0.3], "vllm": [0.1]})
    table = Table([half, {**half, "case": {**half["case"], "name": "other"}, "rates": [], "best": ""}])
    assert list(table.cases) == ["W1-7B-50"] and table.curve("W1-7B-50", "vllm") is None


def test_invalid_kv_is_a_share_of_the_kv_on_the_device():
    table = Table([study("W1-7B-20", {"fastlibra": [0.1, 0.1], "fastlibra-wom": [0.1, 0.1]})])
    assert invalid_share(table) == pytest.approx(0.25)


def test_every_point_is_compared_and_those_above_the_bar_are_counted():
    points = {"fastlibra": [0.1, 0.1], "jlora": [0.1, 0.103, 9.0], "vllm": [0.2, 0.1], "vllm-fair:0.3": [0.1]}
    tables = {"grid": Table([study("W1-7B-20", points)])}
    found = paper_points.compare(tables["grid"], "jlora", "vllm")
    assert [(p.ratio, p.level) for p in found] == [(pytest.approx(0.5), 0.5), (pytest.approx(1.03), 1.0)]
    text = paper_points.points(tables, "jlora", {"vllm": "vLLM", "best": "at its best", "fastlibra": "fastlibra"})
    assert "| grid | vLLM | 2 | 1 | 1.030 | W1-7B-20 at 1.00 |" in text
    assert "at its best" not in text  # it has not been run at all rates
    assert paper_points.points({"grid": Table([])}, "jlora", {"vllm": "vLLM"}) == ""


def test_invalid_kv_is_told_for_every_split_and_for_who_has_some():
    points = {"fastlibra": [0.1, 0.1], "vllm-fair:0.1": [0.1], "vllm-fair:0.05": [0.1, 0.1], "lru": [1.0]}
    made = study("W1-7B-20", points)
    for run in made["runs"]:
        run["invalid_kv"] = {"vllm-fair:0.05": 0.2 * run["rate"]}.get(run["policy"], 0.0)
    lines = paper_points.invalid(Table([made])).splitlines()
    assert [line for line in lines if line.startswith("| vllm")] == [
        "| vllm-fair:0.05 | 2 | 75.0% | 100.0% | W1-7B-20 |",
        "| vllm-fair:0.1 | 1 | 0.0% | 0.0% |  |",
    ]
    assert not any("lru" in line or "| fastlibra" in line for line in lines)


class Counted(Study):
    """Two runs, and how often traffic was drawn."""

    kind = "counted"
    calls = 0

    def fill(self, runs: Runs) -> None:
        for policy in ("jlora", "lru"):
            runs.at(2.0, policy)

    def traffic(self, rate: float):
        self.calls += 1
        return super().traffic(rate)


def test_finished_runs_are_kept_and_the_deadline_begins_none(tmp_path: Path):
    job = Counted(plan(tmp_path), CASE)
    assert job.run(0.0).endswith("cut") and job.result()["runs"] == []
    assert job.run(time.time() + 60) == "counted-W3-7B-20"
    first = job.result()
    assert job.calls == 1  # both policies had the same trace
    assert [run["policy"] for run in first["runs"]] == ["jlora", "lru"]
    again = Counted(plan(tmp_path), CASE)
    again.run(0.0)
    assert again.calls == 0 and again.result() == first
    other = Counted(replace(plan(tmp_path), seed=1), CASE)
    assert other.result()["runs"] == []  # another seed's runs are no use


def test_the_quick_run_gives_a_page_with_every_section_and_figure(tmp_path: Path):
    result = paper.run(paper.quick(tmp_path / "work", None))
    table = json.loads(json.dumps(paper.packed(result)))
    for whole, flat in zip(result["studies"], table["studies"], strict=True):
        if "rows" in flat:
            assert [dict(zip(flat["columns"], row, strict=True)) for row in flat["rows"]] == whole["runs"]
    assert {flat["kind"] for flat in table["studies"] if "rows" not in flat} == {"time"}  # it has series
    out = tmp_path / "out"
    out.mkdir()
    (out / paper_page.PAGE).write_text(f"# Title\n\nwritten by hand\n\n{paper_page.MARK}\nof last time")
    paper_page.write(out, result)
    text = (out / paper_page.PAGE).read_text()
    assert "written by hand" in text and "of last time" not in text
    for head in (
        "What the paper states",
        "Every case (Figure 11)",
        "Every case of Figure 16",
        "Ablations (Figure 15)",
        "1,000 and 2,000 adapters",
        "Scene by scene",
        "The adapters' share (Figure 9)",
        "The device over half an hour (Figure 14)",
    ):
        assert f"## {head}" in text
    assert "| TTFT / vLLM | 0.40 |" in text
    assert "Overheads" not in text
    pytest.importorskip("matplotlib")
    for name in ("11", "curves-20", "12", "13", "14", "15", "16", "9"):
        assert (out / f"fastlibra-{name}.png").stat().st_size > 5000


def test_overheads_stand_beside_the_papers_at_the_largest_tree(tmp_path: Path):
    names = ("match", "insert", "round", "decide")
    trees = [
        {"nodes": nodes, "adapters": 10, "policy": "jlora", "block_tokens": 32,
         "operations": {name: {"median_us": 100.0 * nodes} for name in names}}
        for nodes in (1, 2)
    ]  # fmt: skip
    path = tmp_path / paper_details.HOST
    assert paper_details.overheads(path) == ""
    path.write_text(json.dumps({"command": "jlora bench cache --out x", "trees": trees}))
    text = paper_details.overheads(path)
    assert "| matching and updating the tree | 0.5 | jlora | 10 | 0.40 |" in text
    assert "| monitoring and deciding | 5 | jlora | 10 | 0.40 |" in text
