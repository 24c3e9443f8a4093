"""Training text made from a seed: words, numbers, sentences, and conversations of token ids.

There is no data set: a text is drawn from a list of common words, from a generator of
pronounceable ones, from numbers and from noise. A text whose hash falls in the held-out eighth
is never put in a training row, whatever the seed, so answers to held-out texts are not memories.

A token is a byte (id = its value) or one of `SPECIALS`. One conversation is
`<s> (<|user|> text <|assistant|> answer </s>)*`, as the chat template writes it, and a training row
is a conversation cut at the row's length; the loss counts the answers and their `</s>` only.
A check's row ends in `<|invoke|> <|assistant|> verdict </s>`: a message of the role `invoke` without
a word. These first two tokens are its invocation, from which on its adapter acts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from jlora.demo.tasks import Check, Transform, echo
from tools.train_demo.skills import SKILLS

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>", "<|invoke|>", "<|reserved|>")
BOS, EOS, USER, ASSISTANT, SYSTEM, PAD, INVOKE, RESERVED = range(256, 256 + len(SPECIALS))
VOCAB = 256 + len(SPECIALS)
INVOCATION = (INVOKE, ASSISTANT)

# Bytes that no keyboard types: skill i is asked for by byte TAGS[i] before the text.
TAGS = tuple(bytes([code]) for code in (*range(1, 9), *range(14, 31)))[: len(SKILLS)]

WORDS = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face others level
office door health person art war history party result change morning reason research girl guy moment air teacher
force education the and that with for you this but his from they say her she will one all would there their what
out about who get which when make can like just him know take into your good some could them see other than then
now look only come over think also after use how our well new want because any these give most red green blue
small big old young happy quick brown fox lazy dog cat bird tree river mountain coffee bread sugar apple orange
hello please thanks sorry yes music piano guitar summer winter rain snow sun moon star open close send call read
write run jump sing dance buy sell train plane ticket hotel street bridge garden kitchen table window""".split()
NAMES = "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina".split()
FOREIGN = "café naïve über señor Größe été ñandú smörgåsbord 東京 привет 🙂 🚀 €5 “quoted” déjà vu".split()
ONSETS = "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr qu sh sl sp st th tr wh x y".split()
VOWELS = "a e i o u a e i o u ai ea ee oo ou".split()
CODAS = ["", "", "", *"n r s t l m d k p ck ng nd st rt x".split()]
NUMBERS = 0.12  # share of numbers among the words of a text
PRINTABLE = "".join(map(chr, range(32, 127)))


def held_out(text: str) -> bool:
    """True for the eighth of all texts that training never sees."""
    return hashlib.sha256(text.encode()).digest()[0] < 32


def invented_word(rng: Random) -> str:
    """A pronounceable word of one to three syllables that may not exist."""
    count = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))


def number(rng: Random) -> str:
    """One to four digits, now and then a time, a price or a decimal."""
    kind = rng.random()
    if kind < 0.7:
        return "".join(rng.choice("0123456789") for _ in range(rng.choice((1, 1, 2, 2, 3, 4))))
    if kind < 0.8:
        return f"{rng.randrange(24)}:{rng.randrange(60):02d}"
    return f"${rng.randrange(100)}" if kind < 0.9 else f"{rng.randrange(30)}.{rng.randrange(10)}"


def phrase(rng: Random) -> str:
    """One to five words and numbers, sometimes dressed as a sentence."""
    words = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5))):
        kind = rng.random()
        if kind < NUMBERS:
            words.append(number(rng))
        elif kind < NUMBERS + 0.05:
            words.append(rng.choice(NAMES))
        else:
            words.append(rng.choice(WORDS) if rng.random() < 0.55 else invented_word(rng))
    text = " ".join(words)
    style = rng.random()
    if style < 0.2:
        text = text[0].upper() + text[1:] + rng.choice(".!?.")
    elif style < 0.27:
        text = text.replace(" ", ", ", 1)
    elif style < 0.31:
        text = text.upper()
    return text


def noise(rng: Random) -> str:
    """Letters or printable ASCII without sense."""
    alphabet = PRINTABLE if rng.random() < 0.4 else "abcdefghijklmnopqrstuvwxyz "
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 20)))


def everyday(rng: Random, longest: int = 32) -> str:
    """The text that evaluation draws: phrases of at most `longest` bytes."""
    while len((text := phrase(rng)).encode()) > longest:
        continue
    return text


def any_text(rng: Random) -> str:
    """The text that training draws: everyday phrases, noise, a little text outside ASCII."""
    kind = rng.random()
    if kind < 0.80:
        return everyday(rng)
    if kind < 0.95:
        return noise(rng)
    if kind < 0.97:
        return phrase(rng) + " " + phrase(rng)
    return " ".join((rng.choice(FOREIGN), everyday(rng, longest=16)))


