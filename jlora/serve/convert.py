"""Converts between protobuf messages and the frozen records of `jlora.types`.

An unset `optional` field takes the record's default, so each default is written once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jlora.errors import InvalidArgument
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.texts import Chat, Prompt
from jlora.types import AdapterInfo, Delta, SamplingParams, Timing, TokenLogprob, Usage

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_ADAPTER = frozenset(field.name for field in dataclasses.fields(AdapterInfo)) & set(
    pb.AdapterInfo.DESCRIPTOR.fields_by_name  # a new fact may not be in the message yet
)
_SUMMARY = _ADAPTER - {"ranks", "alora_invocation_tokens"}

PER_TURN = 64  # tokens whose log-probabilities become messages in one turn of the loop


def sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """`sampling`, `stopping` and the two logprob fields as one record, not validated."""
    values: dict[str, Any] = {}
    for message in (request.sampling, request.stopping, request):
        for field in message.DESCRIPTOR.fields:
            if field.name in _SAMPLING and (not field.has_presence or message.HasField(field.name)):
                values[field.name] = getattr(message, field.name)
    return SamplingParams(**values)


def prompt(request: pb.GenerateRequest) -> Prompt:
    """The one that is set. Raises InvalidArgument if none is."""
    if request.WhichOneof("prompt") == "token_ids":
        return request.token_ids.ids
    return _text(request, "prompt")


def tokenize_input(request: pb.TokenizeRequest) -> str | Chat:
    """As `prompt`."""
    return _text(request, "input")


def _text(message: pb.GenerateRequest | pb.TokenizeRequest, oneof: str) -> str | Chat:
    match message.WhichOneof(oneof):
        case "text":
            return message.text
        case "chat":
            return Chat(message.chat.messages)
        case _:
            choices = [field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields]
            raise InvalidArgument(f"{oneof}: is not set; give {' or '.join(choices)}")


def token_logprob(entry: TokenLogprob | None) -> pb.TokenLogprob:
    """One entry; None, the prompt's first token, becomes an empty message."""
    if entry is None:
        return pb.TokenLogprob()
    top = [pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


async def response(
    request_id: str, deltas: Iterable[Delta], totals: tuple[Usage, Timing] | None = None
) -> pb.GenerateResponse:
    """A message of a stream, or the whole answer; `totals` go on the last one. A long one takes many turns."""
    message = pb.GenerateResponse(request_id=request_id)
    parts: list[tuple[Any, Sequence[TokenLogprob | None]]] = []
    for delta in deltas:
        output = message.outputs.add(
            index=delta.index, text=delta.text, token_ids=delta.token_ids, finish_reason=delta.finish_reason
        )
        for field, entries in ((output.logprobs, delta.logprobs), (message.prompt_logprobs, delta.prompt_logprobs)):
            parts += (
                [(field, entries[at : at + PER_TURN]) for at in range(0, len(entries), PER_TURN)] if entries else []
            )
    for i, (field, entries) in enumerate(parts):
        if i:
            await asyncio.sleep(0)
        field.extend(map(token_logprob, entries))
    if totals is not None:
        usage, timing = totals
        message.usage.CopyFrom(pb.Usage(**dataclasses.asdict(usage)))
        message.timing.CopyFrom(pb.Timing(**timing.fields()))
    return message


def adapter_info(info: AdapterInfo, summary: bool = False) -> pb.AdapterInfo:
    """The message has the record's fields; a summary leaves out those that may be long."""
    names = _SUMMARY if summary else _ADAPTER
    return pb.AdapterInfo(**{name: getattr(info, name) for name in names})
