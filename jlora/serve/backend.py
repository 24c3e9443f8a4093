"""What the servicers share: the engine once it is loaded, and the model's tokenizer.

The gRPC port opens before the weights are read, so a call may arrive when there is no engine yet;
`engine` is the one place that says so.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jlora.adapters.names import check_length
from jlora.engine.service import Service
from jlora.errors import FailedPrecondition, InvalidArgument, Unavailable
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.recent import Recent
from jlora.serve.tokenizer import Tokenizer

# Texts longer than this are tokenized on a thread, so that the event loop goes on meanwhile.
INLINE_CHARS = 4096

# Between two looks at something that is waited for, seconds: the first pause, and what doubling it ends at.
PAUSES_S = (0.005, 0.2)


@dataclass
class Backend:
    """The engine behind the servicers; all fields are set on the event loop.

    Attributes:
        service: None while loading.
        tokenizer: None while loading, and for a model that serves token ids only.
        draining: True once new requests are refused for good.
        started: `time.monotonic()` when the process began to load.
        recent: times to first token of requests that ended lately.
    """

    service: Service | None = None
    tokenizer: Tokenizer | None = None
    draining: bool = False
    started: float = field(default_factory=time.monotonic)
    recent: Recent = field(default_factory=Recent)

    @property
    def engine(self) -> Service:
        """The engine. Raises Unavailable while the model loads."""
        if self.service is None:
            raise Unavailable("the server is loading its model; health turns SERVING when it is ready")
        return self.service

    def text_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer. Raises FailedPrecondition, naming `what`, if the model has none."""
        if self.tokenizer is None:
            raise FailedPrecondition(f"{what}: needs a tokenizer, and the model has none; use prompt.token_ids")
        return self.tokenizer

    def adapter_of(self, model: str) -> str | None:
        """The adapter that `model` (base, adapter, base:adapter or empty) means; None is the base.

        Whether it exists is for the engine to say: it may come or go at any time.
        """
        base = self.engine.model_name
        if model in ("", base):
            return None
        name = model.removeprefix(base + ":")
        if not name:
            raise InvalidArgument(f"model = {model!r}: names no adapter after the colon")
        return check_length(name, "model")

    async def encode(self, text: str) -> Sequence[int]:
        """Text as token ids, special tokens included."""
        tokenizer = self.text_tokenizer("prompt.text")
        if not text:
            raise InvalidArgument("prompt.text: is empty, must have at least 1 character")
        if len(text) <= INLINE_CHARS:
            return tokenizer.encode(text)
        return await asyncio.to_thread(tokenizer.encode, text)

    async def encode_chat(self, chat: pb.Chat) -> Sequence[int]:
        """A conversation as token ids, through the model's chat template."""
        tokenizer = self.text_tokenizer("prompt.chat")
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        return await asyncio.to_thread(tokenizer.chat, messages)


async def until(true: Callable[[], bool], timeout_s: float | None = None) -> bool:
    """Waits until `true()`, which is asked on a thread each time; no thread is held in between.

    Args:
        timeout_s: None waits for ever.
    Returns:
        False if the time passed before.
    """
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    pause, longest = PAUSES_S
    while not await asyncio.to_thread(true):
        left = end - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True