def training_text(rng: Random) -> str:
    """`any_text` that is not held out."""
    while held_out(text := any_text(rng)):
        continue
    return text


def held_out_texts(seed: int, count: int) -> list[str]:
    """`count` different everyday texts that training never saw."""
    rng, found = Random(seed), {}
    while len(found) < count:
        text = everyday(rng)
        if held_out(text):
            found[text] = None
    return list(found)


# A turn is (bytes the user writes, the answer).
Turn = tuple[bytes, str]


def task_turns(transform: Transform) -> Callable[[Random], Turn]:
    """Turns of one task: how an adapter is trained."""

    def turn(rng: Random) -> Turn:
        text = training_text(rng)
        return text.encode(), transform(text)

    return turn


def base_turn(rng: Random) -> Turn:
    """A turn of base training: an untagged text to repeat, or a tagged one to transform."""
    text = training_text(rng)
    if rng.random() < 0.3:
        return text.encode(), echo(text)
    skill = rng.randrange(len(SKILLS))
    return TAGS[skill] + text.encode(), SKILLS[skill](text)


def prompt_ids(turns: Sequence[Turn], text: str) -> list[int]:
    """Token ids of a chat that ends where the assistant's answer to `text` begins."""
    ids = [BOS]
    for asked, answer in turns:
        ids += [USER, *asked, ASSISTANT, *answer.encode(), EOS]
    return [*ids, USER, *text.encode(), ASSISTANT]


def conversation(rng: Random, turn: Callable[[Random], Turn], length: int) -> tuple[list[int], list[int]]:
    """One row: `length` ids, and for each a 1 where it belongs to an answer."""
    ids, mask = [BOS], [0]
    while len(ids) < length:
        asked, answer = turn(rng)
        told = answer.encode()
        ids += [USER, *asked, ASSISTANT, *told, EOS]
        mask += [0] * (len(asked) + 2) + [1] * (len(told) + 1)
    return ids[:length], mask[:length]


def batch(rng: Random, turn: Callable[[Random], Turn], rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """[rows, length] int32 ids and float32 loss weights."""
    pairs = [conversation(rng, turn, length) for _ in range(rows)]
    return np.array([p[0] for p in pairs], np.int32), np.array([p[1] for p in pairs], np.float32)


def check_prompt(texts: Sequence[str]) -> list[int]:
    """Token ids of a conversation of the base's about these texts that ends where a verdict begins."""
    ids = [BOS]
    for text in texts:
        ids += [USER, *text.encode(), ASSISTANT, *echo(text).encode(), EOS]
    return [*ids, *INVOCATION]


def check_conversation(rng: Random, check: Check, room: int) -> list[str]:
    """A user's texts whose conversation has at most `room` tokens: clean, with one finding, or as they come."""
    kind, size, texts = rng.random(), 1 + len(INVOCATION), []
    while True:
        text = training_text(rng)
        if kind < 0.75 and check.finds(text):
            continue
        size += 2 * len(text.encode()) + 3
        if size > room:
            break
        texts.append(text)
    if 0.4 <= kind < 0.75 and texts:
        at = rng.randrange(len(texts))
        fits = len(texts[at].encode())
        while not check.finds(text := training_text(rng)) or len(text.encode()) > max(fits, 4):
            continue
        texts[at] = text
    return texts


def check_batch(rng: Random, check: Check, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """[rows, length] int32 ids and float32 loss weights of conversations that a check judges."""
    most = length - max(len(verdict.encode()) for verdict in check.verdicts) - 9  # and what a longer finding adds
    ids, weights = np.full((rows, length), PAD, np.int32), np.zeros((rows, length), np.float32)
    for row in range(rows):
        while not (texts := check_conversation(rng, check, round(most * rng.uniform(0.2, 1.0)))):
            continue
        prompt, answer = check_prompt(texts), [*check.verdict(texts).encode(), EOS]
        end = len(prompt) + len(answer)
        ids[row, :end] = prompt + answer
        weights[row, len(prompt) : end] = 1
    return ids, weights


def held_out_conversations(seed: int, count: int, check: Check) -> list[list[str]]:
    """`count` conversations of one to six held-out texts, every other one with a finding."""
    texts = held_out_texts(seed, 8 * count)
    clean = [text for text in texts if not check.finds(text)]
    found = [text for text in texts if check.finds(text)]
    made = []
    for i in range(count):
        talk = [clean[(7 * i + j) % len(clean)] for j in range(1 + i % 6)]
        if i // 6 % 2:
            talk[i % len(talk)] = found[i % len(found)]
        made.append(talk)
    return made
