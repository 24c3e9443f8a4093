"""The scheduler with activated LoRAs, alone: a fake device draws token 7 unless told otherwise."""

from __future__ import annotations

import pytest

from jlora.types import Timing
from tests.engine._bench import Bench, work


def activated(bench: Bench, uid: int = 1, at: int = 10) -> dict:
    """Fields of a request for an activated LoRA that acts from position `at` on."""
    return {"adapter": bench.adapter(uid, 2), "activation": at}


def test_a_chunk_may_end_inside_an_invocation():
    bench = Bench(max_step_tokens=6)
    bench.submit("a", 15, **activated(bench, at=10))  # invoked by tokens 10, 11 and 12
    bench.finish()
    chunks = [w for p in bench.plans for w in p.prefill]
    assert [(w.start, w.count, w.adapted) for w in chunks] == [(0, 6, False), (6, 6, True), (12, 3, True)]


def test_base_and_activated_loras_read_one_prefix():
    bench = Bench()
    talk = list(range(10, 31))
    bench.submit("base", talk)
    bench.finish()
    for uid in (1, 2):
        bench.submit(f"check{uid}", [*talk, 90, 91], **activated(bench, uid, at=21))
    bench.finish()
    cached = {e.request_id: e.usage.cached_tokens for e in bench.events if e.usage}
    assert cached == {"base": 0, "check1": 20, "check2": 20}


def test_completions_of_one_activated_prompt_share_its_suffix():
    bench = Bench()
    bench.submit("a", 18, n=3, **activated(bench, at=9))
    bench.finish()
    assert [e.usage.cached_tokens for e in bench.events if e.usage] == [0, 16, 16]


def test_a_preempted_activated_sequence_comes_back_and_keeps_its_activation():
    bench = Bench(blocks=14, draw=lambda s, position: 10 + position)  # it generates its own invocation again
    check = activated(bench, at=5)
    for i in range(3):
        bench.submit(f"r{i}", [10 + i] * 9, max_tokens=12, **check)
    bench.finish()
    assert bench.scheduler.preemptions > 0
    assert {w.sequence.activation for p in bench.plans for w in p.work} == {5}
    assert all(bench.tokens(f"r{i}") == list(range(19, 31)) for i in range(3))


def test_the_answer_of_an_activated_step_is_computed_once_as_the_bases():
    bench = Bench(draw=lambda s, position: 50 + position)
    talk = list(range(10, 27))
    bench.submit("base", talk, max_tokens=4)
    bench.finish()
    answered = [*talk, *bench.tokens("base")]
    bench.submit("check", [*answered, 90, 91], max_tokens=9, **activated(bench, at=21))
    bench.finish()
    goes_on = [*answered, 90, 91, *bench.tokens("check"), 7]
    for turn in ("base2", "base3"):
        bench.submit(turn, goes_on, max_tokens=2)
        bench.finish()
    first = {w.sequence.request.id: w.start for p in reversed(bench.plans) for w in p.prefill}
    assert first == {"base": 0, "check": 20, "base2": 20, "base3": 32}


def prefills(bench: Bench, name: str) -> list[tuple[int, int, int]]:
    """The step, start and count of a request's chunks, single tokens included."""
    return [
        (step, *found)
        for step, plan in enumerate(bench.plans, 1)
        if (found := work(plan).get(name)) is not None and found[0] < 15
    ]


def timing(bench: Bench, name: str) -> Timing:
    return next(e.timing for e in bench.events if e.request_id == name and e.timing is not None)


def test_chunks_before_the_invocation_do_not_wait_for_the_adapter_and_what_is_activated_does():
    bench = Bench(max_step_tokens=6, delay=10)  # the copy starts in step 1 and has landed in step 12
    bench.submit("a", 15, **activated(bench, at=13))
    bench.step()
    assert bench.manager.flying and bench.plans[0].copies[0].demand
    bench.finish()
    assert prefills(bench, "a")[:3] == [(1, 0, 6), (2, 6, 6), (12, 12, 3)]
    found = timing(bench, "a")
    assert (found.queue, found.adapter_cold_start, found.prefill, found.ttft) == (1.0, 9.0, 3.0, 13.0)


