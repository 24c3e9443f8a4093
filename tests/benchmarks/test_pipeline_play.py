"""Pipelines with a fork and a join: who is asked when, what they read, and what activation saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.studies.pipeline_play import Answered, Pipelines, Shape, base_and_checks
from jlora.cache import inspect
from jlora.sim.replica import Replica
from tests.sim._sim import BLOCK, MODEL, replica_of, sized

SHAPE = Shape(40, base_and_checks(3), activated=True, base_tokens=8, check_tokens=3, invocation=2)
ROOMY = sized(device=600, host=600)


def play(shape: Shape = SHAPE, starts: tuple[float, ...] = (0.0,), replica: Replica | None = None) -> Pipelines:
    played = Pipelines(replica or replica_of(ROOMY), shape, starts)
    played.play()
    return played


def of_stage(played: Pipelines, stage: int) -> list[Answered]:
    return [found for found in played.answers if found.stage == stage]


def test_the_stages_are_base_a_check_base_all_checks_and_base():
    played = play()
    assert [(found.stage, found.adapter) for found in played.answers] == [
        (0, None), (1, 0), (2, None), (3, 0), (3, 1), (3, 2), (4, None),
    ]  # fmt: skip
    prompts = [found.usage.prompt_tokens for found in played.answers]
    assert prompts == [40, 48 + 2, 51, 59 + 2, 59 + 2, 59 + 2, 59 + 3 * 3]


def test_a_stage_begins_when_the_one_before_is_answered_and_its_checks_at_the_same_time():
    played = play()
    total = sum(max(found.end_to_end for found in of_stage(played, stage)) for stage in range(5))
    assert played.seconds == pytest.approx([total])
    for found in played.answers:
        assert found.end_to_end >= found.timing.ttft > 0
    one_alone = play(replace(SHAPE, stages=base_and_checks(1)))
    # Three checks in one step take three times the prompts, not three times the steps.
    assert of_stage(played, 3)[0].end_to_end < 1.5 * of_stage(one_alone, 3)[0].end_to_end


def test_an_activated_check_reads_the_bases_kv_and_a_plain_one_only_its_own():
    cached = {
        activated: [found.usage.cached_tokens for found in play(replace(SHAPE, activated=activated)).answers]
        for activated in (True, False)
    }
    # An answer's last token has no KV yet: the check that reads it computes it, as the base, who finds it then.
    assert cached[True] == [0, 44, 48, 56, 56, 56, 56]
    # The first check comes again: it knows the conversation up to its own invocation.
    assert cached[False] == [0, 0, 44, 48, 0, 0, 56]


def test_the_same_pipelines_cost_a_plain_lora_more_time_and_more_kv():
    model = replace(MODEL, adapter_token_s=1e-4)
    activated, plain = (
        play(replace(SHAPE, activated=on), replica=replica_of(replace(ROOMY, model=model))) for on in (True, False)
    )
    assert [found.usage.prompt_tokens for found in activated.answers] == [
        found.usage.prompt_tokens for found in plain.answers
    ]
    assert plain.seconds[0] > 1.3 * activated.seconds[0]
    assert plain.peak > 2 * activated.peak > 0


def test_pipelines_begin_at_their_times_and_do_not_read_each_others_conversations():
    played = play(starts=(0.0, 0.05, 9.0))
    first = {found.pipeline: found for found in of_stage(played, 0)}
    assert [first[i].usage.cached_tokens for i in range(3)] == [0, 0, 0]
    assert len(played.seconds) == 3 and len(played.answers) == 21
    assert first[1].timing.ttft > first[2].timing.ttft  # it came while the first one was running
    assert played.seconds[2] == pytest.approx(play().seconds[0])


def test_a_pool_that_is_too_small_for_all_is_shared_and_sound():
    replica = replica_of(sized(device=48, host=100))
    played = play(starts=(0.0,) * 4, replica=replica)
    assert len(played.answers) == 28 and played.peak <= 48
    assert replica.manager.counters.clean_evictions > 0
    inspect.check_integrity(replica.manager)
    assert all(found.usage.cached_tokens % BLOCK == 0 for found in played.answers)


def test_one_shape_gives_one_result():
    runs = [play(starts=(0.0, 0.1)) for _ in range(2)]
    assert runs[0].answers == runs[1].answers and runs[0].peak == runs[1].peak
