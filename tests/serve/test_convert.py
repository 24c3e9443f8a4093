"""Answers as messages: a long one is made in parts, whose bytes are those of the whole."""

from __future__ import annotations

import asyncio
import random

import pytest

from jlora.serve import convert
from jlora.serve.proto import jlora_pb2 as pb
from jlora.types import Delta, Timing, TokenLogprob, Usage

TOTALS = Usage(3, 2, 7), Timing(ttft=0.5, cold_start="wait")


def entries(count: int, top: int) -> tuple[TokenLogprob, ...]:
    draw = random.Random(count)
    return tuple(
        TokenLogprob(i, -draw.random(), tuple((draw.randrange(10**6), -draw.random()) for _ in range(top)))
        for i in range(count)
    )


def deltas(count: int, prompt: int) -> list[Delta]:
    """Three completions: with log-probabilities, without, and without a token."""
    ids = tuple(range(0, 1000 * count, 1000))
    prompt_logprobs = (None, *entries(prompt, 2)) if prompt else None
    return [
        Delta(0, "é" * count, ids, entries(count, 3) or None, prompt_logprobs),
        Delta(1, "", ids, None, None, "length"),
        Delta(2, "", (), None, None, "abort"),
    ]


def made(news: list[Delta]) -> pb.GenerateResponse:
    answer = asyncio.run(convert.response("r", news, TOTALS))
    return answer if isinstance(answer, pb.GenerateResponse) else pb.GenerateResponse.FromString(answer)


@pytest.mark.parametrize(("count", "prompt"), [(0, 0), (1, 0), (5, 3), (64, 63), (65, 0), (700, 900), (9000, 0)])
def test_a_message_says_what_its_deltas_say(count: int, prompt: int):
    news = deltas(count, prompt)
    answer = made(news)
    assert (answer.request_id, answer.usage.completion_tokens, answer.timing.cold_start) == ("r", 7, "wait")
    for delta, output in zip(news, answer.outputs, strict=True):
        assert (output.index, output.text, tuple(output.token_ids)) == (delta.index, delta.text, delta.token_ids)
        assert output.finish_reason == (delta.finish_reason or "")
        for entry, told in zip(delta.logprobs or (), output.logprobs, strict=True):
            assert told == convert.token_logprob(entry)
    told = [convert.token_logprob(entry) for entry in news[0].prompt_logprobs or ()]
    assert list(answer.prompt_logprobs) == told


def test_no_turn_of_the_loop_makes_more_than_a_part():
    """The largest answer took 82 ms in one piece."""
    entry = max(convert.token_logprob(each).ByteSize() for each in entries(9000, 3)) + 2
    sizes = [len(part) for part in convert.pieces([Delta(0, "", (), entries(9000, 3), (None, *entries(9000, 3)))])]
    assert len(sizes) > 2 * 9000 / convert.PER_TURN and max(sizes) <= convert.PER_TURN * (entry + 2)
    assert isinstance(asyncio.run(convert.response("r", deltas(9000, 0))), bytes)
