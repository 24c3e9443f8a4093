"""The commands of `jlora doctor`: what they refuse before they measure, and the files that they write."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jlora.doctor import cli, engine_fit, tune
from jlora.doctor.engine_fit import RANKS, Found
from jlora.doctor.job import Job
from jlora.errors import ConfigError
from jlora.loadgen.checkpoints import TINY
from jlora.pallas import cases
from jlora.step_model import FittedSteps
from tests.test_step_model import STEPS

COMMANDS = (["check"], ["tune"], ["fit", "--model", "x"])


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured although it was to be refused."""
    begun: list[str] = []
    monkeypatch.setattr(Job, "run", lambda *args: begun.append("check"))
    monkeypatch.setattr(tune, "run", lambda *args: begun.append("tune"))
    monkeypatch.setattr(engine_fit, "started", lambda *args: begun.append("fit"))
    return begun


@pytest.mark.parametrize("words", COMMANDS)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    words: list[str], tmp_path: Path, unmeasured: list[str], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    assert cli.main([*words, "--out", str(tmp_path / "file" / "out")]) == 1
    said = f"jlora doctor {words[0]}: {tmp_path}/file/out: cannot be written (Not a directory)\n"
    assert (capsys.readouterr().err, unmeasured) == (said, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "--minutes 0: must be at least 0.75"),
        (["--minutes", "nan"], "--minutes nan: must be at least 0.75"),
        (["tune", "--minutes", "0"], "--minutes 0: must be more than 0"),
    ],
)
def test_a_time_in_which_nothing_can_be_measured_is_refused_and_an_earlier_report_stays(
    words: list[str], message: str, tmp_path: Path, unmeasured: list[str], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "device.json").write_text("earlier")
    with pytest.raises(SystemExit, match="2"):
        cli.main([*words, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err and unmeasured == []
    assert (tmp_path / "device.json").read_text() == "earlier"


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("[]", "is no report of `jlora doctor`"),
        ('{"models": ["a"]}', "is no report of `jlora doctor`"),
        ("{}", "has no steps of a model"),
        ('{"models": {"llama-3-8b": {}}}', "has no steps of a model"),
    ],
)
def test_a_file_without_steps_is_refused(report: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "device.json"
    path.write_text(report)
    assert cli.main(["fit", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"jlora doctor fit: {path}: {message}")


@pytest.mark.parametrize("setting", ["engine.cold_start=wait", "engine.merge=auto", "cache.prefix_reuse=true"])
def test_a_setting_that_the_fit_would_replace_is_refused(
    setting: str, tmp_path: Path, unmeasured: list[str], capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["fit", "--model", "x", "--out", str(tmp_path), "--set", setting]) == 1
    assert f"--set {setting}: must be left out" in capsys.readouterr().err and unmeasured == []


@pytest.mark.parametrize(("name", "chips"), [("meta-llama/Llama-3.1-8B", 1), ("llama-3-8b", 4)])
def test_a_fit_has_a_file_of_its_own_for_a_model_of_a_hub_and_for_each_number_of_chips(
    name: str, chips: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    steps = dataclasses.replace(STEPS, spec=dataclasses.replace(TINY, name=name), chips=chips)
    built = SimpleNamespace(engine=SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(engine_fit, "started", lambda path, settings: built)
    monkeypatch.setattr(engine_fit, "run", lambda *args: Found(steps, {"fit": []}, []))
    assert cli.main(["fit", "--model", name, "--out", str(tmp_path)]) == 0
    path = tmp_path / f"fit-{name.replace('/', '--')}-tp{chips}.json"
    assert FittedSteps.read(path).spec.name == name and str(path) in capsys.readouterr().out


def test_an_engine_of_low_ranks_is_fitted_on_its_highest():
    assert engine_fit.ranks_of("held", 8) == (8,) and engine_fit.ranks_of("fit", 4) == (4,)
    assert engine_fit.ranks_of("held", 256) == RANKS["held"]


def test_quick_tunes_one_model_on_one_chip():
    assert {(case.spec, case.tp) for case in tune.cases_for(True, False)} == {(cases.LLAMA3_8B, 1)}
    assert len({case.spec for case in tune.cases_for(False, False)}) > 1


def test_tuning_names_the_chip_and_does_not_begin_without_the_accelerator_that_jax_was_installed_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken() -> list[Any]:
        raise ConfigError("no accelerator")

    words = ["tune", "--out", str(tmp_path), "--only", "decode"]  # of which a CPU has none
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{tmp_path}/tiles.json: sizes for cpu\n"
    monkeypatch.setattr(tune, "all_devices", broken)
    assert cli.main(words) == 1
    assert capsys.readouterr().err == "jlora doctor tune: no accelerator\n"


def test_a_choice_that_a_compiler_refuses_with_an_error_of_its_own_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class MosaicError(Exception):
        pass

    def refuses(*args: Any) -> float:
        raise MosaicError("vector layout")

    case = cases.SMALL_LORA[1]
    monkeypatch.setattr(tune.checks, "call_seconds", refuses)
    assert tune.launch_seconds(case, tune.XLA, cases.lora_inputs(case)) == float("inf")
    assert "passed over: MosaicError: vector layout" in capsys.readouterr().out
