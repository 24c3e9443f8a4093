"""`jlora bench paper`: rates as asked for, means and peaks as the paper makes them, and a run that goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jlora.bench import paper, paper_page
from jlora.bench.paper import Case, Curves, OverTime, Plan, Runs, Study
from jlora.bench.paper_numbers import Curve, Table, average, invalid_share

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


def test_the_half_hour_rises_and_falls_and_keeps_its_mean(tmp_path: Path):
    study = OverTime(replace(plan(tmp_path), seconds=60.0), Case("W1", "13B", 100))
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


def study(name: str, points: dict[str, list[float]], best: str = "vllm-fair:0.3") -> dict:
    """Runs at rates 1, 2, 3, ... with these TTFTs, of which the first two make the means."""
    runs = [
        {"rate": float(i), "policy": policy, "ttft_s": ttft, "tpot_s": 0.03, "invalid_kv": 0.1, "history_kv": 0.3,
         "running_kv": 0.1}
        for policy, values in points.items() for i, ttft in enumerate(values, 1)
    ]  # fmt: skip
    case = {"name": name, "workload": "W1", "model": "7B", "adapters": 20, "popularity": ""}
    return {"kind": "curves", "case": case, "runs": runs, "rates": [1.0, 2.0], "best": best}


def test_ratios_are_of_means_over_rates_and_calm_ones_leave_saturation_out():
    points = {"fastlibra": [0.1, 0.3, 0.9], "vllm": [0.1, 0.9, 2.0], "vllm-fair:0.3": [0.1, 0.2]}
    table = Table([study("W1-7B-20", points)])
    assert table.ratios("fastlibra", "vllm", "ttft_s") == {"W1-7B-20": pytest.approx(0.4)}
    assert table.ratios("fastlibra", "vllm", "ttft_s", calm=True) == {"W1-7B-20": pytest.approx(1.0)}
    assert table.ratios("fastlibra", "vllm", "peak")["W1-7B-20"] == pytest.approx((2 + 1 / 3) / 1.5)
    assert average(table.ratios("fastlibra", "best", "ttft_s")) == pytest.approx(0.4 / 0.3)
    assert table.curve("W1-7B-20", "slora") is None and average(table.ratios("fastlibra", "slora", "ttft_s")) is None


def test_a_policy_or_a_case_that_is_not_complete_is_left_out():
    half = study("W1-7B-50", {"fastlibra": [0.1, 0.3], "vllm": [0.1]})
    table = Table([half, {**half, "case": {**half["case"], "name": "other"}, "rates": [], "best": ""}])
    assert list(table.cases) == ["W1-7B-50"] and table.curve("W1-7B-50", "vllm") is None


def test_invalid_kv_is_a_share_of_the_kv_on_the_device():
    table = Table([study("W1-7B-20", {"fastlibra": [0.1, 0.1], "fastlibra-wom": [0.1, 0.1]})])
    assert invalid_share(table) == pytest.approx(0.25)


class Counted(Study):
    """Two runs, and how often traffic was drawn."""

    kind = "counted"
    drawn = 0

    def fill(self, runs: Runs) -> None:
        for policy in ("jlora", "lru"):
            runs.at(2.0, policy)

    def traffic(self, rate: float):
        self.drawn += 1
        return super().traffic(rate)


def test_finished_runs_are_kept_and_the_deadline_begins_none(tmp_path: Path):
    job = Counted(plan(tmp_path), CASE)
    assert job.run(0.0).endswith("cut") and job.result()["runs"] == []
    assert job.run(time.time() + 60) == "counted-W3-7B-20"
    first = job.result()
    assert job.drawn == 1  # both policies had the same trace
    assert [run["policy"] for run in first["runs"]] == ["jlora", "lru"]
    again = Counted(plan(tmp_path), CASE)
    again.run(0.0)
    assert again.drawn == 0 and again.result() == first
    other = Counted(replace(plan(tmp_path), seed=1), CASE)
    assert other.result()["runs"] == []  # another seed's runs are no use


def test_the_quick_run_gives_a_page_with_every_section_and_figure(tmp_path: Path):
    result = paper.run(paper.quick(tmp_path / "work", None))
    json.dumps(result)
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
    ):
        assert f"## {head}" in text
    assert "| TTFT / vLLM | 0.40 |" in text
    pytest.importorskip("matplotlib")
    for name in ("11", "curves", "12", "13", "14", "15", "16", "9"):
        assert (out / f"fastlibra-{name}.png").stat().st_size > 5000
