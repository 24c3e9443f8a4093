"""Seeds of one replica under faults: every invariant holds, and every site strikes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jlora.sim.world import report

SEEDS, STEPS, FEW = 1500, 200, 20
RECORD = Path(__file__).parents[3] / "docs" / "results" / "seeds-modelled.jsonl"
STRIKES = 100  # of each site, in all seeds
WORLDS = [pytest.param(world, marks=[pytest.mark.slow] * (world == "engine")) for world in report.WORLDS]


def test_a_few_seeds_hold():
    assert [one.failure for one in report.run("engine", range(FEW), STEPS) if one.failure] == []


@pytest.mark.parametrize("world", WORLDS)
def test_every_seed_that_has_failed_holds(world: str):
    """Those of the record, whatever they have found."""
    lines = map(json.loads, RECORD.read_text().splitlines())
    seeds = sorted({seed for line in lines if line["world"] == world for seed in line["failed"]})
    assert seeds and [one for one in report.run(world, seeds, STEPS) if one.failure] == []


@pytest.mark.slow
def test_seeds_hold_and_every_site_strikes():
    """The seeds of CI. `jlora sim faults` plays any others."""
    played = list(report.run("engine", range(SEEDS), STEPS, processes=2))
    assert [(one.seed, one.failure) for one in played if one.failure] == []
    counts = report.total(played, report.sites_of("engine"))
    assert {name: count for name, count in counts.items() if count < STRIKES} == {}


def test_a_seed_goes_the_same_way_whatever_python_hashes_by():
    """In processes of their own: sets of strings, and of objects, lie elsewhere."""
    code = "from jlora.sim.world import report; print(*(report.play('engine', s, 200)[0].digest for s in (5, 6, 7)))"
    runs = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert len(runs) == 1
