"""How many characters one token can stand for: a bound on the text that a context can hold.

It is proven where nothing between text and tokens drops or joins text: a BPE model that knows every byte,
behind steps that keep each character. That holds for the tokenizers of Llama and Mistral.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

# Where nothing is proven: the longest token of Llama 3 has 128 characters.
UNPROVEN = 128

# Characters that Unicode's composition joins into one at most.
COMPOSED = 4

_KEEP = frozenset({"Prepend", "ByteLevel", "Lowercase", "NFD", "NFKD", "Metaspace", "Digits", "UnicodeScripts"})
_COMPOSE = frozenset({"NFC", "NFKC"})
_CUT = frozenset({"Split", "Punctuation"})


def chars_per_token(core: tokenizers.Tokenizer) -> int:
    """Characters of text per token at most; `UNPROVEN` if that cannot be said."""
    tree = json.loads(core.to_str())
    steps = [*_steps(tree["normalizer"], "normalizers"), *_steps(tree["pre_tokenizer"], "pretokenizers")]
    swallowing = any(token["lstrip"] or token["rstrip"] for token in tree["added_tokens"])  # spaces beside them
    if swallowing or not _knows_every_byte(tree, steps) or not all(map(_keeps_text, steps)):
        return UNPROVEN
    composed = COMPOSED if any(step["type"] in _COMPOSE for step in steps) else 1
    return composed * max(map(len, core.get_vocab()))


def _steps(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    else:
        yield step


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Whether each character of the step's input is at least one of its output."""
    kind = step["type"]
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return kind in _KEEP or kind in _COMPOSE or (kind in _CUT and step["behavior"] != "Removed")


def _knows_every_byte(tree: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> bool:
    """Whether no text is unknown to the model: unknown text is dropped, or many characters become one token."""
    model = tree["model"]
    if model["type"] != "BPE":
        return False
    alphabet: list[str] = []
    if any(step["type"] == "ByteLevel" for step in steps):
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    elif model.get("byte_fallback"):
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    return bool(alphabet) and all(token in model["vocab"] for token in alphabet)
