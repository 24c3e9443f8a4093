"""The requests of clients: they share prompts, go on from earlier answers, and some come from another replica."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from jlora.sim.world.device import VOCAB
from jlora.sim.world.disk import INVOCATION
from jlora.types import Done, Request, SamplingParams

TENANTS = ("", "a", "b")
NAMES = tuple(f"lora{i}" for i in range(6))
ACTIVATED = NAMES[-2:]
KEPT = 12  # answers that later prompts go on from
LONGEST = 34  # tokens of a prompt
FIRST_WORD = 7  # before it are the tokens that end an answer, or invoke an adapter


class Asked:
    """Draws requests."""

    def __init__(self, draw: random.Random, now: Callable[[], float]):
        self._draw = draw
        self._now = now
        self._texts = [self.words(40) for _ in range(3)]  # what prompts begin with
        self._count = 0

    def words(self, count: int) -> list[int]:
        """So many tokens of a text."""
        return [self._draw.randrange(FIRST_WORD, VOCAB) for _ in range(count)]

    def answered(self, text: Sequence[int]) -> None:
        """A prompt with its answer: later requests go on from it."""
        self._texts.append(list(text))
        del self._texts[3:-KEPT]

    def request(self, name: str | None, taken: Sequence[str] = ()) -> Request:
        """A request for an adapter; its id is one of those that are `taken`, now and then."""
        draw = self._draw
        self._count += 1
        prompt, rest = self._prompt(name)
        sampling = self._sampling()
        again = taken and draw.random() < 0.03
        request = Request(
            id=draw.choice(taken) if again else f"r{self._count}",
            prompt=tuple(prompt[-LONGEST:]),
            sampling=sampling,
            adapter=name,
            priority=draw.choice((0, 0, 0, 1, -1)),
            bypass_prefix_cache=draw.random() < 0.05,
            tenant=draw.choice(TENANTS),
            deadline=self._now() + 2 * draw.random() if draw.random() < 0.1 else None,
            cache_salt=draw.choice(("", "", "s")),
        )
        return self._moved(request, rest) if draw.random() < 0.2 else request

    def _prompt(self, name: str | None) -> tuple[list[int], list[int]]:
        """A prompt, and how the text that it is of goes on."""
        draw = self._draw
        if name in ACTIVATED and draw.random() < 0.95:  # few places, so that activated prompts meet, too
            prompt = self._texts[0][:24]
            for at in draw.choice(((0,), (3,), (5,), (6,), (3, 14))):
                prompt[at:at] = INVOCATION
            return prompt, self._texts[0][24:]
        text = draw.choice(self._texts)
        length, more = draw.randint(1, len(text)), draw.choice((0, 0, 1, 4))
        return text[:length] + self.words(more), text[length:]

    def _sampling(self) -> SamplingParams:
        draw = self._draw
        most = None if draw.random() < 0.03 else draw.randint(1, 14)
        return SamplingParams(
            seed=draw.randrange(1 << 32),
            n=draw.choice((1, 1, 1, 1, 2, 3)),
            max_tokens=most,
            min_tokens=draw.randint(0, most or 1) if draw.random() < 0.2 else 0,
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=tuple(self.words(2)) if draw.random() < 0.2 else (),
            prompt_logprobs=draw.choice((0, 2)) if draw.random() < 0.1 else None,
        )

    def _moved(self, request: Request, rest: Sequence[int]) -> Request:
        """The request as another replica gives it up, perhaps with a part of its answers."""
        draw, sampling = self._draw, request.sampling
        waited = draw.choice((0.0, 0.5 * draw.random()))
        if sampling.max_tokens is None or draw.random() < 0.2:
            return replace(request, waited=waited)
        done = tuple(self._done(sampling, rest) for _ in range(sampling.n - 1))
        # The last completion has not ended, or there were nothing to ask for.
        return replace(request, waited=waited, done=(*done, replace(self._done(sampling, rest), ended=False)))

    def _done(self, sampling: SamplingParams, rest: Sequence[int]) -> Done:
        draw, most = self._draw, sampling.max_tokens or 1
        text = rest if draw.random() < 0.5 else self.words(most)
        tokens = [token for token in text if token >= FIRST_WORD and token not in sampling.stop_token_ids]
        return Done(tuple(tokens[: draw.randrange(most)]), draw.random() < 0.2)
