"""The one stream: a request's token events in, `Delta`s out.

    answer = Answer(request, tokenizer, eos_ids)
    deltas, stops = answer.push(events)

gRPC, `LLM` and the console only convert the deltas.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from jlora.errors import Unavailable
from jlora.serve.output import TextDelta, TextStream
from jlora.serve.tokenizer import Tokenizer
from jlora.types import Delta, Request, Timing, TokenEvent, TokenLogprob, Usage


class Stop(NamedTuple):
    """Completion `index` matched a stop string after `outputs` tokens; the front passes this on to `Replica.stop`."""

    index: int
    outputs: int


class Answer:
    """Turns one request's token events into deltas. Not thread-safe."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, eos_ids: Collection[int]) -> None:
        """`request` as validated; without a `tokenizer` the deltas have no text."""
        self._completions = [
            _Completion(i, TextStream(tokenizer, request.sampling, eos_ids) if tokenizer else None)
            for i in range(request.sampling.n)
        ]
        self._ends: list[Delta] = []

    @property
    def ended(self) -> bool:
        """Whether every completion has ended."""
        return len(self._ends) == len(self._completions)

    @property
    def aborted(self) -> bool:
        """Whether a completion has ended with finish reason "abort"."""
        return any(end.finish_reason == "abort" for end in self._ends)

    def push(self, events: Iterable[TokenEvent]) -> tuple[list[Delta], list[Stop]]:
        """What `events` add, at most one delta per completion, and the completions that the engine must stop.

        Raises:
            Unavailable: the engine stopped before the request ended.
        """
        by_index: dict[int, list[TokenEvent]] = {}
        for event in events:
            by_index.setdefault(event.index, []).append(event)
        deltas, stops = [], []
        for index, group in by_index.items():
            completion = self._completions[index]
            delta, stopped = completion.push(group)
            if stopped:
                stops.append(Stop(index, completion.tokens))
            if delta != Delta(index):
                deltas.append(delta)
        self._ends += [delta for delta in deltas if delta.finish_reason]
        return deltas, stops

    def totals(self) -> tuple[Usage, Timing]:
        """Usage and timing of the whole request, once it has ended.

        The prompt counts once, output tokens add up. Timing is that of the completion with the first
        token; its tpot is the mean over the completions that have one.
        """
        usages = [end.usage for end in self._ends if end.usage]
        timings = [end.timing for end in self._ends if end.timing]
        first = min(timings, key=lambda t: t.ttft or math.inf)  # a completion aborted early has no first token
        gaps = [t.tpot for t in timings if t.tpot > 0]
        return (
            replace(usages[0], completion_tokens=sum(u.completion_tokens for u in usages)),
            replace(first, tpot=sum(gaps) / len(gaps) if gaps else 0.0),
        )


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one completion, in order, as one."""
    logprobs = tuple(chain.from_iterable(d.logprobs or () for d in deltas))
    return replace(
        deltas[-1],
        text="".join(d.text for d in deltas),
        token_ids=tuple(chain.from_iterable(d.token_ids for d in deltas)),
        logprobs=logprobs or None,
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
    )


class _Completion:
    """One completion: its text, and how many tokens the client has seen."""

    def __init__(self, index: int, text: TextStream | None) -> None:
        self.index = index
        self.tokens = 0
        self._text = text

    def push(self, events: Sequence[TokenEvent]) -> tuple[Delta, bool]:
        """What `events` add, and whether the engine must stop this completion now."""
        texts: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        stopped = False
        for event in events:
            shown, visible = self._show(event)
            texts.append(shown.text)
            stopped |= shown.stopped
            if visible and event.token_id is not None:
                tokens.append(event.token_id)
                logprobs += [] if event.logprob is None else [event.logprob]
        self.tokens += len(tokens)
        delta = Delta(
            self.index,
            "".join(texts),
            tuple(tokens),
            tuple(logprobs) or None,
            next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None),
        )
        return (self._ended(delta, events[-1], shown) if shown.finish_reason else delta), stopped

    def _show(self, event: TokenEvent) -> tuple[TextDelta, bool]:
        """The event's text, and whether its token is shown: tokens after a stop string are not."""
        if self._text is None:
            return TextDelta("", finish_reason=event.finish_reason), True
        late = self._text.stopped
        return self._text.push(event), not late

    def _ended(self, delta: Delta, last: TokenEvent, shown: TextDelta) -> Delta:
        if last.usage is None or last.timing is None:
            raise Unavailable("the engine stopped before the request ended; its log says why")
        # The engine may be a step past a stop string; usage counts the tokens that the client sees.
        usage = replace(last.usage, completion_tokens=self.tokens)
        return replace(delta, finish_reason=shown.finish_reason, usage=usage, timing=last.timing)
