"""Deltas as OpenAI's JSON: whole answers, and the pieces of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jlora.serve.stream import Offsets
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Delta, Timing, TokenLogprob, Usage

Totals = tuple[Usage, Timing]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The texts of single tokens; `by_id` says `token_id:N` instead."""

    tokenizer: Tokenizer | None
    by_id: bool

    def text(self, token_id: int) -> str:
        if self.by_id or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def name(self, token_id: int) -> str:
        """Its text; of a part of a character its bytes, as OpenAI writes them: the texts of two would be alike."""
        text = self.text(token_id)
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self.raw(token_id)) if "\ufffd" in text else text

    def raw(self, token_id: int) -> bytes:
        """The bytes of a token; a character may need several tokens."""
        known = None if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return self.text(token_id).encode() if known is None else known


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body says about the answer's form.

    Attributes:
        prompts: the token ids of every prompt.
        echoes: the text that each completion begins with; empty without `echo`.
        bare: the client wants the echo only: the one token that the engine draws is left out.
        counts: every piece of a stream has the usage so far of its own completion.
    """

    id: str
    model: str
    n: int
    ids: bool
    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str] = ()
    bare: bool = False
    counts: bool = False


class Answers(ABC):
    """The answers to one body. `place` is the number of a prompt, in the body's order."""

    object: str
    part: str  # the object of a stream's pieces

    def __init__(self, asked: Asked, tokens: Tokens):
        self.asked = asked
        self.tokens = tokens
        self._created = int(time.time())
        self._begun: set[int] = set()  # choices with a piece
        self._drawn: Counter[int] = Counter()  # tokens of a choice so far

    @abstractmethod
    def choice(self, place: int, delta: Delta, piece: bool, first: bool) -> dict[str, Any]:
        """The delta as a choice; a `piece` of a stream, or the `first` of that choice, as is a whole one."""

    def whole(self, deltas: Sequence[Sequence[Delta]], totals: Sequence[Totals]) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        choices = [self._choice(i, delta, False) for i, several in enumerate(deltas) for delta in _scored(several)]
        return {**self._head(self.object), "choices": choices, **self._summed(totals)}

    def piece(self, place: int, delta: Delta) -> dict[str, Any]:
        """One event of a stream."""
        piece = {**self._head(self.part), "choices": [self._choice(place, delta, True)]}
        if self.asked.counts:
            index, prompt = self.index(place, delta), len(self.asked.prompts[place])
            self._drawn[index] += 0 if self.asked.bare else len(delta.token_ids)
            piece["usage"] = counted(prompt, self._drawn[index])
        return piece

    def last(self, totals: Sequence[Totals]) -> dict[str, Any]:
        """The event after the last choice, if the client asked for usage."""
        return {**self._head(self.part), "choices": [], **self._summed(totals)}

    def index(self, place: int, delta: Delta) -> int:
        """The number of a choice: n of them for every prompt."""
        return place * self.asked.n + delta.index

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.asked.id, "object": kind, "created": self._created, "model": self.asked.model}

    def _summed(self, totals: Sequence[Totals]) -> dict[str, Any]:
        if self.asked.bare:
            totals = [(replace(usage, completion_tokens=0), timing) for usage, timing in totals]
        return summed(totals)

    def _choice(self, place: int, delta: Delta, piece: bool) -> dict[str, Any]:
        if self.asked.bare:
            scored, ended = delta.logprobs is not None, delta.finish_reason is not None
            delta = replace(delta, text="", token_ids=(), logprobs=() if scored else None,
                            finish_reason="length" if ended else None)  # fmt: skip
        index = self.index(place, delta)
        first = index not in self._begun
        self._begun.add(index)
        made = {
            "index": index,
            **self.choice(place, delta, piece, first),
            "finish_reason": delta.finish_reason,
        }
        if self.asked.ids:
            made["token_ids"] = delta.token_ids
        if self.asked.ids and first:
            made["prompt_token_ids"] = self.asked.prompts[place]
        if delta.prompt_logprobs is not None and not piece:
            made["prompt_logprobs"] = [self._by_id(entry) for entry in delta.prompt_logprobs]
        return made

    def _by_id(self, entry: TokenLogprob | None) -> dict[str, Any] | None:
        """vLLM's form: token id -> its logprob and text."""
        if entry is None:
            return None
        pairs = dict([*entry.top, (entry.token_id, entry.logprob)])
        return {str(t): {"logprob": p, "decoded_token": self.tokens.text(t)} for t, p in pairs.items()}


