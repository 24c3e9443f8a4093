"""The fit of an engine's steps: on steps of known costs, on scenes, and from end to end in miniature."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jlora import config as configuration
from jlora.cli import main
from jlora.doctor import launches, profile
from jlora.doctor.profile import ANSWER, TOKENS, Space, Timed
from jlora.engine.build import build, compile_rest, fitted_steps, programs_of
from jlora.engine.cold_start import Chooser
from jlora.engine.device import name_of
from jlora.engine.plan import ROW
from jlora.errors import ConfigError
from jlora.layout import PoolLayout
from jlora.loadgen.checkpoints import TINY, write_model
from jlora.step_model import FittedSteps, Launches, StepLoad
from tests import port

DECODE, PROMPT = (2, 4, 8), (1, 2, 4)
KNOWN = launches.Fit(
    0.002,
    Launches({2: 0.01, 4: 0.012, 8: 0.02}, context_s=1e-6, adapters_s=1e-4, spread_s=2e-6),
    Launches({1: 0.02, 2: 0.03, 4: 0.05}, pair_s=1e-8, block_s=1e-5, token_s=1e-7),
)
SPACE = Space(DECODE, PROMPT, max_len=256, ranks=(8, 64), blocks=(4, 32), room=100, context=1600)


def steps(count: int, seed: int) -> list[Timed]:
    """Steps of all kinds that take what `KNOWN` says."""
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        sequences, tokens, blocks = (int(rng.integers(1, most)) for most in (9, 129, 200))
        context, blocks = int(rng.integers(sequences, 400)), blocks * (i % 2)
        decode = StepLoad(0, sequences, context, context, blocks, blocks, sequences)
        prompt = StepLoad(tokens, 0, tokens, tokens**2, blocks, tokens * blocks, -(-tokens // ROW))
        kind = i % 3
        ranks = tuple(rng.choice([0, 8, 16], sequences).tolist())
        step = Timed(decode if kind != 1 else None, prompt if kind != 0 else None, ranks)
        step.seconds += [KNOWN.seconds(step)] * 3
        found.append(step)
    return found


def test_known_costs_are_found_again_also_for_steps_that_the_fit_has_not_seen():
    found = launches.fit(steps(120, 0), DECODE, PROMPT)
    held = launches.quality(found.seconds, steps(60, 1))
    assert held.r2 > 0.999 and held.p90 < 0.01


def test_a_neighbour_that_delays_some_steps_in_every_round_hardly_moves_the_fit():
    disturbed = steps(120, 0)
    for step in disturbed[::15]:
        step.seconds[:] = [3 * second for second in step.seconds]
    found = launches.fit(disturbed, DECODE, PROMPT)
    assert launches.quality(found.seconds, steps(60, 1)).median < 0.02


def test_a_form_that_no_step_had_lies_between_its_neighbours():
    some = [step for step in steps(120, 0) if step.decode is None or step.decode.rows not in (3, 4)]
    found = launches.fit(some, DECODE, PROMPT)
    assert found.decode.forms[2] <= found.decode.forms[4] <= found.decode.forms[8]


def test_caraserves_lines_are_found_where_they_hold():
    some = [step for step in steps(90, 0) if step.kind == "decode"]
    for step in some:
        step.seconds[:] = [0.01 + 1e-5 * launches.padded(step)]
    lines = launches.caraserve(some, DECODE)
    assert set(lines) == {f"{kind}{more}" for kind in ("padded", "unpadded") for more in ("", " and the base's terms")}
    assert launches.quality(lines["padded"], some).r2 > 0.999 > launches.quality(lines["unpadded"], some).r2


def test_steps_that_decode_the_same_sequences_are_one_at_its_least():
    loads = [StepLoad(0, 2, context, context, 0, 0, 2) for context in (10, 12, 14)]
    seconds = ([3.0, 1.0], [2.0, 2.0], [4.0, 5.0])
    same = [Timed(load, None, (8, 0), taken) for load, taken in zip(loads, seconds, strict=True)]
    prompt = Timed(None, StepLoad(9, 0, 9, 45.0, 0, 0, 1), (8,), [1.0, 1.0])
    one, other = profile.joined([*same, prompt])
    assert one.seconds == [2.0, 1.0] and one.decode == loads[1] and other is prompt


def test_repeats_tell_the_noise():
    (step,) = steps(1, 0)
    step.seconds[:] = [1.0, 1.1, 1.0, 1.1]
    assert launches.noise([step]).median == pytest.approx(1 - 1 / 1.1)


def test_scenes_meet_every_form_within_context_and_room():
    scenes = SPACE.scenes(np.random.default_rng(0), 2)
    assert len(scenes) == 2 * (len(DECODE) + len(PROMPT))
    assert {next(n for n in DECODE if n >= len(s)) for s in scenes if s[0].output == ANSWER} == set(DECODE)
    prompts = [sum(-(-ask.prompt // ROW) for ask in s) for s in scenes if s[0].output == 1]
    assert {next(n for n in PROMPT if n >= rows) for rows in prompts} == set(PROMPT)
    for scene in scenes:
        assert all(1 <= ask.prompt <= 256 - ask.output for ask in scene) and sum(a.prompt for a in scene) <= 2 * TOKENS
        assert sum({8: 4, 64: 32}[rank] for rank, _ in {a.adapter for a in scene if a.adapter[0]}) <= 100


def test_a_scene_of_long_contexts_has_the_tokens_that_there_is_time_and_room_for():
    space = dataclasses.replace(SPACE, decode=(2, 8, 16), prompt=(1, 8), max_len=1024)
    for tokens, least, most in ((1200, 1100, 1200), (99_999, 1500, 1600)):
        for seed in range(9):
            (scene,) = space.long(np.random.default_rng(seed), tokens)
            assert least <= sum(ask.prompt for ask in scene) <= most and len(scene) <= 16
            assert all(ask.prompt + ask.output <= 1024 for ask in scene)
            outputs = [ask.output for ask in scene]
            assert outputs == sorted(outputs, reverse=True) and outputs[-1] == ANSWER
    assert space.long(np.random.default_rng(0), 2 * TOKENS) == []
    tight = dataclasses.replace(SPACE, max_len=ANSWER, context=10**6)
    assert tight.long(np.random.default_rng(0), 10**6) == []


def test_a_file_of_another_machine_is_refused_before_the_weights_are_read(tmp_path: Path):
    from tests.test_step_model import STEPS

    STEPS.write(tmp_path / "steps.json")
    layout = PoolLayout.of(TINY, 256, 16)
    keys = {"model.path": "x", "engine.step_model": str(tmp_path / "steps.json")}
    with pytest.raises(ConfigError, match="device = a processor"):
        fitted_steps(configuration.load(None, keys), TINY, layout)
    with pytest.raises(ConfigError, match="step model .*nowhere"):
        fitted_steps(configuration.load(None, {"engine.step_model": "nowhere"}), TINY, layout)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_of_another_link_is_refused_and_one_of_another_jax_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from tests.test_step_model import STEPS

    path, layout = tmp_path / "steps.json", PoolLayout.of(TINY, 256, 16)
    keys = {"model.path": "x", "engine.step_model": str(path), "cache.link_gbps": 0.5}
    here = dataclasses.replace(STEPS, device=name_of(jax.devices()[0]), jax=jax.__version__)
    here.write(path)
    assert fitted_steps(configuration.load(None, keys), TINY, layout) == here and not warned(caplog)
    with pytest.raises(ConfigError, match=r"link_gbps = 0\.5: must be 2\.0"):
        fitted_steps(configuration.load(None, {**keys, "cache.link_gbps": 2.0}), TINY, layout)
    dataclasses.replace(here, jax="0.1").write(path)
    assert fitted_steps(configuration.load(None, keys), TINY, layout) is not None
    assert f"jax = 0.1, here it is {jax.__version__}" in caplog.text


@pytest.mark.parametrize(
    ("key", "then", "now"),
    [
        ("attention", "pallas-tpu", "xla"),
        ("engine.max_seqs", 7, 8),
        ("engine.max_step_tokens", 32, 64),
        ("model.max_model_len", 2 * TINY.max_len, TINY.max_len),
    ],
)
def test_a_file_of_other_programs_is_told(
    key: str, then: str | int, now: str | int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from tests.test_step_model import STEPS

    path, layout = tmp_path / "steps.json", PoolLayout.of(TINY, 256, 16)
    keys = {"model.path": "x", "engine.step_model": str(path), "cache.link_gbps": 0.5}
    config = configuration.load(None, {**keys, "engine.max_seqs": 8, "engine.max_step_tokens": 64})
    here = dataclasses.replace(STEPS, device=name_of(jax.devices()[0]), jax=jax.__version__)
    programs = programs_of(config, TINY, layout)
    dataclasses.replace(here, programs=programs).write(path)
    assert fitted_steps(config, TINY, layout) is not None and warned(caplog) == []
    dataclasses.replace(here, programs={**programs, key: then}).write(path)
    assert fitted_steps(config, TINY, layout) is not None
    said = f"step model {path}: {key} = {then}, here it is {now}; its times may differ: fit again"
    assert warned(caplog) == [said]


@pytest.mark.slow
def test_a_step_in_the_middle_of_a_prompt_is_timed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_model(tmp_path / "model", TINY, 0)
    keys = {"model.path": str(tmp_path / "model"), "engine.max_seqs": "2", "engine.max_step_tokens": "32"}
    keys |= {"cache.hbm_blocks": "512", "cache.host_blocks": "64", "serve.compile_cache": ""}
    built = build(configuration.load(None, keys), progress=False)
    ended: list[bool] = []
    wait = getattr(*port.timed_waits())

    def waited(watched: Any) -> None:
        wait(watched)
        ended.append(built.runner.pool.array.is_ready())

    monkeypatch.setattr(*port.timed_waits(), waited)
    try:
        timed: list[Timed] = []
        profile.Profile(built).run((profile.Ask(100, 1),), timed)
    finally:
        built.engine.close()
    assert [step.prompt.prompt for step in timed if step.prompt] == [32, 32, 32, 4]
    assert ended == [True] * 4


@pytest.mark.slow
def test_sequences_of_long_contexts_decode_together(tmp_path: Path):
    spec = dataclasses.replace(TINY, max_len=1024)
    write_model(tmp_path / "model", spec, 0)
    keys = {"model.path": str(tmp_path / "model"), "engine.max_seqs": "4", "engine.max_step_tokens": "256"}
    keys |= {"cache.hbm_blocks": "512", "cache.host_blocks": "64", "serve.compile_cache": ""}
    built = compile_rest(build(configuration.load(None, keys), progress=False))
    try:
        playing, timed = profile.Profile(built), []
        (scene,) = Space.of(built, (8,)).long(np.random.default_rng(0), 1500)
        playing.run(scene, timed)
    finally:
        built.engine.close()
    together = [
        step.decode for step in timed if step.kind == "decode" and step.decode and step.decode.rows == len(scene)
    ]
    assert len(together) >= 3 and max(load.context for load in together) > sum(ask.prompt for ask in scene) > 1400
    assert playing.took_s > 0 and playing.speed > 0


@pytest.mark.slow
def test_an_engine_is_profiled_and_auto_reads_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_model(tmp_path / "model", TINY, 0)
    sizes = {"engine.max_seqs": "4", "engine.max_step_tokens": "64", "cache.hbm_blocks": "512"}
    sizes |= {"cache.host_blocks": "2048", "serve.compile_cache": ""}
    words = ["doctor", "fit", "--model", str(tmp_path / "model"), "--quick", "--out", str(tmp_path), "--set"]
    assert main([*words, *(f"{key}={value}" for key, value in sizes.items())]) == 0
    said = capsys.readouterr().out
    assert "ours held all" in said and "contexts: up to " in said
    (path,) = tmp_path.glob("fit-*-tp1.json")
    found = FittedSteps.read(path)
    assert set(found.decode.forms) >= {2, 4} and set(found.prompt.forms) == {1, 2} and found.device_blocks == 512
    assert all(seconds > 0 for seconds in found.prompt.forms.values())
    assert found.programs["engine.max_seqs"] == 4 and found.programs["attention"] == "xla"
    assert found.points is not None and found.points.of.batch == 4 and min(found.points.by_rank.values()) > 0
    keys = {"model.path": str(tmp_path / "model"), "engine.cold_start": "auto", "engine.step_model": str(path)}
    built = compile_rest(build(configuration.load(None, {**sizes, **keys}), progress=False))
    try:
        helps = built.parts.scheduler.manager.leases.gate.helps
        assert isinstance(helps, Chooser) and helps.costs.device.at(32) == found.prefill_s({0: 1}, 32)
    finally:
        built.engine.close()
    dataclasses.replace(found, device="another").write(path)
    with pytest.raises(ConfigError, match="device = another"):
        build(configuration.load(None, {**sizes, **keys}), progress=False)
