"""The one validator. Every front calls it once for each request, before the replica sees the request.

    limits = Limits(vocab=32000, max_len=4096, capacity_tokens=65536)
    request = validate(Request("r1", (1, 2, 3)), limits)

The returned request is *canonical*: it has plain ints, floats and tuples, so no later code checks or
converts again. An unset `max_tokens` stays None: only the engine knows what the pool leaves beside
the request's adapter.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jlora.errors import InvalidArgument, OutOfRange, ResourceExhausted
from jlora.types import Done, Request, SamplingParams

# Above this every token is equally likely; a larger value is a mistake.
MAX_TEMPERATURE = 100.0
# Below this sampling is greedy except for exact ties, and float32 logits would overflow. It becomes 0.
MIN_TEMPERATURE = 1e-5
# Logits multiplied or divided by these stay finite in float32.
REPETITION_PENALTY = (1e-3, 1e3)
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_COMPLETIONS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_ID_CHARS = 256
# Of an answer: its output tokens, and the likely tokens of each. One has up to 30 bytes, a message 64 MiB.
MAX_ENTRIES = 1 << 21

_ID = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the pool can hold.

    Attributes:
        vocab: V; token ids are in [0, vocab).
        max_len: longest context (prompt + output) in tokens.
        capacity_tokens: longest prompt + output that the pool can ever hold.
    """

    vocab: int
    max_len: int
    capacity_tokens: int


def validate(request: Request, limits: Limits) -> Request:
    """Returns the request in canonical form.

    Raises:
        InvalidArgument: a field has a wrong type or is outside its limits.
        OutOfRange: the prompt alone, or with max_tokens, passes the context.
        ResourceExhausted: prompt + max_tokens can never fit the pool.
    """
    if not isinstance(request.sampling, SamplingParams):
        raise _refuse("sampling", request.sampling, "a SamplingParams")
    prompt = _prompt(request.prompt, limits)
    sampling = _sampling(request.sampling, limits.vocab)
    most = _max_tokens(len(prompt), sampling.max_tokens, limits)
    _check_entries(sampling, most)
    if sampling.min_tokens > most:
        raise _refuse("min_tokens", sampling.min_tokens, f"at most max_tokens, here {most}")
    return dataclasses.replace(
        request,
        id=_request_id(request.id),
        prompt=prompt,
        sampling=sampling,
        adapter=None if request.adapter is None else _text("adapter", request.adapter, MAX_ID_CHARS),
        priority=_integer("priority", request.priority, -(2**31), 2**31 - 1),
        bypass_prefix_cache=_boolean("bypass_prefix_cache", request.bypass_prefix_cache),
        tenant=_text("tenant", request.tenant, MAX_ID_CHARS, empty=True),
        cache_salt=_text("cache_salt", request.cache_salt, MAX_ID_CHARS, empty=True),
        session=_text("session", request.session, MAX_ID_CHARS, empty=True),
        deadline=None if request.deadline is None else _number("deadline", request.deadline, -math.inf, math.inf),
        invocation=None,  # the replica searches for it
        done=_done(request.done, sampling, most, limits.vocab),
    )


def check_prompt_length(count: int, limits: Limits) -> None:
    """Raises OutOfRange if a prompt of `count` tokens leaves no room for output."""
    if count >= limits.max_len:
        raise OutOfRange(f"prompt: has {count} tokens, must leave room for output in the context of {limits.max_len}")


def room(prompt: int, limits: Limits) -> int:
    """Output tokens that a prompt of so many tokens leaves room for, at least one."""
    return max(1, min(limits.max_len, limits.capacity_tokens) - prompt)


def entries_of(sampling: SamplingParams) -> int:
    """What an answer has for each output token: the token, and its likely ones."""
    return 1 + (sampling.logprobs or 0)


def _check_entries(sampling: SamplingParams, most: int) -> None:
    entries = sampling.n * most * entries_of(sampling)
    if entries > MAX_ENTRIES:
        raise InvalidArgument(
            f"n * max_tokens * (logprobs + 1) = {sampling.n} * {most} * {entries_of(sampling)} = {entries}: "
            f"must be at most {MAX_ENTRIES}"
        )


def _sampling(s: SamplingParams, vocab: int) -> SamplingParams:
    temperature = _number("temperature", s.temperature, 0.0, MAX_TEMPERATURE)
    top_k = _integer("top_k", s.top_k, 0)
    stop = _sequence("stop", s.stop, "strings", MAX_STOP_STRINGS)
    stop_ids = _sequence("stop_token_ids", s.stop_token_ids, "token ids", MAX_STOP_TOKENS)
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_k=top_k if top_k < vocab else 0,
        top_p=_number("top_p", s.top_p, 0.0, 1.0, open_low=True),
        min_p=_number("min_p", s.min_p, 0.0, 1.0),
        # Modulo 2^64, so signed and unsigned clients agree.
        seed=None if s.seed is None else _integer("seed", s.seed, -(2**63), 2**64 - 1) % 2**64,
        repetition_penalty=_number("repetition_penalty", s.repetition_penalty, *REPETITION_PENALTY),
        presence_penalty=_number("presence_penalty", s.presence_penalty, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", s.frequency_penalty, -2.0, 2.0),
        logit_bias=_logit_bias(s.logit_bias, vocab),
        n=_integer("n", s.n, 1, MAX_COMPLETIONS),
        max_tokens=None if s.max_tokens is None else _integer("max_tokens", s.max_tokens, 1),
        min_tokens=_integer("min_tokens", s.min_tokens, 0),
        stop=tuple(_text(f"stop[{i}]", x, MAX_STOP_CHARS) for i, x in enumerate(stop)),
        stop_token_ids=_token_ids("stop_token_ids", stop_ids, vocab),
        include_stop=_boolean("include_stop", s.include_stop),
        ignore_eos=_boolean("ignore_eos", s.ignore_eos),
        logprobs=_logprobs("logprobs", s.logprobs, vocab),
        prompt_logprobs=_logprobs("prompt_logprobs", s.prompt_logprobs, vocab),
    )