class Completions(Answers):
    """`/v1/completions`."""

    object = part = "text_completion"

    def __init__(self, asked: Asked, tokens: Tokens):
        super().__init__(asked, tokens)
        self._shown = Counter[int]()  # characters of a choice so far
        self._offsets: dict[int, Offsets] = {}  # of a choice's tokens, without those of an echo

    def choice(self, place: int, delta: Delta, piece: bool, first: bool) -> dict[str, Any]:
        text = (self.asked.echoes[place] if self.asked.echoes and first else "") + delta.text
        self._shown[self.index(place, delta)] += len(text)
        return {"text": text, "logprobs": self._logprobs(place, delta)}

    def _logprobs(self, place: int, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        echoed = (delta.prompt_logprobs or ()) if self.asked.echoes else ()
        entries: list[TokenLogprob | None] = [*echoed, *delta.logprobs]
        ids = [entry.token_id if entry else self.asked.prompts[place][0] for entry in entries]
        offsets = self._begins(place, delta, ids[: len(echoed)], ids[len(echoed) :])
        return {
            "tokens": [self.tokens.name(i) for i in ids],
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [entry and self._likely(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _begins(self, place: int, delta: Delta, echoed: Sequence[int], ids: Sequence[int]) -> list[int]:
        """Where the tokens begin in the choice's text; those that a stop has cut off it, at its end."""
        index, tokenizer = self.index(place, delta), self.tokens.tokenizer
        echo = len(self.asked.echoes[place]) if self.asked.echoes else 0
        if index not in self._offsets:
            self._offsets[index] = Offsets(tokenizer, self.asked.prompts[place], echo)
        offsets = [*(min(at, echo) for at in Offsets(tokenizer).of(echoed)), *self._offsets[index].of(ids)]
        return [min(at, self._shown[index]) for at in offsets] if delta.finish_reason else offsets

    def _likely(self, entry: TokenLogprob) -> dict[str, float]:
        return {self.tokens.name(t): p for t, p in [*reversed(entry.top), (entry.token_id, entry.logprob)]}


class ChatAnswers(Answers):
    """`/v1/chat/completions`. It has one prompt, so what vLLM tells of that stands beside the choices."""

    object = "chat.completion"
    part = "chat.completion.chunk"

    def whole(self, deltas: Sequence[Sequence[Delta]], totals: Sequence[Totals]) -> dict[str, Any]:
        made = super().whole(deltas, totals)
        for choice in made["choices"][:1]:
            made |= {name: choice[name] for name in ("prompt_token_ids", "prompt_logprobs") if name in choice}
        return made

    def piece(self, place: int, delta: Delta) -> dict[str, Any]:
        made = super().piece(place, delta)
        ids = made["choices"][0].pop("prompt_token_ids", None)
        return made if ids is None else {**made, "prompt_token_ids": ids}

    def choice(self, place: int, delta: Delta, piece: bool, first: bool) -> dict[str, Any]:
        logprobs = None if delta.logprobs is None else {"content": [self._token(entry) for entry in delta.logprobs]}
        role = {"role": "assistant"} if first else {}
        return {"delta" if piece else "message": {**role, "content": delta.text}, "logprobs": logprobs}

    def _token(self, entry: TokenLogprob) -> dict[str, Any]:
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": [self._one(*pair) for pair in entry.top]}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.tokens.text(token_id), "logprob": logprob, "bytes": list(self.tokens.raw(token_id))}


def _scored(several: Sequence[Delta]) -> Iterable[Delta]:
    """The completions of a prompt, each with the prompt's log-probabilities, which the first one brings."""
    return (replace(delta, prompt_logprobs=several[0].prompt_logprobs) for delta in several)


def counted(prompt: int, output: int) -> dict[str, Any]:
    """So many tokens, in OpenAI's form."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def summed(totals: Sequence[Totals]) -> dict[str, Any]:
    """Usage of all prompts together, and the timing of the one with the first token."""
    usages = [usage for usage, _ in totals]
    prompt, output = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
    timing = min((timing for _, timing in totals), key=lambda t: t.ttft or float("inf"))
    return {
        "usage": {
            **counted(prompt, output),
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
        },
        "timing": timing.fields(),
    }
