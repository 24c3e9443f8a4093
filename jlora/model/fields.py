"""JSON objects that other programs write, checked field by field. No jax."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from jlora.errors import DataLoss, InvalidArgument

# A type, its bounds, and its description in an error message: "must be ...".
Positive = Annotated[int, Meta(ge=1, description="a whole number, at least 1")]
AboveZero = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a finite number above 0")]
Flag = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, Meta(description="a string or null")]
Index = Annotated[int, Meta(ge=0)]
Indices = Annotated[list[Index] | Index, Meta(description="whole numbers, at least 0")]


def parse(data: bytes, where: str) -> Any:
    """The JSON value. Raises DataLoss if it is none."""
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character: nobody can write it
    except (ValueError, RecursionError) as e:
        raise DataLoss(f"{where}: is not valid JSON ({type(e).__name__})") from e
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one JSON object. null counts as absent. Errors name the file (`where`), key and value."""

    tree: Mapping[str, Any]
    where: str

    def bad(self, key: str, value: Any, limit: str) -> InvalidArgument:
        return InvalidArgument(f"{self.where}: {key} = {short(value)}: {limit}")

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value as `kind`, one of the types above. Without a default the key is required."""
        value = self.tree.get(key)
        if value is None and default is None:
            raise self.bad(key, None, "is missing")
        return default if value is None else self.convert(key, value, kind)

    def convert(self, key: str, value: Any, kind: Any) -> Any:
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, OverflowError) as e:
            raise self.bad(key, value, f"must be {get_args(kind)[1].description}") from e

    def indices(self, key: str) -> tuple[int, ...] | None:
        if self.tree.get(key) is None:
            return None
        value = self.convert(key, self.tree[key], Indices)
        return tuple(value) if isinstance(value, list) else (value,)

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...] | None:
        ids = self.indices(key)
        if ids is not None and any(i >= vocab for i in ids):
            raise self.bad(key, self.tree[key], f"must be token ids below the vocabulary size {vocab}")
        return ids

    def require(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses a value that `fixed` does not list for its key."""
        for key, allowed in fixed.items():
            value = self.tree.get(key)
            if not any(type(value) is type(a) and value == a for a in allowed):
                raise self.bad(key, value, f"not supported; must be {' or '.join(map(json.dumps, allowed))}")


def short(value: Any) -> str:
    """The value as JSON, cut at 80 characters."""
    try:
        text = json.dumps(value)
    except RecursionError:  # it was read with less of the stack in use
        text = f"a nested {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
