"""The soak's verdict on recorded series, and both builds for some seconds: only the one that leaks fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.verdict import Limits, Run, Sample, judge
from jlora.cli import main

HOUR = 3600.0
WELL = Run(
    HOUR,
    [Sample(float(at), "server", 500.0 + 80 * min(at / 400, 1) + at % 3, 300.0, 40, 30) for at in range(0, 3600, 15)],
    [(float(at), 1.0 + at % 7 / 10) for at in range(3600)],
    {"wrong answers": 0},
)


def failing(run: Run, limits: Limits | None = None) -> list[str]:
    return [finding.what for finding in judge(run, limits or Limits()) if not finding.holds]


def changed(change: Callable[[Sample], dict[str, Any]]) -> Run:
    return replace(WELL, samples=[replace(sample, **change(sample)) for sample in WELL.samples])


def test_memory_that_fills_its_caches_in_the_warm_up_holds():
    assert failing(WELL) == []


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (changed(lambda s: {"rss_mib": 500 + s.at_s * 6 / HOUR}), ["server: memory, MiB per hour"]),
        (changed(lambda s: {"threads": 40 + 3 * (s.at_s > 3200)}), ["server: more threads at the end"]),
        (changed(lambda s: {"descriptors": 30 + int(s.at_s) // 100}), ["server: more descriptors at the end"]),
        (replace(WELL, ttft=[(at, s * (1 + at / HOUR)) for at, s in WELL.ttft]), ["TTFT p99, last part over first"]),
        (replace(WELL, counts={"wrong answers": 1}), ["wrong answers"]),
        (replace(WELL, ttft=WELL.ttft[:2000]), ["TTFT p99, last part over first"]),  # nothing came at the end
        (replace(WELL, samples=WELL.samples[:1]), ["server: memory, MiB per hour", "server: more threads at the end",
                                                   "server: more descriptors at the end"]),
    ],
    ids=["memory", "threads", "descriptors", "slower", "wrong", "silent", "blind"],
)  # fmt: skip
def test_what_grows_slows_or_is_wrong_fails_by_name(run: Run, what: list[str]):
    assert failing(run) == what


def test_a_processs_growth_is_its_own():
    more = [replace(sample, process="r0", rss_mib=500 + sample.at_s) for sample in WELL.samples]
    assert failing(replace(WELL, samples=[*WELL.samples, *more])) == ["r0: memory, MiB per hour"]


def soaked(tmp_path: Path, *flags: str) -> Sequence[dict[str, Any]]:
    out = tmp_path / "out"
    assert main(["bench", "soak", "--quick", "--out", str(out), "--work", str(tmp_path / "work"), *flags]) == 0
    (path,) = out.glob("soak-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--leak"]], ids=["well", "leak"])
def test_only_the_server_that_leaks_fails(tmp_path: Path, flags: list[str]):
    lines = soaked(tmp_path, *flags)
    verdict = {line["side"]: line["holds"] for line in lines if line["cell"] == "verdict"}
    assert [what for what, holds in verdict.items() if not holds] == ["server: memory, MiB per hour"] * len(flags)
    ends = {line["side"]: line["count"] for line in lines if line["cell"] == "ends"}
    assert ends["stream: OK"] > 0 and ends["load: OK"] > 0 and not [line for line in lines if line["cell"] == "trouble"]


def test_a_cluster_that_leaks_is_not_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "soak", "--quick", "--leak", "--cluster", "2", "--out", str(tmp_path)]) == 1
    assert "--leak" in capsys.readouterr().err