def test_a_copy_that_lands_behind_the_base_s_chunks_costs_no_wait():
    bench = Bench(max_step_tokens=6, delay=1)  # it has landed in step 3
    bench.submit("a", 15, **activated(bench, at=13))
    bench.finish()
    assert prefills(bench, "a")[:3] == [(1, 0, 6), (2, 6, 6), (3, 12, 3)]
    assert timing(bench, "a").adapter_cold_start == 0


@pytest.mark.parametrize("token_s, chunks", [(1.0, [(12, 12, 3)]), (1e-4, [(3, 12, 1), (12, 13, 2)])])
def test_a_chunk_is_cut_at_the_invocation_only_if_computing_that_takes_less_than_the_copy(
    token_s: float, chunks: list[tuple[int, int, int]]
):
    bench = Bench(max_step_tokens=6, delay=10)
    bench.manager.policy.meter.token_s = token_s  # against 20 ms of the adapter's copy
    bench.submit("a", 15, **activated(bench, at=13))
    bench.finish()
    assert prefills(bench, "a")[2 : 2 + len(chunks)] == chunks


def test_an_invocation_of_one_token_at_the_end_is_not_decoded_before_its_adapter_has_come():
    bench = Bench(max_step_tokens=6, delay=10)
    bench.submit("a", 13, **activated(bench, at=12))
    bench.finish()
    assert prefills(bench, "a")[:3] == [(1, 0, 6), (2, 6, 6), (12, 12, 1)]
    assert timing(bench, "a").adapter_cold_start == 9


def test_who_waits_on_the_way_lends_its_slot_to_others():
    bench = Bench(max_step_tokens=6, max_seqs=1, delay=20)
    bench.submit("a", 15, **activated(bench, at=12))
    bench.submit("b", 5)
    bench.finish()
    ended = [e.request_id for e in bench.events if e.usage]
    assert ended == ["b", "a"] and bench.tokens("a") == bench.tokens("b") == [7] * 4


@pytest.mark.parametrize("at, waits", [(None, True), (0, True), (5, True), (8, False)])
def test_a_lora_that_acts_in_the_first_chunk_is_waited_for(at: int | None, waits: bool):
    bench = Bench(max_step_tokens=8, delay=10)
    bench.submit("a", 15, adapter=bench.adapter(1, 2), activation=at)
    bench.finish()
    assert prefills(bench, "a")[0] == ((12, 0, 8) if waits else (1, 0, 8))


def test_a_request_that_waits_on_its_way_can_be_aborted():
    bench = Bench(max_step_tokens=8, delay=10, draw=lambda s, position: 10 + position)
    check = activated(bench, at=8)
    bench.submit("a", 11, **check)
    bench.submit("gone", 11, **check)
    for _ in range(4):
        bench.step()
    bench.events += bench.abort("gone")
    bench.finish()
    assert bench.tokens("a") == list(range(21, 25)) and bench.tokens("gone") == []


def test_a_request_that_waits_on_its_way_can_be_preempted():
    bench = Bench(blocks=9, max_step_tokens=8, delay=10, draw=lambda s, position: 10 + position)
    check = activated(bench, at=8)
    bench.submit("base", [5] * 9, max_tokens=20, priority=5)  # grows until the other's blocks are needed
    bench.submit("a", 11, **check)
    while not bench.scheduler.preemptions:
        waiting = [s for s in bench.scheduler.loading if s.boarded]
        bench.step()
    assert [s.request.id for s in waiting] == ["a"] and not bench.scheduler.loading
    bench.finish()
    assert bench.tokens("a") == list(range(21, 25)) and len(bench.tokens("base")) == 20


def test_who_waits_for_a_slot_after_its_adapter_waits_in_the_queue():
    bench = Bench(max_step_tokens=6, max_seqs=1, delay=2)
    bench.submit("a", 15, **activated(bench, at=12))
    bench.submit("b", 5, max_tokens=50)
    bench.finish()
    spent = timing(bench, "a")
    assert spent.queue > 40 and spent.prefill < 8 and spent.adapter_cold_start < 8


def test_only_what_is_read_is_streamed_into_a_step_that_runs_ahead():
    bench = Bench(max_step_tokens=6, delay=10, streams=True)
    bench.submit("a", 15, **activated(bench, at=13))
    bench.finish()
    assert prefills(bench, "a")[:2] == [(1, 0, 6), (2, 6, 6)]
    assert not any(plan.streams for plan in bench.plans[:2])
