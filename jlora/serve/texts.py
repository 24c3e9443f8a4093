"""Texts to token ids and back, beside the event loop and within bounds.

The loop must not wait for a text, and a text that cannot fit the context must not cost work. So its length
is checked first, and longer work runs on few threads while the tokenizer has released Python's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jlora.errors import FailedPrecondition, InvalidArgument, OutOfRange, ResourceExhausted
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.tokenizer import Tokenizer
from jlora.validation import check_prompt_length

T = TypeVar("T")

THREADS = 2
INLINE_CHARS = 1024  # a text of this length takes 0.2 ms
WAITING_CHARS = 16 << 20  # of all texts on the threads and before them: some seconds of work
MAX_MESSAGES = 4096  # of a chat; a template takes about 2 µs for one
MAX_LISTED = 1 << 20  # ids in an answer of Tokenize: below a default client's 4 MiB


class Texts:
    """The tokenizer of a `Backend` for its servicers. Every method may raise FailedPrecondition: there is none."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="jlora-text")
        self._chars = 0

    async def prompt(self, message: pb.GenerateRequest) -> Sequence[int]:
        """The token ids of a request: of its text, of its chat through the template, or its own.

        Raises InvalidArgument for none at all, OutOfRange for more than the context takes.
        """
        limits = self._backend.loaded.info.limits
        if message.WhichOneof("prompt") == "token_ids":
            ids = message.token_ids.ids
            check_prompt_length(len(ids), limits)  # before they become Python's
            return ids
        return await self._encode(message, "prompt", lambda count: check_prompt_length(count, limits))

    async def tokenize(self, message: pb.TokenizeRequest) -> list[int]:
        """As `prompt`, but also for more than the context takes."""

        def check(count: int) -> None:
            if count > MAX_LISTED:
                raise OutOfRange(f"input: has {count} tokens, Tokenize lists at most {MAX_LISTED}")

        return await self._encode(message, "input", check)

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

        return await self._beside(len(ids), work)

    async def _encode(
        self, message: pb.GenerateRequest | pb.TokenizeRequest, oneof: str, check: Callable[[int], None]
    ) -> list[int]:
        match message.WhichOneof(oneof):
            case "text":
                tokenizer, text = self._tokenizer("prompt.text"), message.text
                if not text:
                    raise InvalidArgument("prompt.text: is empty, must have at least 1 character")
                self._check_chars("prompt.text", len(text))
                return await self._beside(len(text), lambda: tokenizer.encode(text, check))
            case "chat":
                return await self._chat(message.chat, check)
            case _:
                choices = [field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields]
                raise InvalidArgument(f"{oneof}: is not set; give {' or '.join(choices)}")

    async def _chat(self, chat: pb.Chat, check: Callable[[int], None]) -> list[int]:
        tokenizer = self._tokenizer("prompt.chat")
        if len(chat.messages) > MAX_MESSAGES:
            raise InvalidArgument(f"messages: has {len(chat.messages)} messages, must have at most {MAX_MESSAGES}")
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        size = sum(len(m["role"]) + len(m["content"]) for m in messages)
        self._check_chars("prompt.chat", size)

        def work() -> list[int]:
            text = tokenizer.render(messages)
            self._check_chars("prompt.chat", len(text))  # the template may have added some
            return tokenizer.encode(text, check, special=False)

        return await self._beside(max(size, INLINE_CHARS + 1), work)

    def _check_chars(self, field: str, chars: int) -> None:
        max_len = self._backend.loaded.info.limits.max_len
        most = max_len * self._tokenizer(field).chars_per_token
        if chars > most:
            raise OutOfRange(f"{field}: has {chars} characters, must have at most {most} for a context of {max_len}")

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._backend.tokenizer is None:
            raise FailedPrecondition(f"{field}: needs a tokenizer, and the model has none; use prompt.token_ids")
        return self._backend.tokenizer

    async def _beside(self, chars: int, work: Callable[[], T]) -> T:
        """Runs `work` over so many characters on a thread, or at once if they are few."""
        if chars <= INLINE_CHARS:
            return work()
        if self._chars and self._chars + chars > WAITING_CHARS:
            raise ResourceExhausted(
                f"the tokenizer is busy: {self._chars} characters wait for it, and {chars} more pass the limit of "
                f"{WAITING_CHARS}; ask again later"
            )
        self._chars += chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._chars -= chars
