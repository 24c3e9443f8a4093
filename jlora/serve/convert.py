"""Converts between protobuf messages and the frozen records of `jlora.types`.

An unset `optional` field takes the record's default, so each default is written once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
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
# What comes before each output in a message's bytes: the field's number, and that its length follows.
OUTPUTS = bytes([pb.GenerateResponse.DESCRIPTOR.fields_by_name["outputs"].number << 3 | 2])


def sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """`sampling`, `stopping` and the two logprob fields as one record, not validated."""
    values: dict[str, Any] = {}
    for message in (request.sampling, request.stopping, request):
        for field in message.DESCRIPTOR.fields:
            if field.name in _SAMPLING and (not field.has_presence or message.HasField(field.name)):
                values[field.name] = getattr(message, field.name)
    return SamplingParams(**values)


def prompt(request: pb.GenerateRequest) -> Prompt:
    """The request's text, token ids or chat. Raises InvalidArgument if none is set."""
    if request.WhichOneof("prompt") == "token_ids":
        return request.token_ids.ids
    return _text(request, "prompt")


def tokenize_input(request: pb.TokenizeRequest) -> str | Chat:
    """The text or the chat. Raises InvalidArgument if none is set."""
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
) -> pb.GenerateResponse | bytes:
    """A message of a stream, or the whole answer; `totals` go on the last one.

    A long one takes many turns of the loop, and comes as its bytes: gRPC would make them in one turn.
    """
    message = pb.GenerateResponse(request_id=request_id)
    if totals is not None:
        usage, timing = totals
        message.usage.CopyFrom(pb.Usage(**dataclasses.asdict(usage)))
        message.timing.CopyFrom(pb.Timing(**timing.fields()))
    deltas = list(deltas)
    if sum(map(_size, deltas)) > PER_TURN:
        parts = [message.SerializeToString()]
        for part in pieces(deltas):
            parts.append(part)
            await asyncio.sleep(0)
        return b"".join(parts)
    for delta in deltas:  # in place: a message that is made first and then copied costs twice
        output = message.outputs.add(
            index=delta.index, text=delta.text, token_ids=delta.token_ids, finish_reason=delta.finish_reason
        )
        if delta.logprobs:
            output.logprobs.extend(map(token_logprob, delta.logprobs))
        if delta.prompt_logprobs:
            message.prompt_logprobs.extend(map(token_logprob, delta.prompt_logprobs))
    return message


def _size(delta: Delta) -> int:
    """Entries that become parts of a message."""
    return len(delta.token_ids) + len(delta.logprobs or ()) + len(delta.prompt_logprobs or ())


def pieces(deltas: Iterable[Delta]) -> Iterator[bytes]:
    """The bytes of a `GenerateResponse` with these deltas, in parts that are each made in a short time.

    Bytes of messages one after the other are those of one message with all their fields. What is inside another
    message has its length before it.
    """
    for delta in deltas:
        inner = [_output(delta).SerializeToString()]
        for entries in _turns(delta.logprobs):
            inner.append(pb.Output(logprobs=map(token_logprob, entries)).SerializeToString())
            yield b""
        yield OUTPUTS + _varint(sum(map(len, inner)))
        yield from inner
        for entries in _turns(delta.prompt_logprobs):
            yield pb.GenerateResponse(prompt_logprobs=map(token_logprob, entries)).SerializeToString()


def _output(delta: Delta) -> pb.Output:
    """A completion's news, without log-probabilities."""
    return pb.Output(index=delta.index, text=delta.text, token_ids=delta.token_ids, finish_reason=delta.finish_reason)


def _turns(entries: Sequence[TokenLogprob | None] | None) -> Iterator[Sequence[TokenLogprob | None]]:
    return (entries[at : at + PER_TURN] for at in range(0, len(entries), PER_TURN)) if entries else iter(())


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def adapter_info(info: AdapterInfo, summary: bool = False) -> pb.AdapterInfo:
    """The message has the record's fields; a summary leaves out those that may be long."""
    names = _SUMMARY if summary else _ADAPTER
    return pb.AdapterInfo(**{name: getattr(info, name) for name in names})
