"""Where a prompt invokes an activated LoRA. Plain Python, no jax."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

_CODEC = f"utf-32-{sys.byteorder[0]}e"


def last_occurrence(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """The position of an invocation's last occurrence in a prompt, which is where an activated LoRA acts from.

    As PEFT has it (`calculate_alora_offsets`), counted from the prompt's start; None if the prompt
    has none. Token ids, below 0x110000, are taken as the characters of a text: searching that is
    O(len(prompt)) whatever the two are, in C; 2 ms for 64k tokens, nearly all of it to make the text.
    """
    if len(invocation) > len(prompt):
        return None
    # Reversed: only the search from the front has no bad cases.
    found = _text(prompt)[::-1].find(_text(invocation)[::-1])
    return None if found < 0 else len(prompt) - found - len(invocation)


def _text(tokens: Sequence[int]) -> str:
    return array("i", tokens).tobytes().decode(_CODEC, "surrogatepass")
