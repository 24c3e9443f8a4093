"""The one stream: a request's token events become the same deltas however they are batched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jlora.errors import Unavailable
from jlora.serve.stream import Answer, joined
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Delta, FinishReason, Request, SamplingParams, Timing, TokenEvent, TokenLogprob, Usage
from tests.serve import _tokenizers

TOKENIZER = Tokenizer(_tokenizers.byte_level(), {})
A, STOP = (TOKENIZER.encode(c)[-1] for c in "a!")


def answer(tokenizer: Tokenizer | None = TOKENIZER, **sampling) -> Answer:
    return Answer(Request("r", (1,), SamplingParams(**sampling)), tokenizer, (2,))


def event(token: int | None, finish: FinishReason | None = None, index: int = 0, **fields) -> TokenEvent:
    end = {"usage": Usage(7, 3, 99), "timing": Timing(ttft=1.0, tpot=0.5)} if finish else {}
    return TokenEvent("r", index, token, finish_reason=finish, **{**end, **fields})


def test_events_of_one_batch_are_one_delta_for_each_completion():
    made = answer(n=2)
    deltas, stops = made.push([event(A), event(A, index=1), event(A)])
    assert deltas == [Delta(0, "aa", (A, A)), Delta(1, "a", (A,))] and stops == []


@pytest.mark.parametrize("batches", [1, 4], ids=["together", "one by one"])
def test_a_token_after_a_stop_string_is_neither_shown_nor_counted(batches: int):
    events = [event(A), event(STOP), event(A, logprob=TokenLogprob(A, -1.0)), event(A, "length")]
    made = answer(stop=("!",))
    pushed = [made.push(events)] if batches == 1 else [made.push([e]) for e in events]
    [whole] = joined(d for deltas, _ in pushed for d in deltas)
    assert [stop for _, stops in pushed for stop in stops] == [(0, 2)]
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("a", (A, STOP), "stop")
    assert whole.logprobs is None and whole.usage == Usage(7, 3, 2) and made.ended
    assert len([deltas for deltas, _ in pushed if deltas]) == (1 if batches == 1 else 3)


def test_totals_count_the_prompt_once_and_take_the_first_tokens_timing():
    made = answer(n=3, tokenizer=None)
    made.push([event(A, "length", 0, timing=Timing(queue=0.1, ttft=2.0, tpot=0.2))])
    made.push([event(None, "abort", 1, timing=Timing(queue=0.3))])
    assert not made.ended and made.aborted
    made.push([event(A, index=2), event(A, "stop", 2, timing=Timing(queue=0.2, ttft=1.0, tpot=0.4))])
    usage, timing = made.totals()
    assert made.ended and usage == Usage(7, 3, 3)
    assert (timing.queue, timing.ttft, timing.tpot) == (0.2, 1.0, pytest.approx(0.3))


def test_the_prompts_cached_tokens_are_those_of_completion_0_whichever_ends_first():
    made = answer(n=2, tokenizer=None)
    for index, cached in ((1, 6), (0, 0)):  # the second finds what the first has computed
        made.push([replace(event(A, "length", index), usage=Usage(7, cached, 1))])
    assert made.totals()[0] == Usage(7, 0, 2)


def test_without_a_tokenizer_there_are_tokens_and_logprobs():
    first, second = TokenLogprob(A, -0.5), TokenLogprob(STOP, -0.1, ((STOP, -0.1),))
    made = answer(None, logprobs=1)
    deltas = made.push([event(A, logprob=first, prompt_logprobs=(None,))])[0]
    deltas += made.push([event(STOP, "length", logprob=second)])[0]
    [whole] = joined(deltas)
    assert (whole.text, whole.token_ids, whole.logprobs) == ("", (A, STOP), (first, second))
    assert whole.prompt_logprobs == (None,)


def test_an_engine_that_stopped_is_an_error_and_no_answer():
    with pytest.raises(Unavailable, match="stopped before the request ended"):
        answer().push([TokenEvent("r", 0, None, finish_reason="abort")])
