"""A request whose tokens were partly delivered elsewhere goes on with those that an undisturbed engine draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jlora.errors import ResourceExhausted
from jlora.types import Done, Request, SamplingParams, TokenEvent
from tests import _make
from tests.engine._bench import Bench
from tests.engine._replica import Running
from tests.engine.test_engine import GREEDY, SEEDED, TABLES, running, serve, tokens
from tests.engine.test_shares import accounts, fresh

INVOKES = 90
PROMPT = tuple(3 + i * 7 % 80 for i in range(21))  # two blocks and some
CHOICE = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=10, logprobs=2)  # may end at an end token
ENDS = SamplingParams(temperature=1.0, seed=8, n=2, max_tokens=12, stop_token_ids=tuple(range(3, 12)), min_tokens=6)
HOLDS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, logit_bias={INVOKES: 100.0})
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_adapters, tiny_spec) -> Iterator:
    """An engine that nobody disturbs, and one that takes over."""
    activated = tmp_path_factory.mktemp("resume") / "activated"
    _make.make_adapter(activated, tiny_spec, 5, 6, tuple(_make.MODULES), alora_invocation_tokens=[INVOKES])
    adapters = {**tiny_adapters, "activated": activated}
    with running(tiny_model, adapters, cache__prefix_reuse=False) as alone, running(tiny_model, adapters) as other:
        yield alone, other


def cut(request: Request, events: list[TokenEvent], at: int) -> Request:
    """The request as a router sends it on after `at` tokens of each completion."""
    done = []
    for index in range(request.sampling.n):
        mine = tokens(by_completion(events, index))
        done.append(Done(tuple(mine[:at]), len(mine) <= at))
    return replace(request, id=f"{request.id}, from {at}", done=tuple(done))


def by_completion(events: list[TokenEvent], index: int) -> list[TokenEvent]:
    return [e for e in events if e.index == index]


REQUESTS = [
    Request("greedy", PROMPT, GREEDY),
    Request("seeded", PROMPT, SEEDED, adapter="large"),
    Request("penalties and min_tokens", PROMPT[:9], TABLES, adapter="middle"),
    Request("three completions", PROMPT, CHOICE, adapter="small"),
    Request("completions that end", PROMPT, ENDS),
    Request("activated", (*PROMPT, INVOKES, 7), GREEDY, adapter="activated"),
    Request("generates its own invocation", (*PROMPT, INVOKES, 7), HOLDS, adapter="activated"),
    Request("scored", PROMPT, SCORED),
    Request("past the cache", PROMPT, SEEDED, bypass_prefix_cache=True),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.id)
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(replicas: tuple[Running, Running], request_: Request):
    alone, other = replicas
    whole = serve(alone, [request_])[request_.id]
    cuts = [cut(request_, whole, at) for at in (0, 1, 2, 5, 8, 11)]
    cuts = [c for c in cuts if c.open]
    assert len(cuts) >= 4
    for _ in range(2):  # the second time, prompt and output are in the prefix cache
        got = serve(other, cuts)
        for resumed in cuts:
            check(resumed, whole, got[resumed.id])


def check(resumed: Request, whole: list[TokenEvent], got: list[TokenEvent]) -> None:
    assert {e.index for e in got} == set(resumed.open)
    for index in resumed.open:
        at = len(resumed.done[index].tokens)
        wanted, mine = by_completion(whole, index), by_completion(got, index)
        assert [e.token_id for e in mine] == [e.token_id for e in wanted[at:]]
        assert mine[-1].finish_reason == wanted[-1].finish_reason
        usage, all_ = mine[-1].usage, wanted[-1].usage
        assert usage is not None and all_ is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (all_.prompt_tokens, all_.completion_tokens)
        assert usage.cached_tokens <= usage.prompt_tokens
        for one, other in zip(mine, wanted[at:], strict=True):
            if other.logprob is not None:
                assert one.logprob is not None
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
                assert [t for t, _ in one.logprob.top] == [t for t, _ in other.logprob.top]
            assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def test_a_resumed_request_without_room_for_a_token_is_refused(replicas: tuple[Running, Running]):
    done = (Done((5,) * 120),)
    request = Request("r", (5,) * 20, SamplingParams(temperature=0), done=done)  # a context of 128
    with pytest.raises(ResourceExhausted, match=r"more than the \d+ tokens that fit here"):
        replicas[1].submit(request, lambda events: None)


def test_a_completion_that_has_ended_at_the_contexts_end_does_not_keep_the_others_from_their_last_token(
    replicas: tuple[Running, Running],
):
    done = (Done((5,) * 108, ended=True), Done((6,) * 107))  # a context of 128
    sampling = SamplingParams(temperature=0, n=2, ignore_eos=True)
    request = Request("r", (5,) * 20, sampling, done=done)
    (event,) = serve(replicas[1], [request])["r"]
    assert (event.index, event.finish_reason) == (1, "length") and event.token_id is not None


def draws(sequence, position: int) -> int:
    return 1000 * sequence.index + position


def test_a_resumed_request_is_preempted_like_any_other():
    bench = Bench(blocks=12, draw=draws, max_seqs=4)
    for start, name in enumerate("abc"):
        bench.submit(name, fresh(9, 100 + start), max_tokens=14, done=(Done((9, 10, 11)),))
    bench.finish()
    assert bench.scheduler.preemptions > 0
    for name in "abc":
        assert bench.tokens(name) == list(range(12, 23))
        assert next(e.usage.completion_tokens for e in bench.events if e.request_id == name and e.usage) == 14


def test_completions_that_go_on_share_the_prompt_of_the_first_of_them():
    bench = Bench(draw=draws)
    bench.submit("a", 13, max_tokens=4, n=3, done=(Done((1, 2, 3, 4), ended=True), Done((5,)), Done((6, 7))))
    bench.finish()
    assert [bench.tokens("a", i) for i in range(3)] == [[], [1014, 1015, 1016], [2015, 2016]]
    cached = {e.index: e.usage.cached_tokens for e in bench.events if e.usage}
    assert cached == {1: 0, 2: 12}


def test_only_new_work_is_charged():
    bench = Bench(max_seqs=1)
    bench.submit("new", fresh(8, 100), max_tokens=3, tenant="a")
    bench.submit("resumed", fresh(8, 200), max_tokens=8, tenant="b", done=(Done(tuple(range(50, 55))),))
    served: dict[str, float] = {}
    while bench.scheduler.live:
        served |= {tenant: account.served for tenant, account in accounts(bench).items()}
        bench.step()
    bench.finish()
    assert len(bench.tokens("resumed")) == 3
    assert served["a"] - served["b"] >= 8  # the prompt


def test_timing_counts_the_gaps_between_tokens_drawn_here():
    bench = Bench()
    bench.submit("a", 5, max_tokens=8, done=(Done((1, 2, 3, 4)),))
    bench.finish()
    timing = next(e.timing for e in bench.events if e.timing)
    assert timing.tpot == pytest.approx(bench.step_s)
