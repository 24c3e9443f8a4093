"""Step times and sizes of named hardware, against figures known from elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from jlora.errors import ConfigError
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.step_model import FORMAT, StepLoad, StepModel

MIB = 2**20


def hardware(chip: str = "npu", chips: int = 1, model: str = "llama-2-7b") -> Hardware:
    return Hardware(CHIPS[chip], chips, MODELS[model])


def decode(batch: int, context: int) -> StepLoad:
    return StepLoad(0, batch, batch * context, batch * context, 0, 0)


@pytest.mark.parametrize(
    "model, milliseconds", [("llama-2-7b", (3.2, 4.1, 7.1, 11.1)), ("llama-3-8b", (3.5, 3.7, 4.5, 5.5))]
)
def test_decode_on_h200_takes_what_measured_bandwidth_says(model: str, milliseconds: tuple[float, ...]):
    """Weights and KV over 4.3 TB/s, without the fixed part: B = 1, 8, 32, 64 at 1k of context."""
    steps = hardware("h200", model=model).step_model()
    taken = [1e3 * (steps.seconds(decode(batch, 1024)) - steps.fixed_s) for batch in (1, 8, 32, 64)]
    assert taken == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize("model, milliseconds", [("llama-2-7b", 35), ("llama-3-8b", 38)])
def test_prefill_on_h200_takes_what_measured_flops_say(model: str, milliseconds: float):
    steps = hardware("h200", model=model).step_model()
    load = StepLoad(2048, 0, 2048, 2048 * 2049 / 2, 0, 0)
    assert 1e3 * (steps.seconds(load) - steps.fixed_s) == pytest.approx(milliseconds, rel=0.05)


def test_the_papers_card_has_46_gb_of_pool_in_blocks_of_16_mib_and_adapters_of_64_and_128_mib():
    seven = hardware()
    assert seven.pool_bytes == pytest.approx(46e9, rel=0.01)
    assert (seven.layout.block_tokens, seven.layout.block_bytes) == (32, 16 * MIB)
    assert (seven.adapter_blocks(32), seven.adapter_blocks(64)) == (4, 8)
    assert 100e-6 < seven.step_model().prompt_token_s < 115e-6


def test_grouped_heads_make_smaller_blocks_and_adapters_of_more_of_them():
    grouped = hardware(model="llama-3-8b")
    assert grouped.layout.block_bytes == 4 * MIB
    assert grouped.adapter_blocks(32) * 4 * MIB >= 2 * 2 * 32 * 32 * (4096 + 4096 + 4096 + 1024)  # all of A and B


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("model, chips", [("llama-2-7b", 2), ("llama-2-13b", 4), ("llama-34b", 4), ("llama-3-8b", 4)])
def test_a_step_of_any_load_takes_longer_with_more_of_anything(name: str, model: str, chips: int):
    steps = hardware(name, chips, model).step_model()
    base = StepLoad(4096, 32, 1 << 20, 1e9, 4000, 1 << 24)  # all three rooflines are far above their floors
    for field in base._fields:
        more = base._replace(**{field: 4 * getattr(base, field)})
        assert steps.seconds(more) >= steps.seconds(base)
    assert all(value > 0 for value in asdict(steps).values())


def test_chips_share_the_work_but_not_the_latency():
    one, four = (hardware("a100", chips).step_model() for chips in (1, 4))
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert one.prompt_token_s / 4 < four.prompt_token_s < one.prompt_token_s  # and they exchange activations
    assert four.fixed_s > one.fixed_s


def test_a_model_that_leaves_no_room_is_refused_by_name():
    with pytest.raises(ConfigError, match="llama-34b: 67.* GB of weights.*1 x npu.*--chips"):
        _ = hardware(model="llama-34b").pool_bytes


def test_chips_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ConfigError, match="must divide"):
        _ = hardware(chips=3).layout


COEFFICIENTS = asdict(hardware().step_model())
MEASURED = {"format": FORMAT, "model": "llama-3-8b", "device": "h200", "chips": 1, "coefficients": COEFFICIENTS}


def written(tmp_path: Path, record: object) -> Path:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(record))
    return path


def test_measured_coefficients_replace_the_peaks(tmp_path: Path):
    path = written(tmp_path, {**MEASURED, "coefficients": {**COEFFICIENTS, "fixed_s": 0.25}})
    fitted = StepModel.fitted(path, "llama-3-8b", 1)
    assert fitted.fixed_s == 0.25 and fitted.pair_s == COEFFICIENTS["pair_s"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "other"}, "format must be"),
        ({"model": "llama-2-7b"}, "model = 'llama-2-7b': must be 'llama-3-8b'"),
        ({"model": None}, "model = None: must be 'llama-3-8b'"),
        ({"chips": 4}, "chips = 4: must be 1"),
        ({"coefficients": {k: v for k, v in COEFFICIENTS.items() if k != "pair_s"}}, "pair_s = None"),
        ({"coefficients": {**COEFFICIENTS, "pairs": 1.0}}, "pairs = 1.0"),
        ({"coefficients": {**COEFFICIENTS, "fixed_s": -1}}, "fixed_s = -1"),
        ({"coefficients": {**COEFFICIENTS, "fixed_s": "1"}}, "fixed_s = '1'"),
    ],
)
def test_a_wrong_file_of_coefficients_is_refused_by_what_is_wrong(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        StepModel.fitted(written(tmp_path, {**MEASURED, **change}), "llama-3-8b", 1)


def test_a_missing_file_of_coefficients_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.json"):
        StepModel.fitted(tmp_path / "none.json", "llama-3-8b", 1)
