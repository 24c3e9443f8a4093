"""The record of fitted step times: what it predicts, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jlora import config as configuration
from jlora.cli import main
from jlora.cluster.routing.costs import Costs
from jlora.cluster.routing.routes import policy_of
from jlora.engine import cold_start
from jlora.errors import ConfigError
from jlora.loadgen.checkpoints import TINY
from jlora.sim.hardware import Hardware
from jlora.step_model import FITTED, Basis, FittedSteps, Help, Launches, StepLoad

STEPS = FittedSteps(
    format=FITTED,
    device="a processor, 2 cores",
    chips=1,
    spec=TINY,
    block_tokens=16,
    device_blocks=255,
    row_tokens=32,
    rank_blocks=0.5,
    link_bps=1e9,
    link_gbps=0.5,
    jax="0.1",
    fixed_s=0.001,
    decode=Launches({2: 0.01, 8: 0.02}, context_s=1e-6, adapters_s=1e-4, block_s=1e-5, spread_s=1e-6),
    prompt=Launches({1: 0.02, 4: 0.06}, pair_s=1e-7, token_s=1e-6),
    help=Help((1e-3, 1e-5), (1e-4, 1e-6)),
)


OF = {"slo_s": 0.1, "context": 576, "prompts": 4.0, "batch": 8}


def test_a_step_is_its_launches_padded_to_compiled_forms():
    decode = StepLoad(0, 3, 300, 300.0, 10, 30, 3)
    prompt = StepLoad(40, 0, 40, 820.0, 10, 400, 2)
    alone = 0.02 + 300e-6 + 8 * 1e-4 + 10 * (1e-5 + 8 * 1e-6)
    assert STEPS.seconds(decode) == pytest.approx(0.001 + alone)
    assert STEPS.seconds(decode, prompt) == pytest.approx(0.001 + alone + 0.06 + 820e-7 + 400e-6)


def test_more_rows_than_any_form_cost_in_proportion():
    assert STEPS.step_s({0: 16}) == pytest.approx(0.001 + 0.02 * 2)


def test_a_router_asks_for_ranks_and_tokens():
    costs: Costs = STEPS  # as a router knows them
    assert costs.step_s({8: 1, 16: 1}) == pytest.approx(0.001 + 0.01 + 2 * 1e-4 + 12 * (1e-5 + 2e-6))
    assert STEPS.prefill_s({0: 1}, 32) == pytest.approx(0.001 + 0.02 + 32 * 33 / 2 * 1e-7)
    assert STEPS.prefill_s({8: 1}, 33) > STEPS.prefill_s({0: 1}, 33) > STEPS.prefill_s({0: 1}, 32)
    assert STEPS.prefill_s({}, 0) == pytest.approx(0.001 + 0.02)  # what any launch takes


def test_cold_starts_are_predicted_from_the_file():
    costs = cold_start.Costs.fitted(STEPS)
    assert costs.device.at(40) == STEPS.prefill_s({0: 1}, 40)
    assert costs.place.at(10) == pytest.approx(1.1e-3) and costs.block.at(10) == pytest.approx(1.1e-4)


def test_a_file_is_read_again(tmp_path: Path):
    path = tmp_path / "steps.json"
    STEPS.write(path)
    assert FittedSteps.read(path) == STEPS and FittedSteps.wrote(path)
    dataclasses.replace(STEPS, facts={"r2": float("nan")}).write(path)
    assert FittedSteps.read(path).facts == {"r2": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "jlora-step-model-1"}, "format"),
        ({"fixed_s": -1.0}, "fixed_s"),
        ({"decode": {"forms": {}}}, "decode.forms"),
        ({"device_blocks": "many"}, "device_blocks"),
        ({"points": {"of": OF, "by_rank": {8: 0.0}}}, "points.by_rank"),
        ({"points": {"of": OF, "by_rank": {}}}, "points.by_rank"),
        ({"points": {"of": {**OF, "slo_s": -0.1}, "by_rank": {8: 9.0}}}, "points.of.slo_s"),
        ({"points": {"of": {**OF, "batch": 0}, "by_rank": {8: 9.0}}}, "points.of.batch"),
        ({"points": {"by_rank": {8: 9.0}}}, "`of`"),
        (None, "malformed"),
    ],
)
def test_any_other_file_is_refused(tmp_path: Path, change: dict | None, message: str):
    path = tmp_path / "steps.json"
    path.write_text("{" if change is None else json.dumps({**dataclasses.asdict(STEPS), **change}))
    with pytest.raises(ConfigError, match=message if change else "step model .*steps.json"):
        FittedSteps.read(path)


HERE = Basis(TINY, "a processor, 2 cores", 1, 16, 0.5)


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (HERE._replace(spec=dataclasses.replace(TINY, layers=3)), f"spec.layers = {TINY.layers}: must be 3, as here"),
        (HERE._replace(spec=dataclasses.replace(TINY, dtype="bfloat16")), "spec.dtype = float32: must be bfloat16"),
        (HERE._replace(device="another"), "device = a processor, 2 cores: must be another"),
        (HERE._replace(chips=2), "chips = 1: must be 2"),
        (HERE._replace(block_tokens=32), "block_tokens = 16: must be 32"),
        (HERE._replace(link_gbps=0.0), "link_gbps = 0.5: must be 0.0"),
    ],
)
def test_another_model_machine_pool_or_link_is_refused(here: Basis, message: str):
    STEPS.check(HERE._replace(spec=dataclasses.replace(TINY, name="another", max_len=64, eos_ids=(1, 2, 3))))
    with pytest.raises(ConfigError, match=message):
        STEPS.check(here)


@pytest.mark.parametrize("field", ["link_gbps", "jax"])
def test_a_file_that_does_not_say_what_it_was_fitted_on_is_refused(tmp_path: Path, field: str):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({name: value for name, value in dataclasses.asdict(STEPS).items() if name != field}))
    with pytest.raises(ConfigError, match=f"{field}.*jlora doctor fit"):
        FittedSteps.read(path)


def test_a_router_warns_of_a_file_of_another_number_of_chips(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "steps.json"
    STEPS.write(path)
    keys = {"cluster.routing": "jlora", "engine.step_model": str(path)}
    policy_of(configuration.load(None, keys))
    assert caplog.messages == []
    policy_of(configuration.load(None, {**keys, "model.tp": 2}))
    assert caplog.messages == [f"step model {path}: chips = 1, model.tp = 2: fit again"]


def test_the_simulator_takes_model_pool_and_steps_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    STEPS.write(tmp_path / "steps.json")
    hardware = Hardware.fitted(STEPS)
    assert hardware.pool_bytes // hardware.layout.block_bytes == 255 and hardware.link_bps == 1e9
    words = ["sim", "--steps", str(tmp_path / "steps.json"), "--workload", "W2", "--rate", "2", "--seconds", "2"]
    flags = ["--shrink", "32", "--adapters", "2", "--ranks", "8", "--policy", "jlora", "--host-gb", "0.01", "--set"]
    assert main([*words, *flags, "engine.cold_start=auto", "engine.max_seqs=8"]) == 0
    assert "1 x a processor, 2 cores, random-tiny: pool 255 blocks" in capsys.readouterr().out
