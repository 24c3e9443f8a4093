"""Tokens that a model directory names or adds beside `tokenizer.json`. No jax.

tokenizer_config.json     `added_tokens_decoder`: tokens by id; `eos_token` and the like: which are special
added_tokens.json         the ids of added tokens, as older versions of transformers wrote them
special_tokens_map.json   `eos_token` and the like, of older versions; as in transformers, they win over those of a
                          configuration without `added_tokens_decoder`, and are not read beside one
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jlora.errors import DataLoss
from jlora.model.fields import short
from jlora.model.spec import CONVERTED

CORE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
BY_ID = "added_tokens_decoder"
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"  # today's key, and the older one
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
    return merged(_object(directory / CONFIG), _object(directory / MAP))


def merged(own: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a `tokenizer_config.json` and of the `special_tokens_map.json` beside it."""
    if own.get(BY_ID) is not None:
        return dict(own)
    extra = own.get(EXTRA) or own.get(ADDITIONAL)
    return {**own, **({EXTRA: extra} if extra else {}), **older}


def specials(settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of each special token that has a name, as `named`."""
    return {name: token.content for name, token in named(settings).items()}


def named(settings: Mapping[str, Any]) -> dict[str, Added]:
    """The special tokens that chat templates get: the standard names, and a model's own. Raises DataLoss."""
    extra = settings.get(EXTRA)
    # In transformers' order, by which new tokens get their ids: those with flags come first.
    keys = sorted(settings, key=lambda key: isinstance(settings[key], str))
    own = {key: settings[key] for key in keys if key.endswith("_token") and key not in NAMES}
    values = {name: settings.get(name) for name in NAMES} | own | (extra if isinstance(extra, dict) else {})
    tokens = {name: _token(name, value) for name, value in values.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def unnamed(settings: Mapping[str, Any]) -> list[Added]:
    """The special tokens that are listed without names. Raises DataLoss."""
    lists = (settings.get(key) for key in (EXTRA, ADDITIONAL))
    values = next((value for value in lists if value and isinstance(value, list)), [])
    return [token for value in values if (token := _token(EXTRA, value)) is not None]


def chat_template(own: str | None, settings: Mapping[str, Any]) -> str | None:
    """The default chat template: `own`, the content of its file, if there is one, or that of the configuration."""
    if own is not None:
        return own
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((t.get("template") for t in found if isinstance(t, Mapping) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def added(directory: Path, settings: Mapping[str, Any]) -> list[Added]:
    """The tokens that are added beside `tokenizer.json`, in order of id. Raises DataLoss for a damaged file."""
    tree = settings.get(BY_ID)
    try:
        if tree is not None:
            by_id = msgspec.convert(tree, dict[int, Added], strict=False)
            found = [msgspec.structs.replace(token, id=i) for i, token in by_id.items()]
        else:
            by_content = msgspec.convert(_object(directory / ADDED), dict[str, int])
            listed = unnamed({EXTRA: settings.get(EXTRA)})  # not what only an older list has: as in transformers
            special = {*specials(settings).values(), *(token.content for token in listed)}
            found = [
                Added(content, i, special=content in special, normalized=content not in special)
                for content, i in by_content.items()
            ]
    except msgspec.ValidationError as e:
        raise DataLoss(f"{ADDED if tree is None else CONFIG}: its added tokens cannot be read: {e}") from e
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


def vocabulary(directory: Path) -> int | None:
    """How many tokens the model has, by its `config.json` or its converted spec; None if these do not say."""
    try:
        size = _object(directory / "config.json").get("vocab_size")
        spec = _object(directory / CONVERTED).get("spec")
    except DataLoss:  # who reads the model says more
        return None
    size = spec.get("vocab") if isinstance(spec, dict) else size
    return size if isinstance(size, int) else None


def _object(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    try:
        return msgspec.json.decode(file.read_bytes() if file.is_file() else b"{}", type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as e:
        raise DataLoss(f"{file.name}: cannot be read: {e}") from e


def _token(name: str, value: Any) -> Added | None:
    """A token, written as its text or with its flags; None for anything else."""
    tree = {"content": value} if isinstance(value, str) else value
    if not isinstance(tree, Mapping) or not isinstance(tree.get("content"), str):
        return None
    try:
        return msgspec.convert({"special": True, "normalized": False, **tree}, Added)
    except msgspec.ValidationError as e:
        raise DataLoss(f"{CONFIG}: {name} = {short(value)}: {e}") from e
