"""Every field at its edges and beyond: the errors and their messages."""

from __future__ import annotations

import dataclasses
import math
import time
from fractions import Fraction

import numpy as np
import pytest

from jlora.errors import InvalidArgument, OutOfRange, ResourceExhausted
from jlora.types import Done, Request, SamplingParams
from jlora.validation import Limits, validate

LIMITS = Limits(vocab=100, max_len=64, capacity_tokens=48)
NAN, INF = math.nan, math.inf


def check(prompt=(1, 2, 3), **sampling) -> SamplingParams:
    return validate(Request("r", prompt, SamplingParams(**sampling)), LIMITS).sampling


ALLOWED = [
    ("temperature", 0, 0.0),
    ("temperature", 100.0, 100.0),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", Fraction(1, 2), 0.5),
    ("temperature", 1e-9, 0.0),  # float32 logits would overflow: greedy
    ("top_k", 0, 0),
    ("top_k", 99, 99),
    ("top_k", 100, 0),  # the whole vocabulary
    ("top_k", 2**70, 0),
    ("top_k", np.int32(5), 5),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("seed", None, None),
    ("seed", 0, 0),
    ("seed", -1, 2**64 - 1),
    ("seed", -(2**63), 2**63),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("repetition_penalty", 0.001, 0.001),
    ("repetition_penalty", 1000, 1000.0),
    ("presence_penalty", -2, -2.0),
    ("presence_penalty", 2, 2.0),
    ("frequency_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("logit_bias", {0: 100, 99: -100.0}, {0: 100.0, 99: -100.0}),
    ("n", 1, 1),
    ("n", 64, 64),
    ("max_tokens", 1, 1),
    ("max_tokens", 45, 45),  # 3 + 45 = the pool's capacity
    ("max_tokens", None, None),
    ("min_tokens", 45, 45),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", ("x" * 1024,) * 16, ("x" * 1024,) * 16),
    ("stop_token_ids", [0, 99], (0, 99)),
    ("logprobs", None, None),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("prompt_logprobs", 20, 20),
]

REFUSED = [
    *(("temperature", x) for x in (-1e-9, 100.1, 10**400)),
    *(("top_k", x) for x in (-1, 1.0, "5")),
    *(("top_p", x) for x in (0, 0.0, 1.0000001, -1)),
    *(("min_p", x) for x in (-0.1, 1.1)),
    *(("seed", x) for x in (-(2**63) - 1, 2**64, 1.5, "7")),
    *(("repetition_penalty", x) for x in (0, -1, 1e-4, 1001)),
    *(("presence_penalty", x) for x in (-2.01, 2.01)),
    *(("frequency_penalty", x) for x in (-2.01, 2.01)),
    *(("n", x) for x in (0, -1, 65, 1.0)),
    *(("max_tokens", x) for x in (0, -1, 1.0, "9")),
    *(("min_tokens", x) for x in (-1, 1.0, 46)),
    *(("logprobs", x) for x in (-1, 21, 1.0, True)),
    *(("prompt_logprobs", x) for x in (-1, 21, 1.0, True)),
    *(("stop", x) for x in ("a", b"a", None, 3, ("",), ("a", 3), ("x" * 1025,), ("a",) * 17)),
    *(("stop_token_ids", x) for x in (None, 3, "3", (100,), (-1,), (True,), (1.0,), tuple(range(50)) * 30)),
    *(("logit_bias", x) for x in (None, [(1, 2)], {100: 0}, {-1: 0}, {True: 0}, {"1": 0}, {1: 100.1}, {1: NAN})),
    ("logit_bias", {1: None}),
    *(("include_stop", x) for x in (None, 1, "yes")),
    *(("ignore_eos", x) for x in (None, 0, "no")),
]
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "n", "min_tokens")
REFUSED += [(f, x) for f in FLOATS for x in (NAN, INF, -INF, None, True, "1", (), 1j)]
REFUSED += [(f, x) for f in INTEGERS for x in (NAN, INF, None, True, "1", ())]
REFUSED += [(f, x) for f in ("seed", "max_tokens") for x in (NAN, INF, True, ())]


@pytest.mark.parametrize("field, value, canonical", ALLOWED)
def test_values_at_the_edges_pass_in_canonical_form(field: str, value, canonical):
    got = getattr(check(**{field: value}), field)
    assert got == canonical and type(got) is type(canonical)


@pytest.mark.parametrize("field, value", REFUSED, ids=lambda x: repr(x)[:30])
def test_values_beyond_the_edges_are_refused_by_name(field: str, value):
    with pytest.raises(InvalidArgument, match=rf"^{field}.*must"):
        check(**{field: value})


def test_every_sampling_field_is_checked():
    """A field added to SamplingParams and forgotten by the validator would pass anything."""
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(InvalidArgument, match=field.name):
            check(**{field.name: object()})


def test_a_message_has_the_field_the_value_and_the_limit():
    with pytest.raises(InvalidArgument) as e:
        check(top_p=1.5)
    assert str(e.value) == "top_p = 1.5: must be in (0, 1]"


@pytest.mark.parametrize("value", ["x" * 10_000, pytest.param(10**5000, id="digits")])
def test_a_huge_value_does_not_make_a_huge_message(value):
    with pytest.raises(InvalidArgument) as e:
        check(seed=value)
    assert len(str(e.value)) < 200


