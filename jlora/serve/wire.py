"""Counts the fields of a protobuf message before it is parsed.

The parser takes time by fields and not by bytes, and it holds Python's lock: 4 MiB of empty chat messages took
76 ms, 4 MiB of text 0.5 ms. So a large message of many fields is refused after its first `MOST`.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from jlora.errors import InvalidArgument

SMALL = 64 << 10  # bytes of a message that is parsed at once: 1.2 ms at worst
MOST = 16_384  # fields: a chat of as many messages as one may have, and all else

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def check_fields(data: bytes, kind: Descriptor) -> None:
    """Raises InvalidArgument for a message of `kind` with too many fields. A broken one is left to the parser."""
    if len(data) > SMALL:
        try:
            _count(data, (0, len(data)), kind, MOST)
        except IndexError:  # it ends within a field
            return


def _count(data: bytes, span: tuple[int, int], kind: Descriptor | None, left: int) -> int:
    """What is left of `left` fields behind those in `span`. A packed list is one field."""
    at, end = span
    while at < end:
        if left == 0:
            raise InvalidArgument(
                f"request: a message of {len(data)} bytes must have at most {MOST} fields (ids go as a packed list)"
            )
        left -= 1
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == BYTES:
            size, at = _varint(data, at)
            field = kind.fields_by_number.get(tag >> 3) if kind is not None else None
            if field is not None and field.message_type is not None:
                left = _count(data, (at, min(at + size, end)), field.message_type, left)
            at += size
        elif wire == VARINT:
            _, at = _varint(data, at)
        elif wire in (FIXED64, FIXED32):
            at += 8 if wire == FIXED64 else 4
    return left


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    byte = data[at]
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        if shift > 63:
            raise IndexError
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at + 1
