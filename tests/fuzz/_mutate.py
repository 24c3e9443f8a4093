"""Changes of an input: of its bytes, of the numbers and values of its text, and of the numbers of its protobuf."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

SPANS = 24  # bytes that one change takes, mostly
VALUE = re.compile(rb"-?\d+(?:\.\d+)?|\"[^\"]{0,40}\"|\[[^][]{0,60}\]|\{[^{}]{0,60}\}|true|false|null")
ODD = (
    b"0", b"-1", b"1", b"2147483647", b"2147483648", b"-2147483649", b"4611686018427387904", b"9223372036854775807",
    b"18446744073709551616", b"9" * 400, b"1e9", b"1e999", b"-1e999", b"NaN", b"Infinity", b"1.5", b"null", b"true",
    b"[]", b"{}", b'""', b'"\\ud800"', b'"\\u0000"', b"[[]]", b"[0,4611686018427387904]", b"[null]", b'{"":0}',
    b"[" * 200, b"[" * 2000 + b"]" * 2000, b'{"a":' * 300 + b"1" + b"}" * 300, b'"' + b"x" * 3000 + b'"', b"\\", b"..",
    b"/", b"%00", b"\x00", b"\xff", b"\xed\xa0\x80",
    "𝟘".encode(), "é".encode(), b"\r\n", b"{{", b"{%", b"((((a+)+)+)+)!",
)  # fmt: skip
# Varints: 0, 1, 127, 128, 2^31 - 1, 2^31, 2^32, 2^63, -1, one without an end.
VARINTS = (
    b"\x00", b"\x01", b"\x7f", b"\x80\x01", b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x80\x08", b"\x80\x80\x80\x80\x10",
    b"\x80" * 9 + b"\x01", b"\xff" * 9 + b"\x01", b"\xff" * 12,
)  # fmt: skip
DOUBLES = (
    b"\x00" * 8, b"\x00\x00\x00\x00\x00\x00\xf8\x7f", b"\x00\x00\x00\x00\x00\x00\xf0\x7f",
    b"\x00\x00\x00\x00\x00\x00\xf0\xff", b"\xff" * 6 + b"\xef\x7f", b"\x00\x00\x00\x00\x00\x00\xf0\xbf",
)  # fmt: skip

Change = Callable[[bytes, random.Random, Sequence[bytes], Sequence[bytes]], bytes]


def mutated(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """The input after one change or a few."""
    for _ in range(1 + min(draw.getrandbits(2), draw.getrandbits(2))):
        data = draw.choice(CHANGES)(data, draw, pool, words)
    return data


def _span(data: bytes, draw: random.Random) -> tuple[int, int]:
    at = draw.randrange(len(data) + 1)
    return at, min(len(data), at + 1 + int(draw.random() ** 3 * SPANS))


def _flip(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x01"
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def _set(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    at, _ = _span(data, draw)
    return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]


def _remove(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    at, end = _span(data, draw)
    return data[:at] + data[end:]


def _double(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    at, end = _span(data, draw)
    return data[:at] + data[at:end] * draw.choice((2, 2, 3, 60)) + data[end:]


def _move(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    (at, end), to = _span(data, draw), draw.randrange(len(data) + 1)
    return data[:to] + data[at:end] + data[to:]


def _random(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    at, end = _span(data, draw)
    return data[:at] + draw.randbytes(end - at) + data[end:]


def _cut(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _cross(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    other = draw.choice(pool)
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def _value(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Another value in the place of a number, a string, a list or an object."""
    at = draw.randrange(len(data) + 1)
    found = VALUE.search(data, at) or VALUE.search(data)
    if found is None:
        return _word(data, draw, pool, words)
    new = draw.choice(ODD) if draw.random() < 0.7 or not words else draw.choice(words)
    return data[: found.start()] + new + data[found.end() :]


def _word(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    at, end = _span(data, draw)
    return data[:at] + draw.choice(words or ODD) + data[draw.choice((at, end)) :]


def _number(data: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """A number as protobuf has it in the place of some bytes."""
    at, new = draw.randrange(len(data) + 1), draw.choice(VARINTS if draw.random() < 0.7 else DOUBLES)
    return data[:at] + new + data[at + draw.choice((1, len(new))) :]


CHANGES: Sequence[Change] = (
    _flip, _set, _remove, _double, _move, _random, _cut, _cross, _value, _value, _word, _word, _number,
)  # fmt: skip
