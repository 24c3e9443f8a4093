"""Tokens that a model directory names or adds beside `tokenizer.json`. No jax.

tokenizer_config.json     `added_tokens_decoder`: tokens by id; `eos_token` and the like: which are special
added_tokens.json         the ids of added tokens, as older versions of transformers wrote them
special_tokens_map.json   `eos_token` and the like, of older versions
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jlora.errors import DataLoss

CORE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
# The special tokens that transformers passes to chat templates.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Added(msgspec.Struct, frozen=True):
    """A token that stands outside the vocabulary's merges, as transformers and tokenizers write it."""

    content: str
    id: int = -1
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True


class _Model(msgspec.Struct):
    vocab: Any = None


class _Core(msgspec.Struct):
    added_tokens: list[Added] = []
    model: _Model = msgspec.field(default_factory=_Model)


def config(directory: Path) -> dict[str, Any]:
    """The tokenizer's configuration. Raises DataLoss for a damaged file."""
    maps = (_object(directory / name) for name in ("special_tokens_map.json", CONFIG))
    return {key: value for tree in maps for key, value in tree.items()}


def specials(settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of each special token that a configuration names."""
    texts = {name: _text(settings.get(name)) for name in NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def added(directory: Path, settings: Mapping[str, Any]) -> list[Added]:
    """The tokens that are added beside `tokenizer.json`, in order of id. Raises DataLoss for a damaged file."""
    tree = settings.get("added_tokens_decoder")
    try:
        if tree:
            by_id = msgspec.convert(tree, dict[int, Added], strict=False)
            found = [msgspec.structs.replace(token, id=i) for i, token in by_id.items()]
        else:
            by_content = msgspec.convert(_object(directory / ADDED), dict[str, int])
            found = [Added(content, i, normalized=False) for content, i in by_content.items()]
    except msgspec.ValidationError as e:
        raise DataLoss(f"{CONFIG if tree else ADDED}: its added tokens cannot be read: {e}") from e
    return sorted(found, key=lambda token: token.id)


def end_token(directory: Path) -> int | None:
    """The id of the tokenizer's `eos_token`; None if it has none. Raises DataLoss for a damaged file."""
    settings = config(directory)
    text = specials(settings).get("eos_token")
    if text is None or not (directory / CORE).is_file():
        return None
    try:
        core = msgspec.json.decode((directory / CORE).read_bytes(), type=_Core)
    except (OSError, msgspec.DecodeError) as e:
        raise DataLoss(f"{CORE}: cannot be read: {e}") from e
    ids = {token.content: token.id for token in (*added(directory, settings), *core.added_tokens)}
    vocab = core.model.vocab if isinstance(core.model.vocab, dict) else {}  # a list: a Unigram, which adds its end
    return ids.get(text, vocab.get(text))


def _object(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    try:
        return msgspec.json.decode(file.read_bytes() if file.is_file() else b"{}", type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as e:
        raise DataLoss(f"{file.name}: cannot be read: {e}") from e


def _text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
