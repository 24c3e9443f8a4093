"""`jlora cluster plan`: the least number of replicas, found with few simulations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jlora.cluster import cli
from jlora.sim.plan import least


@pytest.mark.parametrize("needed", range(1, 40))
def test_the_least_number_is_found_with_few_trials(needed: int):
    tried: list[int] = []

    def attained(count: int) -> float:
        tried.append(count)
        return 1.0 if count >= needed else count / needed

    assert least(attained, 0.999, 32) == (needed if needed <= 32 else 0)
    assert len(tried) == len(set(tried)) <= 10 and max(tried) <= 32


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [f"{0.02 * i},200,20,a{i % 3}," for i in range(120)]
    path = tmp_path / "mine.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,adapter,session\n" + "\n".join(lines) + "\n")
    return str(path)


def test_a_plan_of_two_chips_prints_what_it_tried(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "plan.json"
    argv = ["plan", "--trace", trace, "--slo-ms", "40", "--on", "a10", "h100", "--most", "16", "--json", str(out)]
    assert cli.main(argv) == 0
    told = capsys.readouterr().out
    slow, fast = json.loads(out.read_text())["plans"]
    assert slow["replicas"] > fast["replicas"] >= 1
    assert f"{slow['replicas']} replicas of 1 x a10: 99.0% within 40 ms per token" in told
    for plan in (slow, fast):
        by_count = {each["replicas"]: each["attainment"] for each in plan["tried"]}
        assert by_count[plan["replicas"]] >= 0.99
        assert plan["replicas"] == 1 or by_count[plan["replicas"] - 1] < 0.99


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--on: name the chips to compare, of npu, a100"),
        (["--on", "l40s", "--slo-ms", "40"], "--on: invalid choice: 'l40s' (choose from"),
        (["--on", "a10"], "--slo-ms: set the objective, in milliseconds per output token"),
        (["--on", "a10", "--slo-ms", "40", "--chip", "h100"], "--chip h100: means nothing with --on a10"),
        (["--on", "a10", "--slo-ms", "40", "--model", "llama-3.1-70b"], "no room"),
        (["--on", "a10", "--steps", "step.json", "--slo-ms", "40"], "--on a10: --steps are of one device"),
        (["--on", "a10", "--slo-ms", "40", "--json", "nowhere/plan.json"], "--json nowhere/plan.json: nowhere is no"),
        (["--on", "a10", "--slo-ms", "nan"], "--slo-ms nan: must be more than 0"),
        (["--on", "a10", "--slo-ms", "40", "--speed", "0"], "--speed 0: must be above 0"),
        (["--on", "a10", "--slo-ms", "40", "--attain", "2"], "--attain 2: must be more than 0 and at most 1"),
        (
            ["--on", "a10", "--slo-ms", "40", "--replicas", "4"],
            "--replicas 4: a plan finds the number; --most bounds it",
        ),
        (["--on", "a10", "--slo-ms", "40", "--most", "0"], "--most 0: must be at least 1"),
        (["--on", "a10", "--slo-ms", "40", "--route", "jlora", "random"], "one --route"),
        (["--on", "a10", "--slo-ms", "40", "--hint-s", "1"], "--hint-s 1: must be 0"),
        (["--on", "a10", "--slo-ms", "40", "--late"], "--late: means nothing without --place"),
        (["--on", "a10", "--slo-ms", "40", "--place-s", "5"], "--place-s: means nothing without --place"),
        (["--on", "a10", "--slo-ms", "1", "--migrate-s", "5"], "--migrate-s: means nothing without --migrate"),
    ],
)
def test_wrong_flags_are_named(trace: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        cli.main(["plan", "--trace", trace, *flags])
    assert e.value.code == 2 and said in capsys.readouterr().err


def test_without_a_trace_nothing_is_drawn_in_silence(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--on", "a10", "--slo-ms", "40"])
    assert "--trace: give a CSV of your requests" in capsys.readouterr().err


def test_where_the_most_are_too_few_it_says_what_they_attain_and_what_limits(
    trace: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["plan", "--trace", trace, "--slo-ms", "60", "--on", "a10", "--most", "2"]) == 1
    told = capsys.readouterr()
    found = re.search(r"2 replicas are too few for 99.0% within 60 ms per token: (\d+\.\d)% attained", told.out)
    assert found and 0 <= float(found[1]) < 99
    assert (
        "A late answer takes" in told.out and "in decode" in told.out and "More replicas may help (--most)" in told.out
    )
    assert "a10: 1 attain" in told.err and "a10: 2 attain" in told.err


def test_an_objective_that_no_number_meets_is_found_out_early(trace: str, tmp_path: Path, capsys):
    out = tmp_path / "plan.json"
    assert cli.main(["plan", "--trace", trace, "--slo-ms", "1", "--on", "a10", "--json", str(out)]) == 1
    told = capsys.readouterr().out
    assert "No number is enough for 99.0% within 1 ms per token: a step takes" in told and "a faster chip" in told
    assert json.loads(out.read_text())["plans"] == [{"chip": "a10", "replicas": 0, "tried": []}]


def test_a_plan_stops_where_more_replicas_bring_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out = tmp_path / "long.csv", tmp_path / "plan.json"  # a long prompt takes more than its few tokens may
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{4 * i},3000,4\n" for i in range(12)))
    assert cli.main(["plan", "--trace", str(path), "--slo-ms", "60", "--on", "a10", "--json", str(out)]) == 1
    told = capsys.readouterr().out
    assert "replicas are too few" in told and "More replicas bring nothing; what helps: a faster chip" in told
    assert re.search(r"ms per token: \d+\.\d in prefill", told)
    assert max(each["replicas"] for each in json.loads(out.read_text())["plans"][0]["tried"]) <= 4


def test_a_plan_plays_loraserves_own_placement(trace: str, tmp_path: Path):
    out, flags = tmp_path / "plan.json", ["--slo-ms", "200", "--on", "a10", "--most", "4"]
    plans = []
    for route in (["--route", "loraserve"], ["--place", "loraserve"]):
        assert cli.main(["plan", "--trace", trace, *flags, *route, "--json", str(out)]) == 0
        plans.append(json.loads(out.read_text())["plans"])
    assert plans[0] == plans[1] and plans[0][0]["replicas"] >= 1


def test_one_replica_may_be_enough(trace: str, tmp_path: Path):
    out = tmp_path / "plan.json"
    assert cli.main(["plan", "--trace", trace, "--slo-ms", "5000", "--on", "h100", "--json", str(out)]) == 0
    (plan,) = json.loads(out.read_text())["plans"]
    assert plan["replicas"] == 1 and len(plan["tried"]) == 1


def test_sessions_that_hold_the_trace_back_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A turn waits for the answer before it, so fewer requests come than the trace names."""
    lines = [f"{0.01 * i},{100 + 50 * (i // 3)},40,a,s{i % 3}" for i in range(60)]
    path = tmp_path / "talks.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,adapter,session\n" + "\n".join(lines) + "\n")
    argv = ["plan", "--slo-ms", "5000", "--on", "h100", "--most", "1", "--trace"]
    cli.main([*argv, str(path)])
    (sent,) = re.findall(r"names 10\d.\d\d requests/s, and (\S+)/s were sent: a turn", capsys.readouterr().out)
    assert 0 < float(sent) < 50
    path.write_text(path.read_text().replace("s0\n", "\n").replace("s1\n", "\n").replace("s2\n", "\n"))
    cli.main([*argv, str(path)])
    assert "were sent" not in capsys.readouterr().out


def test_one_replica_heeds_the_flags_of_many(trace: str, tmp_path: Path):
    out, argv = tmp_path / "plan.json", ["plan", "--trace", trace, "--slo-ms", "5000", "--on", "h100", "--most", "1"]
    found = []
    for flags in ([], ["--delay-ms", "200"], ["--kernel", "padded"], ["--fetch-gbps", "0.1"], ["--path-gbps", "0.1"]):
        assert cli.main([*argv, *flags, "--json", str(out)]) == 0
        found.append(json.loads(out.read_text())["plans"][0]["tried"][0])
    times = [(one["ttft_s"], one["tpot_s"]) for one in found]
    assert len(set(times[:4])) == 4 and times[3] == times[4], "the only host has nobody to fetch from but the path"
