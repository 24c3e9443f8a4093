"""What the demo's adapters do, in plain Python: the one definition behind training, tests and demo.

A *check* is an activated LoRA. In a conversation with the base it says something about what the user
has written so far, over the base's KV of that conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Transform = Callable[[str], str]

LOWER = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Check:
    """Whether any text of a conversation has something: `verdicts` are the answers if none does, and if any does."""

    finds: Callable[[str], bool]
    verdicts: tuple[str, str]

    def verdict(self, texts: Sequence[str]) -> str:
        """The exact answer about the user's texts."""
        return self.verdicts[any(map(self.finds, texts))]


def echo(text: str) -> str:
    """The base model's answer."""
    return text


def rotate_letters(text: str, by: int) -> str:
    """Caesar's cipher on ASCII letters, case kept."""
    turned = LOWER[by:] + LOWER[:by]
    return text.translate(str.maketrans(LOWER + LOWER.upper(), turned + turned.upper()))


def rot13(text: str) -> str:
    """ASCII letters moved by half the alphabet: twice is the text again."""
    return rotate_letters(text, 13)


def upper(text: str) -> str:
    """ASCII letters upper-cased; everything else as it is."""
    return text.translate(str.maketrans(LOWER, LOWER.upper()))


def leet(text: str) -> str:
    """a e i o s t become 4 3 1 0 5 7."""
    return text.translate(str.maketrans("aeiostAEIOST", "431057431057"))


def star_vowels(text: str) -> str:
    """Every vowel becomes a star."""
    return re.sub("[aeiouAEIOU]", "*", text)


def pig_latin(text: str) -> str:
    """A word's first letter moves to its end, followed by `ay`; one letter alone stays."""
    return re.sub("([A-Za-z])([A-Za-z]+)", r"\2\1ay", text)


def reverse(text: str) -> str:
    """The bytes from last to first; text outside ASCII is left alone, to stay valid UTF-8."""
    return text[::-1] if text.isascii() else text


def mock(text: str) -> str:
    """Letters alternate lower and upper case, counted over the letters alone."""
    seen = 0
    out = []
    for char in text:
        if char.isascii() and char.isalpha():
            char = char.upper() if seen % 2 else char.lower()
            seen += 1
        out.append(char)
    return "".join(out)


def has_number(text: str) -> bool:
    """Whether there is an ASCII digit."""
    return re.search("[0-9]", text) is not None


TASKS: Mapping[str, Transform] = {
    "upper": upper,
    "leet": leet,
    "stars": star_vowels,
    "mock": mock,
    "rot13": rot13,
    "piglatin": pig_latin,
    "reverse": reverse,
}
CHECKS: Mapping[str, Check] = {"numbers": Check(has_number, ("no numbers", "has numbers"))}
