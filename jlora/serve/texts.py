"""Texts to token ids and back, beside the event loop and within bounds.

The loop must not wait for a text, and a text that cannot fit the context must not cost work. So its length
is checked first, and longer work runs on few threads while the tokenizer has released Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jlora.errors import FailedPrecondition, InvalidArgument, OutOfRange
from jlora.serve.backend import Backend
from jlora.serve.tokenizer import Tokenizer
from jlora.serve.workers import INLINE_CHARS
from jlora.types import Request
from jlora.validation import check_prompt_length, room, validate

MAX_MESSAGES = 4096  # of a chat; a template takes about 2 µs for one
MAX_LISTED = 1 << 20  # ids in an answer of Tokenize: below a default client's 4 MiB


class Message(Protocol):
    """One message of a chat."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the model's chat template; `ask` ends it with the prompt for an answer."""

    messages: Sequence[Message]
    ask: bool = True


Prompt = str | Chat | Sequence[int]


def check_messages(count: int) -> None:
    """Raises InvalidArgument for more messages than a chat may have."""
    if count > MAX_MESSAGES:
        raise InvalidArgument(f"messages: has {count} messages, must have at most {MAX_MESSAGES}")


class Texts:
    """The tokenizer of a `Backend` for its fronts. Every method may raise FailedPrecondition: there is none."""

    def __init__(self, backend: Backend):
        self._backend = backend

    async def request(self, prompt: Prompt, draft: Request, usual: int | None = None) -> Request:
        """The validated request: `draft` with the prompt's token ids.

        An unset `max_tokens` becomes `usual`, or the room that the prompt leaves if that is less; with None, all of it.

        Raises OutOfRange for a prompt that the context does not take, and what `validate` raises.
        """
        limits = self._backend.loaded.info.limits
        if draft.sampling.stop and self._backend.tokenizer is None:
            raise FailedPrecondition("stop: strings need a tokenizer, and the model has none; use stop_token_ids")
        if isinstance(prompt, str | Chat):
            special = isinstance(prompt, str)
            ids: Sequence[int] = await self._encode(prompt, lambda n: check_prompt_length(n, limits), special)
        else:
            check_prompt_length(len(prompt), limits)  # before protobuf's become Python's
            ids = prompt
        if usual is not None and draft.sampling.max_tokens is None:
            most = min(usual, room(len(ids), limits))
            draft = replace(draft, sampling=replace(draft.sampling, max_tokens=most))
        return validate(replace(draft, prompt=tuple(ids), chat=isinstance(prompt, Chat)), limits)

    async def tokenize(self, prompt: str | Chat, special: bool | None = None) -> list[int]:
        """The token ids of a text or a chat, also if they are more than the context takes.

        `special`: with the model's special tokens around them. None: for a text, but not for a chat, whose template
        has its own.
        """

        def check(count: int) -> None:
            if count > MAX_LISTED:
                raise OutOfRange(f"input: has {count} tokens, Tokenize lists at most {MAX_LISTED}")

        return await self._encode(prompt, check, isinstance(prompt, str) if special is None else special)

    async def detokenize(self, ids: Sequence[int], keep_special: bool) -> str:
        """The text of `ids`. Raises InvalidArgument for an id that is none, or more ids than the context takes."""
        limits, tokenizer = self._backend.loaded.info.limits, self._tokenizer("Detokenize")
        if len(ids) > limits.max_len:
            raise InvalidArgument(f"token_ids: has {len(ids)} ids, must have at most the context of {limits.max_len}")

        def work() -> str:
            listed = list(ids)
            if listed and not 0 <= min(listed) <= max(listed) < limits.vocab:
                i, token = next((i, x) for i, x in enumerate(listed) if not 0 <= x < limits.vocab)
                raise InvalidArgument(f"token_ids[{i}] = {token}: must be in [0, {limits.vocab})")
            return tokenizer.decode(listed, skip_special=not keep_special)

        return await self._backend.workers.run(len(ids), work)

    async def _encode(self, prompt: str | Chat, check: Callable[[int], None], special: bool) -> list[int]:
        if isinstance(prompt, Chat):
            return await self._chat(prompt, check, special)
        tokenizer = self._tokenizer("prompt.text")
        if not prompt:
            raise InvalidArgument("prompt.text: is empty, must have at least 1 character")
        self._check_chars("prompt.text", len(prompt))
        return await self._backend.workers.run(len(prompt), lambda: tokenizer.encode(prompt, check, special))

    async def _chat(self, chat: Chat, check: Callable[[int], None], special: bool) -> list[int]:
        tokenizer = self._tokenizer("prompt.chat")
        check_messages(len(chat.messages))
        messages = [_spoken(m) for m in chat.messages]
        size = sum(len(text) for m in messages for text in m.values())
        self._check_chars("prompt.chat", size)

        run = self._backend.workers.run
        text = await run(max(size, INLINE_CHARS + 1), lambda: tokenizer.render(messages, chat.ask))
        self._check_chars("prompt.chat", len(text))  # the template may have added some, and they take memory, too
        return await run(len(text), lambda: tokenizer.encode(text, check, special))

    def _check_chars(self, field: str, chars: int) -> None:
        max_len = self._backend.loaded.info.limits.max_len
        most = max_len * self._tokenizer(field).chars_per_token
        if chars > most:
            raise OutOfRange(f"{field}: has {chars} characters, must have at most {most} for a context of {max_len}")

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._backend.tokenizer is None:
            raise FailedPrecondition(f"{field}: needs a tokenizer, and the model has none; use prompt.token_ids")
        return self._backend.tokenizer


def _spoken(message: Message) -> dict[str, str]:
    """The message as a template reads it; gRPC's has no name."""
    name = getattr(message, "name", None)
    return {"role": message.role, "content": message.content, **({} if name is None else {"name": name})}
