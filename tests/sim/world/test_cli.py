"""`jlora sim faults`, the command."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from jlora import cli
from jlora.sim.world import report
from jlora.sim.world.report import Journal


def test_seeds_are_played_and_the_strikes_of_every_site_counted(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["sim", "faults", "--seeds", "3:5", "--steps", "20", "--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in report.sites_of("engine"))
    assert out.endswith("2 seeds of 20 steps, 0 failed\n")


def test_a_seed_that_finds_something_says_how_to_play_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def play(seed: int, steps: int, journal: Journal) -> Mapping[str, int]:
        journal.write("it begins")
        raise AssertionError("a find")

    monkeypatch.setattr("jlora.sim.world.replica.play", play)
    assert cli.main(["sim", "faults", "--seeds", "7:8", "--processes", "1"]) == 1
    out = capsys.readouterr().out
    assert "seed 7: AssertionError: a find" in out
    assert "  jlora sim faults --world engine --steps 200 --replay 7" in out
    assert cli.main(["sim", "faults", "--replay", "7"]) == 1
    assert capsys.readouterr().out.startswith("it begins\n")


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--seeds", "5:5"], "--seeds 5:5"), (["--seeds", "x"], "--seeds x"), (["--steps", "0"], "--steps")],
)
def test_a_wrong_flag_is_one_line(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["sim", "faults", *flags]) == 1
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1
