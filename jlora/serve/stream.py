"""The one stream: a request's token events in, `Delta`s out.

    answer = Answer(request, tokenizer, eos_ids)
    deltas, stops = answer.push(events)

gRPC, `LLM` and the console only convert the deltas.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from jlora.errors import Unavailable
from jlora.serve.output import MOST_BEFORE, Detokenizer, StopFinder
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Delta, Request, SamplingParams, Timing, TokenEvent, TokenLogprob, Usage

SPECIALS = 64  # at a prompt's end, behind which its text is looked for


class Answer:
    """Turns a validated request's token events into deltas, without text if there is no tokenizer. Not thread-safe."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, eos_ids: Collection[int]) -> None:
        prompt = () if request.chat else request.prompt
        eos, before = frozenset(eos_ids), [] if tokenizer is None else _before(prompt, tokenizer)
        made = [None if tokenizer is None else Detokenizer(tokenizer, before) for _ in range(request.sampling.n)]
        self._completions = [_Completion(i, request.sampling, one, eos) for i, one in enumerate(made)]
        self._ends: list[Delta] = []

    @property
    def ended(self) -> bool:
        return not self.running

    @property
    def running(self) -> int:
        """Completions that have not ended."""
        return len(self._completions) - len(self._ends)

    @property
    def tokens(self) -> int:
        """Output tokens of all completions."""
        return sum(completion.tokens for completion in self._completions)

    @property
    def longest(self) -> int:
        """Output tokens of the longest completion."""
        return max(completion.tokens for completion in self._completions)

    @property
    def aborted(self) -> bool:
        return any(end.finish_reason == "abort" for end in self._ends)

    def push(self, events: Iterable[TokenEvent]) -> tuple[list[Delta], list[tuple[int, int]]]:
        """What `events` add, at most one delta per completion.

        Also returns (index, outputs) of each completion that matched a stop string, for `Replica.stop`.
        """
        touched: dict[int, None] = {}
        stops = []
        for event in events:
            touched[event.index] = None
            completion = self._completions[event.index]
            if completion.add(event):
                stops.append((event.index, completion.tokens))
        deltas = [delta for i in touched if (delta := self._completions[i].take()) is not None]
        self._ends += [delta for delta in deltas if delta.finish_reason is not None]
        return deltas, stops

    def totals(self) -> tuple[Usage, Timing]:
        """Usage and timing of the whole request, once it has ended.

        The prompt counts once, output tokens add up. Timing is that of the completion with the first
        token; its tpot is the mean over the completions that have one.
        """
        ends = sorted(self._ends, key=lambda end: end.index)  # the prompt of completion 0 is the one computed
        usages = [end.usage for end in ends if end.usage]
        timings = [end.timing for end in ends if end.timing]
        first = min(timings, key=lambda t: t.ttft or math.inf)  # a completion aborted early has no first token
        gaps = [t.tpot for t in timings if t.tpot > 0]
        return (
            replace(usages[0], completion_tokens=sum(u.completion_tokens for u in usages)),
            replace(first, tpot=sum(gaps) / len(gaps) if gaps else 0.0),
        )


class Offsets:
    """Where each token begins in a text: one without text where the next does, those of one character together.

    The text goes on from that of `prompt`, and its first token begins at `start`. Without a tokenizer it is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] = (), start: int = 0) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, _before(prompt, tokenizer))
        self._at = start

    def of(self, ids: Iterable[int]) -> list[int]:
        """Those of the next tokens."""
        offsets: list[int] = []
        for token in ids:
            offsets.append(self._at)
            if self._detokenizer is not None:
                self._at += len(self._detokenizer.push(token))
        return offsets


def _before(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The last tokens of the prompt's text, which the answer's goes on from; none where a text begins."""
    return [token for token in prompt[-SPECIALS:] if not tokenizer.is_silent(token)][-MOST_BEFORE:]


def joined(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """One delta for each completion, in order of index."""
    parts: dict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        parts[delta.index].append(delta)
    return (_whole(parts[index]) for index in sorted(parts))


def _whole(deltas: Sequence[Delta]) -> Delta:
    logprobs = tuple(chain.from_iterable(d.logprobs or () for d in deltas))
    return replace(
        deltas[-1],
        text="".join(d.text for d in deltas),
        token_ids=tuple(chain.from_iterable(d.token_ids for d in deltas)),
        logprobs=logprobs or None,
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
    )


class _Completion:
    """One completion: its text, and what is new since the last `take`."""

    def __init__(
        self, index: int, sampling: SamplingParams, detokenizer: Detokenizer | None, eos_ids: Collection[int]
    ) -> None:
        self.tokens = 0  # that the client sees
        self._index = index
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._detokenizer = detokenizer
        self._finder = StopFinder(sampling.stop)
        self._stopped = False  # by a stop string: later tokens are neither shown nor counted
        self._clear()

    def _clear(self) -> None:
        self._shown = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._end: TokenEvent | None = None

    def add(self, event: TokenEvent) -> bool:
        """Adds one event; returns whether a stop string ends the completion while the engine still runs it."""
        late = self._stopped
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if event.token_id is not None and not late:
            self.tokens += 1
            self._ids.append(event.token_id)
            if event.logprob is not None:
                self._logprobs.append(event.logprob)
        if self._detokenizer is not None and not late:
            self._shown += self._text(event, self._detokenizer)
        if event.finish_reason is not None:  # "stop" even if the stop string is in the last token allowed
            self._end = replace(event, finish_reason="stop" if self._stopped else event.finish_reason)
        return self._stopped and not late and self._end is None

    def _text(self, event: TokenEvent, detokenizer: Detokenizer) -> str:
        sampling, final = self._sampling, event.finish_reason is not None
        text = ""
        if event.token_id is not None:
            ended = event.finish_reason == "stop"
            by_id = ended and event.token_id in sampling.stop_token_ids
            hidden = not sampling.include_stop if by_id else ended and event.token_id in self._eos_ids
            if not hidden:
                text = detokenizer.push(event.token_id, special=by_id)
        if final:
            text += detokenizer.flush()
        text, stop = self._finder.push(text, matching=self.tokens >= sampling.min_tokens)
        if stop is not None:
            self._stopped = True
            return text + stop if sampling.include_stop else text
        return text + self._finder.flush() if final else text

    def take(self) -> Delta | None:
        reason = usage = timing = None
        if self._end is not None:
            reason, usage, timing = self._end.finish_reason, self._end.usage, self._end.timing
            if self._end.error is not None:
                raise self._end.error
            if usage is None or timing is None:
                raise Unavailable("the engine stopped before the request ended; its log says why")
            # The engine may be a step past a stop string; usage counts the tokens that the client sees.
            usage = replace(usage, completion_tokens=self.tokens)
        elif not (self._ids or self._shown or self._prompt_logprobs):
            return None
        ids, logprobs = tuple(self._ids), tuple(self._logprobs) or None
        delta = Delta(self._index, self._shown, ids, logprobs, self._prompt_logprobs, reason, usage, timing)
        self._clear()
        return delta
