"""Text functions that the base model learns under tag bytes which the chat template never writes.

They are unlike any task. They give the base the habits (map a letter, walk backwards, insert, skip, move
to the end of the word) that a small adapter then turns to its own use.
"""

from __future__ import annotations

import re

from jlora.demo.tasks import Transform, reverse, rotate_letters

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def _double(text: str) -> str:
    return re.sub("([A-Za-z])", r"\1\1", text)


def _swap_case(text: str) -> str:
    return "".join(c.swapcase() if c.isascii() else c for c in text)


def _drop_vowels(text: str) -> str:
    return re.sub("[aeiouAEIOU]", "", text)


def _title(text: str) -> str:
    return re.sub("[A-Za-z]+", lambda m: m[0][:1].upper() + m[0][1:].lower(), text)


def _backward_words(text: str) -> str:
    return re.sub("[A-Za-z]+", lambda m: m[0][::-1], text)


def _last_letter_first(text: str) -> str:
    return re.sub("([A-Za-z]+)([A-Za-z])", r"\2\1", text)


def _name_digits(text: str) -> str:
    return re.sub("[0-9]", lambda m: DIGIT_NAMES[int(m[0])].upper() + ".", text)


def _mark_vowels(text: str) -> str:
    return re.sub("([aeiouAEIOU])", r"[\1]", text)


def _vowels_to_digits(text: str) -> str:
    return text.translate(str.maketrans("aeiouAEIOU", "1234512345"))


def _mask_consonants(text: str) -> str:
    return re.sub("[b-df-hj-np-tv-zB-DF-HJ-NP-TV-Z]", "#", text)


def _tail_word(text: str) -> str:
    return re.sub("([A-Za-z]+)", r"\1ok", text)


def _first_letter_last(text: str) -> str:
    return re.sub("([A-Za-z])([A-Za-z]*)", r"\2-\1", text)


SKILLS: tuple[Transform, ...] = (
    _swap_case,
    str.lower,
    _double,
    _drop_vowels,
    _title,
    _backward_words,
    _last_letter_first,
    _first_letter_last,
    _name_digits,
    _mark_vowels,
    _vowels_to_digits,
    _mask_consonants,
    _tail_word,
    lambda text: rotate_letters(text, 1),
    lambda text: rotate_letters(text, 25),
    lambda text: rotate_letters(text, 5),
    lambda text: reverse(text) + "!",
    lambda text: "." + reverse(text),
)
