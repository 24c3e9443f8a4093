"""A message of very many fields, which would hold the loop while it is parsed, is refused before."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from jlora.errors import InvalidArgument
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.texts import MAX_MESSAGES
from jlora.serve.wire import MOST, SMALL, check_fields
from tests.serve._server import Served, refused

CODE = grpc.StatusCode
KIND: Any = pb.GenerateRequest.DESCRIPTOR


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, as short as it goes."""
    size, length = b"", len(content)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


MANY = SMALL  # more than `MOST`, in messages larger than `SMALL`
HOSTILE = {
    "chat": field(5, b"\x0a\x00" * MANY),
    "the same field again": field(5, b"") * MANY,
    "a map": field(6, b"\x4a\x00" * MANY),
    "stop strings": field(7, b"\x1a\x00" * MANY),
    "ids one by one": field(4, b"\x08\x05" * MANY),
    "unknown numbers": b"\xf8\x06\x01" * MANY,
    "unknown groups": b"\xa3\x06\xa4\x06" * MANY,
    "unknown fixed": (b"\xfd\x06" + b"1234") * MANY,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_many_fields_are_refused_and_not_parsed(served: Served, name: str):
    said = f"a message of {len(HOSTILE[name])} bytes must have at most {MOST} fields"
    with refused(CODE.INVALID_ARGUMENT, said):
        served.channel.unary_unary("/jlora.v1.Inference/Generate")(HOSTILE[name])
    assert pb.GenerateRequest.FromString(HOSTILE[name]) is not None, "it is a valid message"


def test_large_messages_of_few_fields_pass():
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 900)] * MAX_MESSAGES)
    whole = pb.GenerateRequest(
        request_id="r", model="m", chat=chat, sampling=pb.Sampling(logit_bias={i: 1.0 for i in range(1024)}),
        stopping=pb.Stopping(stop=["x" * 1024] * 16, stop_token_ids=range(16)), tenant="t",
    )  # fmt: skip
    check_fields(whole.SerializeToString(), KIND)
    check_fields(pb.GenerateRequest(text="x" * (4 << 20)).SerializeToString(), KIND)
    check_fields(pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1 << 18))).SerializeToString(), KIND)


def test_broken_messages_are_left_to_the_parser():
    chance = random.Random(5)
    base = HOSTILE["chat"][: SMALL + 100]
    for _ in range(20):
        data = bytearray(base)
        for _ in range(chance.randrange(1, 30)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            check_fields(bytes(data[: chance.randrange(len(data) - 90, len(data))]), KIND)
        except InvalidArgument:
            continue
    for broken in (b"\x1a" + b"\xff" * SMALL, b"\xff" * 2 * SMALL, field(5, base)[:-3]):
        check_fields(broken, KIND)
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(b"\xff" * 2 * SMALL)
