"""The bodies that clients send: OpenAI's names, and vLLM's where OpenAI has none.

    body = read(data, CompletionBody)     # InvalidArgument names the field

A field that OpenAI or vLLM defines and jlora does not support may have the value that means "not used".
Any other value, and any other field, is refused by name: an ignored field would change what the client gets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from jlora.config import nearest
from jlora.errors import InvalidArgument
from jlora.serve.texts import Chat, Prompt, check_messages
from jlora.types import SamplingParams
from jlora.validation import MAX_ID_CHARS

T = TypeVar("T", bound=Struct)
P = TypeVar("P")

MAX_PARTS = 4096  # of the contents of all messages of a chat

# Field -> the values, beside null, with which it changes nothing.
_SHARED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "metadata": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": (),
}
_CHAT: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_MESSAGE: Mapping[str, tuple[Any, ...]] = {  # also what answers of OpenAI's and vLLM's have, as clients send them back
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_STREAM: Mapping[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """Any body."""


def _with(base: type[T], unused: Mapping[str, tuple[Any, ...]]) -> type[T]:
    """A struct that also has these fields."""
    fields = [(name, Any, None) for name in unused]
    return msgspec.defstruct("Unused", fields, bases=(base,), kw_only=True)  # type: ignore[return-value]


class StreamOptions(_with(Body, _STREAM), kw_only=True):
    """`include_usage` adds a last event with usage and timing, vLLM's `continuous_usage_stats` usage to every one."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_with(Body, _SHARED), kw_only=True):
    """What both kinds of generation take. Null is the default everywhere; `jlora.validation` has the limits.

    Attributes:
        usual: most output tokens of a request that does not say; None: all that there is room for.
    """

    usual: ClassVar[int | None] = None

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    priority: Annotated[int, Meta(gt=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    bypass_prefix_cache: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    def session(self, header: str) -> str:
        """The request's session: `x-session-id`, or else OpenAI's newer or older field for it.

        Raises InvalidArgument for one that is too long.
        """
        given = {"x-session-id": header, "prompt_cache_key": self.prompt_cache_key, "user": self.user}
        name, value = next(((name, value) for name, value in given.items() if value), ("", ""))
        _check_length(name, value)
        return value

    def sampling(self, **others: Any) -> SamplingParams:
        """The fields as the engine's record, not validated; `others` take precedence."""
        values = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        for name in ("top_k", "seed"):
            if values.get(name) == -1:  # vLLM's way to say all, and any
                del values[name]
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.include_stop_str_in_output:
            values["include_stop"] = True
        return SamplingParams(**values | others)


_SAMPLING = tuple(f for f in SamplingParams.__slots__ if f in GenerationBody.__struct_fields__ and f != "stop")


class CompletionBody(_with(GenerationBody, _COMPLETION), kw_only=True):
    """`/v1/completions`: one prompt or several, each a text or token ids."""

    usual: ClassVar[int | None] = 16
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def bare(self) -> bool:
        """Only the prompts come back: `max_tokens` 0 with `echo`, as evaluations ask for log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def most_tokens(self) -> int | None:
        """For the engine, which draws at least one."""
        return 1 if self.bare else self.max_tokens

    def prompts(self) -> Sequence[str | list[int]]:
        """Every prompt. Raises InvalidArgument for a list of both ids and prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(entry) for entry in self.prompt}
        if int not in kinds and kinds:
            return self.prompt  # type: ignore[return-value]
        if kinds - {int}:
            raise InvalidArgument("prompt: mixes token ids and prompts; give ids, or a list of prompts")
        return [self.prompt]  # type: ignore[list-item]


class Part(Struct):
    """A part of a message. Only text is supported, so other types may have any fields."""

    type: str
    text: str | None = None


class MessageBody(_with(Body, _MESSAGE), kw_only=True):
    """A message of a chat, its content a string or parts of text. `name` says who speaks."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None


class Turn(Struct):
    """A message as the template takes it."""

    role: str
    content: str
    name: str | None = None


class ChatBody(_with(GenerationBody, _CHAT), kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[MessageBody]
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def names(self) -> Mapping[str, str]:
        """What the shared code calls a field -> its name in this body."""
        length = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"prompt": "messages", "logprobs": "top_logprobs", **length}

    def chat(self) -> Chat:
        """The conversation. Raises InvalidArgument for content that is no text."""
        return conversation(self.messages, self.add_generation_prompt is not False)

    def most_tokens(self) -> int | None:
        """`max_completion_tokens`, or else its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def most_likely(self) -> int | None:
        """How many likely tokens to report beside each; None: no log-probabilities."""
        if not self.logprobs and self.top_logprobs:
            raise InvalidArgument(f"top_logprobs = {self.top_logprobs}: needs logprobs = true")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Body, kw_only=True):
    """`/tokenize`: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def asked(self) -> str | Chat:
        """The text or the chat. Raises InvalidArgument for none, or for both."""
        return _one(self.prompt, self.messages, self.add_generation_prompt)


class DetokenizeBody(Body, kw_only=True):
    """`/detokenize`."""

    tokens: list[int]
    model: str | None = None


class PrefetchBody(Body, kw_only=True):
    """`/v1/prefetch`: the prompt that a later request will have."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[MessageBody] | None = None
    add_generation_prompt: bool = True
    cache_salt: str | None = None

    def asked(self) -> Prompt:
        """The prompt. Raises InvalidArgument for none, or for two."""
        return _one(self.prompt, self.messages, self.add_generation_prompt)


