"""The faults of docs/reliability.md that a study injects, in small: every promise holds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import routers, signals
from benchmarks.faults.adapters import COPIES
from benchmarks.faults.study import KNOWN, QUICK
from jlora.cli import main

AT_A_SERVER = ("F3", "F5", "F8", "F10", "F11", "F13", "F19")


def injected(tmp_path: Path, *names: str) -> dict[str, dict[str, Any]]:
    """What was found of each fault."""
    out = tmp_path / "out"
    words = ["bench", "faults", "--quick", "--out", str(out), "--work", str(tmp_path / "work"), "--only", *names]
    assert main(words) == 0
    lines = (out / "faults-real.jsonl").read_text().splitlines()[1:]
    return {line["cell"]: line for line in map(json.loads, lines)}


@pytest.mark.slow
def test_a_server_holds_under_damaged_adapters_cancels_deadlines_bursts_and_ids(tmp_path: Path):
    found = injected(tmp_path, *AT_A_SERVER)
    assert {name: line["side"] for name, line in found.items()} == dict.fromkeys(AT_A_SERVER, "holds")
    assert found["F3"]["injected"] > 100 and found["F3"]["neighbour_same"]
    assert found["F11"]["RESOURCE_EXHAUSTED"] > 180 and found["F11"]["calm_refusals"] > 10
    assert 0 < found["F11"]["host_step_ms"] <= found["F11"]["step_ms"] and found["F11"]["calm_refusal_p99_ms"] > 0
    assert all(line["zombie_tokens"] == line["blocks_left"] == 0 for line in found.values() if "blocks_left" in line)


@pytest.mark.slow
def test_requests_that_flip_between_few_adapters_are_all_admitted_and_answered(tmp_path: Path):
    (line,) = injected(tmp_path, "F19-flips").values()
    assert line["side"] == "holds" and line["OK"] == line["injected"] == QUICK.flips
    assert 0 < line["copied_over_asked"] <= COPIES


@pytest.mark.slow
def test_streams_that_are_read_slowly_are_cut_and_delay_no_other(tmp_path: Path):
    (line,) = injected(tmp_path, "F9").values()
    plan = QUICK.readers
    assert line["side"] == "holds" and line["others_p99"] < plan.most
    assert line["others OK"] == 2 * (plan.streams - plan.slow)
    assert line["well OK"] == line["slow RESOURCE_EXHAUSTED"] == plan.slow


@pytest.mark.slow
def test_a_killed_routers_requests_end_and_the_next_one_serves_their_ids():
    found = asyncio.run(routers.kills(2))
    assert found["UNAVAILABLE"] == found["whole"] == 2 * routers.STREAMS and "wrong" not in found
    assert found["map_s_max"] < routers.PATIENCE_S / 2, "the next router does not know where adapters are"


@pytest.mark.slow
def test_killed_replicas_cost_no_answer_a_token():
    found = asyncio.run(signals.kills(QUICK.kills))
    assert found["injected"] == QUICK.kills and found["answers"] > 0
    assert found["wrong_tokens"] == found["errors"] == 0, found["error"]


@pytest.mark.slow
def test_every_way_to_end_a_server_goes_as_promised():
    found = asyncio.run(signals.drains(QUICK.drains))
    assert {name for name, count in found.items() if count == 1} >= {f"{way}: as promised" for way in signals.WAYS}
    assert found["holds"]


ALONE = {
    "F1": test_killed_replicas_cost_no_answer_a_token,
    "F2": test_a_killed_routers_requests_end_and_the_next_one_serves_their_ids,
    "F9": test_streams_that_are_read_slowly_are_cut_and_delay_no_other,
    "F14": test_every_way_to_end_a_server_goes_as_promised,
    "F19-flips": test_requests_that_flip_between_few_adapters_are_all_admitted_and_answered,
}


def test_every_fault_that_the_study_knows_is_injected_here():
    assert {*AT_A_SERVER, *ALONE} == set(KNOWN)


def test_an_unknown_fault_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "faults", "--quick", "--out", str(tmp_path), "--only", "F99"]) == 1
    assert "--only F99: must be of " + ", ".join(KNOWN) in capsys.readouterr().err
