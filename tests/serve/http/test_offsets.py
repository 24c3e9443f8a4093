"""`text_offset` of a completion: where each token begins in the text that the client gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer as Core

from jlora.serve.http.answers import Asked, Completions, Tokens
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Delta, Timing, TokenLogprob, Usage
from tests.serve import _tokenizers
from tests.serve._server import END

PROMPT, ANSWER = "The 日", " fox 日 over"
TOTALS = [(Usage(1, 0, 1), Timing())]


def scored(ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -1.0, ()) for token in ids)


def placed(tokens: Sequence[int], offsets: Sequence[int], text: str) -> list[tuple[int, str]]:
    """Each token with what it adds to the text."""
    return [(t, text[a:b]) for t, a, b in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True)]


@pytest.mark.parametrize("make", [_tokenizers.byte_level, _tokenizers.byte_fallback])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
def test_the_offsets_are_those_of_the_text(make: Callable[[], Core], echo: bool, by_id: bool):
    tokenizer = Tokenizer(make(), {})
    prompt = tokenizer.encode(PROMPT)
    whole = tokenizer.encode(PROMPT + ANSWER)
    answer = [*whole[len(prompt) :], END]
    assert (
        whole[: len(prompt)] == prompt and prompt[0] == 1 and len(prompt) >= 5
    )  # <s>, and three bytes of one character
    asked = Asked("c", "base", 1, False, [prompt], [PROMPT] if echo else ())
    delta = Delta(0, ANSWER, tuple(answer), scored(answer), (None, *scored(prompt[1:])), "stop")
    choice = Completions(asked, Tokens(tokenizer, by_id)).whole([[delta]], TOTALS)["choices"][0]
    shown, text = [*prompt, *answer] if echo else answer, choice["text"]
    adds = placed(shown, choice["logprobs"]["text_offset"], text)
    assert text == (PROMPT + ANSWER if echo else ANSWER) and "".join(added for _, added in adds) == text
    for token, added in adds:
        if tokenizer.is_silent(token):
            assert added == ""
        elif "\ufffd" not in (said := tokenizer.token_text(token)):
            assert added in (said, said.lstrip()), (said, added)  # a text begins without a space
    assert sum(added == "日" for _, added in adds) == (2 if echo else 1)  # not in three parts


def test_a_token_that_a_stop_cuts_off_begins_at_the_end():
    tokenizer = Tokenizer(_tokenizers.byte_level(), {})
    ids = tokenizer.encode(" fox over", special=False)
    cut = Delta(0, " f", tuple(ids), scored(ids), None, "stop")
    made = Completions(Asked("c", "base", 1, False, [[1]]), Tokens(tokenizer, by_id=False)).whole([[cut]], TOTALS)
    offsets = made["choices"][0]["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets[-1] == 2 and offsets == sorted(offsets)


@pytest.mark.parametrize("make", [_tokenizers.byte_level, _tokenizers.byte_fallback])
def test_parts_of_a_character_have_names_of_their_own(make: Callable[[], Core]):
    """Both would decode to U+FFFD, and one would replace the other."""
    tokenizer = Tokenizer(make(), {})
    parts = [token for token in tokenizer.encode("日", special=False) if "\ufffd" in tokenizer.token_text(token)]
    entry = TokenLogprob(parts[0], -1.0, ((parts[0], -1.0), (parts[1], -2.0)))
    delta = Delta(0, "", (parts[0],), (entry,), None, "length")
    made = Completions(Asked("c", "base", 1, False, [[1]]), Tokens(tokenizer, by_id=False)).whole([[delta]], TOTALS)
    logprobs = made["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"bytes:\\xe6": -1.0, "bytes:\\x97": -2.0}]
    assert logprobs["tokens"] == ["bytes:\\xe6"]


def test_a_stream_has_the_offsets_of_the_whole(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": "wide", "prompt": "Hello", "max_tokens": 40, "logprobs": 1, "temperature": 0}
    whole = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    assert whole.logprobs is not None and whole.logprobs.text_offset is not None
    streamed = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    offsets = [at for piece in streamed for at in piece.choices[0].logprobs.text_offset]  # type: ignore[union-attr]
    assert offsets == whole.logprobs.text_offset and len(offsets) == 40 and offsets[-1] <= len(whole.text)
