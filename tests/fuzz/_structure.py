"""Changes of an input that keep its form: of a JSON value, of a protobuf message, of a list of messages.

Half of all inputs are made this way: a parser's checks lie behind its syntax, and changes of bytes mostly break that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

Change = Callable[[bytes, random.Random], bytes]

VALUES: Sequence[Any] = (
    0, -1, 1, 2, 3.5, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 1e300, -0.0, float("nan"), float("inf"),
    10**400, True, False, None, "", "x", "\x00", "\ud800", "é𝟘", "x" * 300, "x" * 3000, "../x", "a@1", [], {}, [[]],
    [None], [0] * 70, ["x"] * 20, {"": 0}, {"x": {"x": {}}}, [[[[[]]]]],
)  # fmt: skip
INTEGERS = (0, 1, -1, 2, 5, 63, 64, 65, 399, 400, 4095, 4096, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 100.5, 1e-6, 1e9, 1e300, -1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "x",
    "base",
    "sql",
    "sql@1",
    "base:sql",
    "\x00",
    "é𝟘",
    "x" * 129,
    "x" * 257,
    "x" * 1100,
    "../x",
    "stop",
    "y z",
)


def of_json(data: bytes, draw: random.Random) -> bytes:
    """Another value at one place of a JSON value, or one more or less."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(1 + draw.getrandbits(1)):
        tree = _changed(tree, draw, 0)
    return json.dumps(tree).encode()


def _changed(tree: Any, draw: random.Random, depth: int) -> Any:
    if depth and (not isinstance(tree, dict | list) or not tree or draw.random() < 0.2):
        return draw.choice(VALUES) if draw.random() < 0.8 or not isinstance(tree, int | float) else tree * -2 + 1
    if isinstance(tree, dict) and tree:
        key, kind = draw.choice(list(tree)), draw.random()
        if kind < 0.1:
            return {k: v for k, v in tree.items() if k != key}
        if kind < 0.2:
            return {**tree, draw.choice(("", "x", "é", key + "x")): tree[key]}
        return {**tree, key: _changed(tree[key], draw, depth + 1)}
    if isinstance(tree, list) and tree:
        at, kind = draw.randrange(len(tree)), draw.random()
        if kind < 0.1:
            return tree[:at] + tree[at + 1 :]
        if kind < 0.2:
            return tree + tree[at : at + 1] * draw.choice((1, 2, 80))
        return [*tree[:at], _changed(tree[at], draw, depth + 1), *tree[at + 1 :]]
    return draw.choice(VALUES)


def change_message(message: Message, draw: random.Random) -> None:
    """Another value of one field of a message, or of one inside it."""
    if not message.DESCRIPTOR.fields:
        return
    field = draw.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_value(field.message_type.fields_by_name[name], draw) for name in ("key", "value"))
        getattr(message, field.name)[key] = value
    elif field.is_repeated:
        _change_list(getattr(message, field.name), field, draw)
    elif draw.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is not None:
        change_message(getattr(message, field.name), draw)
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(field, draw))


def _change_list(values: Any, field: FieldDescriptor, draw: random.Random) -> None:
    if len(values) and draw.random() < 0.2:
        del values[draw.randrange(len(values)) :]
    elif field.message_type is not None:
        change_message(draw.choice(values) if len(values) and draw.random() < 0.7 else values.add(), draw)
    else:
        values.extend([_value(field, draw)] * draw.choice((1, 1, 2, 17, 70)))


def _value(field: FieldDescriptor, draw: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = draw.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return draw.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_FLOAT:
            return draw.choice([x for x in FLOATS if abs(x) < 1e38 or x != x])
        case FieldDescriptor.CPPTYPE_INT64:
            return draw.choice(INTEGERS)
        case _:  # 32 bits
            return draw.choice([i for i in INTEGERS if -(2**31) <= i < 2**31])


def of_message(data: bytes, kind: type[Message], draw: random.Random) -> bytes:
    """A message of that kind, changed; anything else as it is."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return data
    for _ in range(1 + draw.getrandbits(1)):
        change_message(message, draw)
    return message.SerializeToString()


def of_list(parts: list[bytes], change: Change, draw: random.Random) -> list[bytes]:
    """Messages, one of them changed, doubled, moved or gone."""
    if not parts:
        return parts
    at, kind = draw.randrange(len(parts)), draw.random()
    if kind < 0.6:
        return [*parts[:at], change(parts[at], draw), *parts[at + 1 :]]
    if kind < 0.75:
        return parts[: at + 1] + parts[at:]
    if kind < 0.9:
        return parts[:at] + parts[at + 1 :]
    return [*parts[:at], draw.choice(parts), *parts[at:]]
