"""JSON of answers that may be long, in steps that leave other threads their turns.

msgspec holds Python's lock until it is done, and so does the copy of a long string: the longest answer has 100 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

STEP = 64  # entries of a list that are encoded at once
PIECE = 64 << 10  # bytes, at least


def encode(value: Any) -> list[bytes]:
    """The bytes of `msgspec.json.encode` in pieces."""
    pieces, piece = [], bytearray()
    for part in _parts(value):
        piece += part
        if len(piece) >= PIECE:
            pieces.append(bytes(piece))
            piece.clear()
    return [*pieces, bytes(piece)]


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        before = b"{"
        for key, entry in value.items():
            yield before + msgspec.json.encode(str(key)) + b":"
            yield from _parts(entry)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list | tuple):
        before = b"["
        for at in range(0, len(value), STEP):
            yield before
            if len(value) <= STEP:  # each may be long in itself
                for i, entry in enumerate(value):
                    if i:
                        yield b","
                    yield from _parts(entry)
            else:
                yield msgspec.json.encode(value[at : at + STEP])[1:-1]
            before = b","
        yield b"]" if value else b"[]"
    else:
        yield msgspec.json.encode(value)
