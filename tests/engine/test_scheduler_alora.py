"""The scheduler with activated LoRAs, alone: a fake device draws token 7 unless told otherwise."""

from __future__ import annotations

from tests.engine._bench import Bench


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