@pytest.mark.parametrize(
    "prompt, where",
    [
        ((), "prompt: is empty"),
        ((1, 100), r"prompt\[1\] = 100: must be a token id in \[0, 100\)"),
        ((1, 2, -1), r"prompt\[2\] = -1"),
        ((1, True), r"prompt\[1\] = True"),
        ((1, 2.0), r"prompt\[1\] = 2.0"),
        ((None,), r"prompt\[0\] = None"),
        ((10**30,), r"prompt\[0\]"),
        ("text", "prompt = 'text'"),
        (None, "prompt = None"),
        ({1, 2}, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_position(prompt, where: str):
    with pytest.raises(InvalidArgument, match=where):
        check(prompt)


def test_lists_and_numpy_ids_become_plain_ints():
    prompt = validate(Request("r", [np.int64(5), 6]), LIMITS).prompt  # type: ignore[arg-type]
    assert prompt == (5, 6) and all(type(x) is int for x in prompt)


@pytest.mark.parametrize(
    "field, value",
    [
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("priority", 1.0),
        ("priority", None),
        ("bypass_prefix_cache", 1),
        ("tenant", None),
        ("tenant", "x" * 257),
        ("adapter", ""),
        ("adapter", 3),
        ("deadline", NAN),
        ("deadline", "soon"),
        ("sampling", None),
        *(("id", x) for x in ("", "x" * 257, "a b", "a\nb", "é", "\x00", None, 7)),
    ],
)
def test_the_requests_own_fields_are_checked(field: str, value):
    with pytest.raises(InvalidArgument, match=field):
        validate(dataclasses.replace(Request("r", (1,)), **{field: value}), LIMITS)


def test_good_request_fields_pass_unchanged():
    request = Request("a/b:c-1", (1,), SamplingParams(max_tokens=2), "sql", -5, True, "tenant", 12.5)
    assert validate(request, LIMITS) == request


@pytest.mark.parametrize(
    "prompt, max_tokens", [(64, None), (65, 1), (64, 1), (3, 62), pytest.param(3, 10**5000, id="digits")]
)
def test_past_the_context_is_out_of_range(prompt: int, max_tokens: int | None):
    with pytest.raises(OutOfRange, match="64"):
        check((1,) * prompt, max_tokens=max_tokens)


@pytest.mark.parametrize("prompt, max_tokens", [(3, 46), (48, 1), (48, None), (50, None)])
def test_what_the_pool_can_never_hold_is_resource_exhausted_and_names_the_key(prompt: int, max_tokens: int | None):
    with pytest.raises(ResourceExhausted, match="at most 48.*cache.hbm_blocks"):
        check((1,) * prompt, max_tokens=max_tokens)


@pytest.mark.parametrize(
    "limits, room", [(Limits(100, 64, 48), 38), (Limits(100, 64, 1000), 54), (Limits(100, 11, 11), 1)]
)
def test_min_tokens_is_held_against_what_context_and_pool_leave_to_an_unset_max_tokens(limits: Limits, room: int):
    def least(tokens: int) -> Request:
        return validate(Request("r", (1,) * 10, SamplingParams(min_tokens=tokens)), limits)

    assert least(room).sampling.max_tokens is None  # for the engine to fill in, beside the adapter
    with pytest.raises(InvalidArgument, match=f"must be at most max_tokens, here {room}"):
        least(room + 1)
    with pytest.raises(InvalidArgument, match="min_tokens = 5: must be at most max_tokens, here 4"):
        check(min_tokens=5, max_tokens=4)


def test_a_long_prompt_is_validated_in_a_millisecond_or_so():
    limits = Limits(vocab=128_256, max_len=16_384, capacity_tokens=16_384)
    request = Request("r", tuple(range(8192)))
    start = time.thread_time()
    for _ in range(10):
        validate(request, limits)
    assert (time.thread_time() - start) / 10 < 0.01


def test_done_passes_in_canonical_form():
    request = Request(
        "r", (1,), SamplingParams(n=2, max_tokens=3), done=[Done([4, np.int64(5)]), Done((1, 2, 3), True)]
    )  # type: ignore[arg-type]
    assert validate(request, LIMITS).done == (Done((4, 5)), Done((1, 2, 3), True))


@pytest.mark.parametrize(
    "done, message",
    [
        ((Done(),), "done: has 1 completions, must have none or n = 2"),
        ((Done((1, 2, 3)), Done()), "has not ended and has 3 tokens, must have at most 2"),
        ((Done((1, 2, 3, 4), True), Done()), "ended and has 4 tokens, must have at most 3"),
        ((Done(), Done((1, 100))), r"done\[1\].tokens\[1\] = 100: must be a token id in \[0, 100\)"),
        ((Done(), ((1,), False)), r"done\[1\] = .*: must be a Done"),
        ((Done(ended=True), Done(ended=True)), "every completion has ended"),
    ],
)
def test_a_bad_done_is_refused_by_name(done, message: str):
    with pytest.raises(InvalidArgument, match=message):
        validate(Request("r", (1,), SamplingParams(n=2, max_tokens=3), done=done), LIMITS)
