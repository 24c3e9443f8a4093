"""The state that the servicers share: the replica once it is loaded, and the model's tokenizer.

The gRPC port opens before the weights are read, so a call may arrive while there is no replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jlora.adapters.names import check_length
from jlora.errors import FailedPrecondition, InvalidArgument, Unavailable
from jlora.gaps import Gaps
from jlora.replica import Replica
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.recent import Recent
from jlora.serve.tokenizer import Tokenizer

# Longer texts are tokenized on a thread, so that the event loop goes on.
INLINE_CHARS = 4096


@dataclass
class Backend:
    """The replica behind the servicers. Only the event loop sets these fields.

    Attributes:
        replica: None while loading.
        tokenizer: None while loading, and for a model that serves token ids only.
        draining: True once new requests are refused for good.
        started: `time.monotonic()` when the process began to load.
        gaps: of the event loop.
    """

    replica: Replica | None = None
    tokenizer: Tokenizer | None = None
    draining: bool = False
    started: float = field(default_factory=time.monotonic)
    recent: Recent = field(default_factory=Recent)
    gaps: Gaps = field(default_factory=Gaps)

    @property
    def loaded(self) -> Replica:
        """The replica. Raises Unavailable while the model loads."""
        if self.replica is None:
            raise Unavailable("the server is loading its model; health turns SERVING when it is ready")
        return self.replica

    def text_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer. Raises FailedPrecondition, naming `what`, if the model has none."""
        if self.tokenizer is None:
            raise FailedPrecondition(f"{what}: needs a tokenizer, and the model has none; use prompt.token_ids")
        return self.tokenizer

    def adapter_of(self, model: str) -> str | None:
        """The adapter, loaded or not, that `model` (base, adapter, base:adapter or empty) names; None is the base."""
        base = self.loaded.info.model
        if model in ("", base):
            return None
        name = model.removeprefix(base + ":")
        if not name:
            raise InvalidArgument(f"model = {model!r}: names no adapter after the colon")
        return check_length(name, "model")

    async def encode(self, message: pb.GenerateRequest | pb.TokenizeRequest, oneof: str) -> Sequence[int]:
        """The token ids of a message's prompt: its text, its chat through the template, or its own ids."""
        match message.WhichOneof(oneof):
            case "text":
                tokenizer = self.text_tokenizer("prompt.text")
                if not message.text:
                    raise InvalidArgument("prompt.text: is empty, must have at least 1 character")
                if len(message.text) <= INLINE_CHARS:
                    return tokenizer.encode(message.text)
                return await asyncio.to_thread(tokenizer.encode, message.text)
            case "chat":
                tokenizer = self.text_tokenizer("prompt.chat")
                messages = [{"role": m.role, "content": m.content} for m in message.chat.messages]
                return await asyncio.to_thread(tokenizer.chat, messages)
            case None:
                choices = [field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields]
                raise InvalidArgument(f"{oneof}: is not set; give {' or '.join(choices)}")
            case _:
                return message.token_ids.ids  # pyright: ignore[reportAttributeAccessIssue]
