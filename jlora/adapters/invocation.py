"""Where a prompt invokes an activated LoRA. No jax."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from jlora.errors import InvalidArgument

LISTED = 16  # tokens in a message
SHOWN = 100  # characters in a message
_CODEC = f"utf-32-{sys.byteorder[0]}e"


class NotInvoked(InvalidArgument):
    """A prompt does not invoke an activated LoRA. `text`: what its tokens read as, where that is known."""

    def __init__(self, adapter: str, tokens: Sequence[int], text: str = ""):
        super().__init__(adapter, tokens, text)
        self.adapter = adapter
        self.tokens = tokens
        self.text = text

    def __str__(self) -> str:
        more = f", … {len(self.tokens)} tokens" if len(self.tokens) > LISTED else ""
        ids = f"[{', '.join(map(str, self.tokens[:LISTED]))}{more}]"
        read = f", the text {self.text[:SHOWN]!r} (a space beside it may make other tokens)" if self.text else ""
        return (
            f"prompt: does not invoke adapter {self.adapter!r}, an activated LoRA: it must hold "
            f'alora_invocation_tokens = {ids}{read}; adapters.alora_missing = "base" lets the base answer instead'
        )


def last_occurrence(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Position of the invocation's last occurrence in the prompt, None if there is none.

    The search treats token ids (below 0x110000) as characters of a string, because `str.find` takes
    O(len(prompt)) time in C: 2 ms for 64k tokens.
    """
    if len(invocation) > len(prompt):
        return None
    # Reversed, because `find` is linear in the worst case and `rfind` is not.
    found = _text(prompt)[::-1].find(_text(invocation)[::-1])
    return None if found < 0 else len(prompt) - found - len(invocation)


def _text(tokens: Sequence[int]) -> str:
    return array("i", tokens).tobytes().decode(_CODEC, "surrogatepass")
