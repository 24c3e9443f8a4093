"""Text comes out whole: characters, spaces and stop strings do not depend on where tokens end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jlora.serve.output import StopFinder
from jlora.serve.stream import Answer
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Delta, FinishReason, Request, SamplingParams, Timing, TokenEvent, Usage
from tests.serve import _tokenizers

EOS = 2
KINDS = {
    "byte_level": Tokenizer(_tokenizers.byte_level(), {}),
    "byte_fallback": Tokenizer(_tokenizers.byte_fallback(), {}),
}
both = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS.keys())

# Words that are tokens, characters of one to four bytes, and spaces in all the awkward places.
texts = st.lists(
    st.one_of(
        st.sampled_from(["Hello", " world", "the", " ", "  ", "\n", "é", "€", "🙂", "日本", "👩‍👩‍👧", "\ufffd", "<s"]),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


class Completion:
    """One completion through the stream; `stopped` once a stop string has matched."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (1,), chat: bool = False, **sampling) -> None:
        request = Request("r", tuple(prompt), SamplingParams(**sampling), chat=chat)
        self._answer = Answer(request, tokenizer, (EOS,))
        self.stopped = False

    def push(self, token: int | None, finish: FinishReason | None = None) -> Delta:
        end = {"usage": Usage(1, 0, 0), "timing": Timing()} if finish else {}
        deltas, stops = self._answer.push([TokenEvent("r", 0, token, finish_reason=finish, **end)])
        self.stopped |= bool(stops)
        return deltas[0] if deltas else Delta(0)


def stream(tokenizer: Tokenizer, ids: Sequence[int], finish: FinishReason = "length", **sampling) -> list[str]:
    """The text of each token of a completion of `ids`, until a stop string or the last token."""
    text, shown = Completion(tokenizer, **sampling), []
    for i, token in enumerate(ids):
        shown.append(text.push(token, finish if i == len(ids) - 1 else None).text)
        if text.stopped:
            break
    return shown


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)[1:]  # without BOS


@both
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_deltas_together_are_the_full_decode(tokenizer: Tokenizer, text: str):
    ids = ids_of(tokenizer, text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@both
@settings(max_examples=150, deadline=None)
@given(text=texts, at=st.integers(1, 40))
def test_deltas_behind_a_prompt_go_on_with_its_text_and_those_of_a_chat_begin_anew(
    tokenizer: Tokenizer, text: str, at: int
):
    assume("\ufffd" not in text)  # it may stand for a part of a character
    whole = tokenizer.encode(text)
    prompt, ids = whole[:at], whole[at:]
    before = tokenizer.decode(prompt)
    assume(tokenizer.decode(whole).startswith(before))  # otherwise it ends within a character
    assert "".join(stream(tokenizer, ids, prompt=(*prompt, 1))) == tokenizer.decode(whole)[len(before) :]
    assert "".join(stream(tokenizer, ids, prompt=prompt, chat=True)) == tokenizer.decode(ids)


@both
def test_an_answer_that_goes_on_within_a_character_shows_it_whole(tokenizer: Tokenizer):
    whole = tokenizer.encode("Grün 🙂 ok")
    within = 0
    for at in range(1, len(whole)):
        begun = tokenizer.decode(whole[:at]).rstrip("\ufffd")
        within += begun != tokenizer.decode(whole[:at])
        assert begun + "".join(stream(tokenizer, whole[at:], prompt=whole[:at])) == "Grün 🙂 ok", at
    assert within >= 3


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 450), max_size=20))
def test_byte_level_deltas_are_the_full_decode_of_any_tokens_broken_ones_too(ids: list[int]):
    tokenizer = KINDS["byte_level"]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@both
def test_special_and_unknown_tokens_have_no_text_and_leave_spacing_alone(tokenizer: Tokenizer):
    ids = [1, 1, 100_000, *(x for t in ids_of(tokenizer, "Hello world, € too") for x in (t, 3, EOS)), 4]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "Hello world, € too"


@both
@pytest.mark.parametrize("text", ["🙂", "a🙂b", "日本語 and €"])
def test_an_unfinished_character_never_shows(tokenizer: Tokenizer, text: str):
    deltas = stream(tokenizer, ids_of(tokenizer, text))
    assert "".join(deltas) == text
    assert not any("\ufffd" in d for d in deltas)
    assert "" in deltas  # some token did have to wait


@both
def test_a_character_cut_off_at_the_end_is_replaced_once_at_the_finish(tokenizer: Tokenizer):
    ids = ids_of(tokenizer, "ok🙂")[:-1]
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == "ok\ufffd"
    assert all("\ufffd" not in d for d in deltas[:-1])


def test_broken_fallback_bytes_keep_the_good_characters_around_them():
    tokenizer = KINDS["byte_fallback"]
    euro, half = ids_of(tokenizer, "x€")[-3:], ids_of(tokenizer, "x🙂")[-4:-2]
    ids = [*ids_of(tokenizer, "a"), *euro, *half, *ids_of(tokenizer, "b")[-1:]]
    assert "".join(stream(tokenizer, ids)) == "a€\ufffdb"