def _prompt(prompt: Any, limits: Limits) -> tuple[int, ...]:
    ids, vocab = _sequence("prompt", prompt, "token ids"), limits.vocab
    if not ids:
        raise InvalidArgument("prompt: is empty, must have at least 1 token")
    check_prompt_length(len(ids), limits)  # before any token is looked at
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
        return ids
    return _token_ids("prompt", ids, vocab)


def _max_tokens(prompt: int, max_tokens: int | None, limits: Limits) -> int:
    if max_tokens is None:
        max_tokens = room(prompt, limits)
    if prompt + max_tokens > limits.max_len:
        raise OutOfRange(
            f"max_tokens = {_show(max_tokens)}: with a prompt of {prompt} tokens it passes the context of "
            f"{limits.max_len}, must be at most {limits.max_len - prompt}"
        )
    if prompt + max_tokens > limits.capacity_tokens:
        raise ResourceExhausted(
            f"max_tokens = {max_tokens}: with a prompt of {prompt} tokens it needs {prompt + max_tokens} tokens of KV, "
            f"the pool holds at most {limits.capacity_tokens}; shorten it, or serve with a larger cache.hbm_blocks"
        )
    return max_tokens


def _done(done: Any, sampling: SamplingParams, most: int, vocab: int) -> tuple[Done, ...]:
    """One for each completion, or none. Those that go on have room for a token."""
    parts = _sequence("done", done, "records")
    if parts and len(parts) != sampling.n:
        raise InvalidArgument(f"done: has {len(parts)} completions, must have none or n = {sampling.n}")
    made = []
    for i, part in enumerate(parts):
        if not isinstance(part, Done):
            raise _refuse(f"done[{i}]", part, "a Done")
        tokens = _token_ids(f"done[{i}].tokens", _sequence(f"done[{i}].tokens", part.tokens, "token ids"), vocab)
        ended = _boolean(f"done[{i}].ended", part.ended)
        if len(tokens) > (limit := most if ended else most - 1):
            state = "ended" if ended else "has not ended"
            raise InvalidArgument(f"done[{i}]: {state} and has {len(tokens)} tokens, must have at most {limit}")
        made.append(Done(tokens, ended))
    if made and all(part.ended for part in made):
        raise InvalidArgument("done: every completion has ended, nothing is left to generate")
    return tuple(made)


def _logit_bias(bias: Any, vocab: int) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _refuse("logit_bias", bias, "a mapping of token id to bias")
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidArgument(f"logit_bias: has {len(bias)} entries, must have at most {MAX_LOGIT_BIAS_ENTRIES}")
    return {
        _token_id("logit_bias key", token, vocab): _number(f"logit_bias[{_show(token)}]", value, -100.0, 100.0)
        for token, value in bias.items()
    }


def _logprobs(field: str, value: Any, vocab: int) -> int | None:
    return None if value is None else min(_integer(field, value, 0, MAX_LOGPROBS), vocab)


def _request_id(value: Any) -> str:
    text = _text("request_id", value, MAX_ID_CHARS)
    if not _ID.fullmatch(text):
        raise _refuse("request_id", text, "visible ASCII characters without spaces")
    return text


def _text(field: str, value: Any, longest: int, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _refuse(field, value, "a string")
    if not value and not empty:
        raise InvalidArgument(f"{field}: is empty, must have at least 1 character")
    if len(value) > longest:
        raise InvalidArgument(f"{field}: has {len(value)} characters, must have at most {longest}")
    return value


def _sequence(field: str, value: Any, of: str, most: int | None = None) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _refuse(field, value, f"a tuple or list of {of}")
    if most is not None and len(value) > most:
        raise InvalidArgument(f"{field}: has {len(value)} {of}, must have at most {most}")
    return tuple(value)


def _token_ids(field: str, ids: Iterable[Any], vocab: int) -> tuple[int, ...]:
    return tuple(_token_id(f"{field}[{i}]", x, vocab) for i, x in enumerate(ids))


def _token_id(field: str, value: Any, vocab: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < vocab:
        raise _refuse(field, value, f"a token id in [0, {vocab})")
    return int(value)


def _integer(field: str, value: Any, low: int, high: int | None = None) -> int:
    limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refuse(field, value, f"an integer {limit}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _refuse(field, value, limit)
    return number


def _number(field: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """A finite float in [low, high], or (low, high] with `open_low`."""
    limit = "finite" if math.isinf(high) else f"in {'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refuse(field, value, f"a number {limit}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond any float
        raise _refuse(field, value, limit) from None
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        raise _refuse(field, value, limit)
    return number


def _boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(field, value, "True or False")
    return value


def _refuse(field: str, value: Any, limit: str) -> InvalidArgument:
    return InvalidArgument(f"{field} = {_show(value)}: must be {limit}")


def _show(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:  # a huge int has no decimal form
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
