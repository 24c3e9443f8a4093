"""`jlora cluster plan`: the least number of replicas, found with few simulations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jlora.cluster import cli
from jlora.cluster.plan import least


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
    assert f"{slow['replicas']} x a10: 99.0% within 40 ms per token" in told
    for plan in (slow, fast):
        by_count = {each["replicas"]: each["attainment"] for each in plan["tried"]}
        assert by_count[plan["replicas"]] >= 0.99
        assert plan["replicas"] == 1 or by_count[plan["replicas"] - 1] < 0.99


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--slo-ms 0: must be more than 0"),
        (["--slo-ms", "nan"], "--slo-ms nan: must be more than 0"),
        (["--slo-ms", "40", "--speed", "0"], "--speed 0: must be above 0"),
        (["--slo-ms", "40", "--attain", "2"], "--attain 2: must be more than 0 and at most 1"),
        (["--slo-ms", "40", "--replicas", "4"], "--replicas 4: a plan finds the number; --most bounds it"),
        (["--slo-ms", "40", "--most", "0"], "--most 0: must be at least 1"),
        (["--slo-ms", "40", "--route", "jlora", "random"], "one --route"),
    ],
)
def test_wrong_flags_are_named(trace: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        cli.main(["plan", "--trace", trace, *flags])
    assert e.value.code == 2 and said in capsys.readouterr().err


def test_too_few_replicas_are_an_error_code(trace: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "--trace", trace, "--slo-ms", "1", "--most", "2"]) == 1
    assert "2 x npu are too few" in capsys.readouterr().out