def test_text_is_shown_as_soon_as_it_is_settled():
    """Streaming must not lag: each delta brings the text decoded so far, without stop strings in the way."""
    tokenizer = KINDS["byte_level"]
    ids = ids_of(tokenizer, "The quick brown fox")
    deltas = stream(tokenizer, ids)
    assert all("".join(deltas[: i + 1]) == tokenizer.decode(ids[: i + 1]) for i in range(len(ids)))


@both
@settings(max_examples=200, deadline=None)
@given(text=st.text("ab €x\n", max_size=30), stop=st.text("ab €x\n", min_size=1, max_size=4))
def test_the_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, text: str, stop: str):
    ids = ids_of(tokenizer, text)
    full = tokenizer.decode(ids)
    shown = "".join(stream(tokenizer, ids, stop=(stop,)))
    assert shown == full.split(stop)[0]
    kept = "".join(stream(tokenizer, ids, stop=(stop,), include_stop=True))
    assert kept == (full.split(stop)[0] + stop if stop in full else full)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.sets(st.integers(0, 20)),
)
def test_where_the_text_is_cut_changes_neither_stop_nor_text(text: str, stops: list[str], cuts: set[int]):
    def run(pieces: list[str]) -> tuple[str, str | None]:
        finder, shown = StopFinder(stops), ""
        for piece in pieces:
            new, stop = finder.push(piece)
            shown += new
            assert not any(s in shown for s in stops), "a stop string was shown"
            if stop is not None:
                return shown, stop
        return shown + finder.flush(), None

    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert run(pieces) == run(list(text)) == run([text])


def test_only_a_possible_stop_string_is_held_back():
    finder = StopFinder(("END.", "\n\n"))
    assert finder.push("abE") == ("ab", None)
    assert finder.push("N") == ("", None)
    assert finder.push("xE") == ("ENx", None)
    assert finder.push("ND\n") == ("END", None)
    assert finder.flush() == "\n"


def test_of_two_stop_strings_the_one_that_ends_first_wins_and_then_the_longer():
    assert StopFinder(("abcd", "bc")).push("xabcdx") == ("xa", "bc")
    assert StopFinder(("c", "abc")).push("xabcx") == ("x", "abc")


@both
def test_no_stop_string_before_min_tokens(tokenizer: Tokenizer):
    ids = ids_of(tokenizer, "aXbXcXd")
    text = tokenizer.decode(ids)
    third = next(i for i in range(1, len(ids) + 1) if tokenizer.decode(ids[:i]).count("X") == 2)
    assert "".join(stream(tokenizer, ids, stop=("X",), min_tokens=third)) == "aXb"
    assert "".join(stream(tokenizer, ids, stop=("X",), min_tokens=len(ids) + 1)) == text


def test_a_stop_string_begun_before_min_tokens_is_still_cut_whole():
    tokenizer = KINDS["byte_level"]
    ids = [t for c in "aXYb" for t in ids_of(tokenizer, c)]
    assert "".join(stream(tokenizer, ids, stop=("XY",), min_tokens=3)) == "a"


@both
def test_the_end_token_is_counted_but_not_shown(tokenizer: Tokenizer):
    text, ids = Completion(tokenizer), [*ids_of(tokenizer, "Hello"), EOS]
    deltas = [text.push(token, "stop" if token == EOS else None) for token in ids]
    assert "".join(d.text for d in deltas) == "Hello"
    assert deltas[-1].usage == Usage(1, 0, len(ids))


@both
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_tokens_text_shows_only_when_asked_for(tokenizer: Tokenizer, include: bool):
    ids = ids_of(tokenizer, "Hello there!")
    shown = "".join(stream(tokenizer, ids, "stop", stop_token_ids=(ids[-1],), include_stop=include))
    assert shown == tokenizer.decode(ids if include else ids[:-1])


def test_a_special_stop_token_shows_its_name_when_asked_for():
    ids = [*ids_of(KINDS["byte_level"], "a"), 4]
    sampling = {"stop_token_ids": (4,), "include_stop": True}
    assert "".join(stream(KINDS["byte_level"], ids, "stop", **sampling)) == "a<|assistant|>"


def test_held_text_comes_out_when_the_completion_ends_without_the_stop_string():
    tokenizer = KINDS["byte_level"]
    text = Completion(tokenizer, stop=("!!!",))
    assert [text.push(t).text for t in ids_of(tokenizer, "a") + ids_of(tokenizer, "!")] == ["a", ""]
    last = text.push(None, "abort")
    assert (last.text, last.finish_reason, text.stopped) == ("!", "abort", False)


def test_a_stop_string_in_the_last_allowed_token_reports_stop_and_nothing_to_call():
    tokenizer = KINDS["byte_level"]
    text = Completion(tokenizer, stop=("!",))
    text.push(ids_of(tokenizer, "a")[0])
    last = text.push(ids_of(tokenizer, "!")[0], "length")
    assert (last.text, text.stopped, last.finish_reason) == ("", False, "stop")


@both
def test_a_token_costs_the_same_late_in_a_long_output(tokenizer: Tokenizer):
    text = Completion(tokenizer, stop=("never", "ever"))
    ids = ids_of(tokenizer, "Hello world 🙂 ") * 400

    def seconds() -> float:
        start = time.thread_time()
        for token in ids:
            text.push(token)
        return time.thread_time() - start

    first, *_, last = [seconds() for _ in range(6)]
    assert last < 3 * first + 0.05
