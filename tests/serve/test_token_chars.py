"""Characters per token: proven for the tokenizers of Llama and Mistral, and never claimed where text may vanish."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from jlora.serve.token_chars import COMPOSED, UNPROVEN, chars_per_token
from tests.serve import _tokenizers

KINDS = {"byte level": _tokenizers.byte_level, "byte fallback": _tokenizers.byte_fallback}


def changed(core: tokenizers.Tokenizer, change: Callable[[dict[str, Any]], object]) -> tokenizers.Tokenizer:
    tree = json.loads(core.to_str())
    change(tree)
    return tokenizers.Tokenizer.from_str(json.dumps(tree))


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_more_characters_per_token(kind: str):
    core = KINDS[kind]()
    most = chars_per_token(core)
    assert most == max(map(len, core.get_vocab()))
    for text in (*_tokenizers.TEXTS, " " * 5000, "hello " * 500, "é" * 999, "𝄞" * 99, "\x00\n" * 500, "<s>" * 300):
        ids = core.encode(text, add_special_tokens=False).ids
        assert len(text) <= most * len(ids)


def test_llamas_own_steps_are_proven():
    llama2 = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]}  # fmt: skip
    core = changed(_tokenizers.byte_fallback(), lambda tree: tree.update(normalizer=llama2, pre_tokenizer=None))
    assert chars_per_token(core) == max(map(len, core.get_vocab()))
    llama3 = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]}  # fmt: skip
    core = changed(_tokenizers.byte_level(), lambda tree: tree.update(pre_tokenizer=llama3))
    assert chars_per_token(core) == max(map(len, core.get_vocab()))
    composed = changed(core, lambda tree: tree.update(normalizer={"type": "NFC"}))
    assert chars_per_token(composed) == COMPOSED * max(map(len, core.get_vocab()))


LOSSY: dict[str, Callable[[dict[str, Any]], object]] = {
    "strips": lambda tree: tree.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "shortens": lambda tree: tree.update(
        normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    ),
    "drops": lambda tree: tree.update(
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    ),
    "joins what is unknown": lambda tree: tree["model"]["vocab"].pop("<0x41>") and tree["model"].update(
        byte_fallback=False
    ),
    "swallows spaces": lambda tree: tree["added_tokens"][0].update(lstrip=True),
}  # fmt: skip


@pytest.mark.parametrize("why", LOSSY)
def test_a_tokenizer_that_may_lose_text_is_not_proven(why: str):
    assert chars_per_token(changed(_tokenizers.byte_fallback(), LOSSY[why])) == UNPROVEN