class LoadBody(Body, kw_only=True):
    """`/v1/load_lora_adapter`, with `pinned` as SGLang has it, and `lazy`. `base_model_name` is a label."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    pinned: bool = False
    lazy: bool = False


class UnloadBody(Body, kw_only=True):
    """`/v1/unload_lora_adapter`; vLLM's clients may name the adapter's number too, which must be null."""

    lora_name: str
    lora_int_id: None = None


def _one(prompt: P | None, messages: Sequence[MessageBody] | None, ask: bool) -> P | Chat:
    if messages is not None and prompt is None:
        return conversation(messages, ask)
    if prompt is None or messages is not None:
        raise InvalidArgument("prompt: give either prompt or messages")
    return prompt


def conversation(messages: Sequence[MessageBody], ask: bool) -> Chat:
    """The messages for the template. Raises InvalidArgument for content that is no text, or for too many.

    They are counted first: a body has room for 150,000, and a look at each would keep the event loop for a second.
    """
    check_messages(len(messages))
    if (parts := sum(len(m.content) for m in messages if isinstance(m.content, list))) > MAX_PARTS:
        raise InvalidArgument(f"messages: their contents have {parts} parts, must have at most {MAX_PARTS}")
    return Chat([Turn(m.role, _content(m, f"messages[{i}]"), m.name) for i, m in enumerate(messages)], ask)


def _content(message: MessageBody, where: str) -> str:
    _check_unused(message, f"{where}.")
    _check_length(f"{where}.name", message.name or "")
    if isinstance(message.content, str):
        return message.content
    if not message.content:
        raise InvalidArgument(f"{where}.content: is empty, must be a string or parts of text")
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise InvalidArgument(f"{where}.content[{i}].type = {part.type[:60]!r}: is not supported, only 'text'")
        if part.text is None:
            raise InvalidArgument(f"{where}.content[{i}].text: is missing")
    return "\n".join(part.text or "" for part in message.content)


def _check_length(name: str, value: str) -> None:
    if len(value) > MAX_ID_CHARS:
        raise InvalidArgument(f"{name}: has {len(value)} characters, must have at most {MAX_ID_CHARS}")


_UNUSED = {
    CompletionBody: _SHARED | _COMPLETION,
    ChatBody: _SHARED | _CHAT,
    MessageBody: _MESSAGE,
    StreamOptions: _STREAM,
}


def read(data: bytes, kind: type[T]) -> T:
    """The body as `kind`. Raises InvalidArgument with the field's name for all that it does not take."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        raise InvalidArgument(_said(str(e), kind)) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidArgument(f"the body is not valid JSON: {e}") from e
    _check_unused(body)
    if isinstance(body, GenerationBody) and body.stream_options is not None:
        _check_unused(body.stream_options, "stream_options.")
    return body


def _check_unused(body: Struct, where: str = "") -> None:
    for name, neutral in _UNUSED.get(type(body), {}).items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            only = f", only {' or '.join(msgspec.json.encode(x).decode() for x in neutral)}" if neutral else ""
            raise InvalidArgument(f"{where}{name}: is not supported{only}")


def _said(problem: str, kind: type[Struct]) -> str:
    """msgspec's message with the field in front, as all others have it."""
    text, _, path = problem.partition(" - at ")
    path = path.removeprefix("`key` in ").strip("`").removeprefix("$").lstrip(".")
    if named := re.search(r"^Object (contains unknown|missing required) field `(.*)`$", text, re.DOTALL):
        field = f"{path}.{named[2][:60]}" if path else named[2][:60]
        if named[1].startswith("missing"):
            return f"{field}: is missing"
        near = nearest(named[2], kind.__struct_fields__) if not path else ""
        return f"{field}: is not a field of this request" + (f"; the nearest field is {near}" if near else "")
    return f"{path or 'the body'}: {text[0].lower()}{text[1:].replace('`', '')}"
