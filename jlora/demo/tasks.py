"""What the demo's adapters do, in plain Python: the one definition behind data, tests and demo.

Every task is a function from text to text that a person checks at a glance. `TASKS` maps an
adapter's name to its function, a line for people and the shape of its LoRA; shapes differ on
purpose (ranks 4 to 64, different projections, rsLoRA, a rank pattern), because that is what
jlora serves in one batch. The base model, without an adapter, answers with the text itself.

A *check* is an activated LoRA: asked in a conversation of the base's, it says something about what
the user has written so far, and costs the base's KV of that conversation and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Transform = Callable[[str], str]

ATTENTION = ("q", "k", "v", "o")
ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
LOWER = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The adapter that learns a task.

    Attributes:
        rank, alpha: of every target that `ranks` does not name.
        targets: projections, as in `jlora.model.spec.PROJECTIONS`.
        rslora: scale alpha / sqrt(rank) instead of alpha / rank.
        ranks: projection -> its own rank (PEFT's `rank_pattern`).
    """

    rank: int
    targets: tuple[str, ...]
    alpha: int
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)

    def rank_of(self, projection: str) -> int:
        return self.ranks.get(projection, self.rank)

    def scale_of(self, projection: str) -> float:
        rank = self.rank_of(projection)
        return self.alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class Task:
    """One adapter of the demo: `transform` is the exact answer to a text.

    `seed` is added to the run's, so that an adapter trains the same whichever others do.
    """

    name: str
    about: str
    transform: Transform
    lora: LoraShape
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class Check:
    """An activated adapter of the demo: whether any text of a conversation has something.

    Attributes:
        finds: whether one text has it.
        verdicts: the answer if no text does, and if any does.
    """

    name: str
    about: str
    finds: Callable[[str], bool]
    verdicts: tuple[str, str]
    lora: LoraShape
    steps: int
    seed: int

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


def _tasks(*tasks: Task) -> dict[str, Task]:
    return {task.name: task for task in tasks}


TASKS: Mapping[str, Task] = _tasks(
    Task("upper", "UPPER-CASES THE TEXT", upper, LoraShape(4, ("o", "down"), 8), steps=200, seed=1),
    Task("leet", "wr1735 1n l3375p34k", leet, LoraShape(8, ("q", "v"), 16), steps=300, seed=2),
    Task("stars", "h*d*s th* v*w*ls", star_vowels, LoraShape(6, ("v", "gate", "up"), 12), steps=300, seed=3),
    Task("mock", "aLtErNaTeS tHe CaSe", mock, LoraShape(12, ("q", "k", "o", "up"), 24), steps=450, seed=4),
    Task("rot13", "ebgngrf guvegrra cynprf", rot13, LoraShape(16, ALL_LINEAR, 32), steps=350, seed=6),
    Task(
        "piglatin",
        "peaksspay igpay atinlay",
        pig_latin,
        LoraShape(32, ALL_LINEAR, 32, ranks={"gate": 8, "up": 8, "down": 8}),
        steps=450,
        seed=7,
    ),
    Task("reverse", "sdrawkcab skaeps", reverse, LoraShape(64, ATTENTION, 16, rslora=True), steps=500, seed=8),
)


def has_number(text: str) -> bool:
    """Whether there is an ASCII digit."""
    return re.search("[0-9]", text) is not None


CHECKS: Mapping[str, Check] = {
    "numbers": Check(
        "numbers",
        "did anybody write a number?",
        has_number,
        ("no numbers", "has numbers"),
        LoraShape(8, ALL_LINEAR, 16),
        steps=260,
        seed=9,
    )
}
