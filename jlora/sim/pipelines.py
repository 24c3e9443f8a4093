"""Pipelines of a base and its adapters over one conversation, played to a simulated replica. No jax.

A pipeline is a number of stages. Those who are asked in a stage all read the conversation so far,
at the same time; the next stage begins when the last of them has answered, and what they have said
is in the conversation then.

    x                          so many tokens
    base (x)            -> y
    check 1 (x y)       -> r   it reads along, and invokes itself behind what it reads
    base (x y r)        -> z
    checks 1..n (x y r z)      all at once
    base (x y r z r1..rn)

A trace (`jlora.sim.trace`) has users who ask one thing at a time; this has a fork and a join, and
is what activated LoRA was measured with (arXiv 2512.17910).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jlora.cache.tree import KV
from jlora.sim.device import answer
from jlora.sim.replica import Replica, request_for
from jlora.types import SamplingParams, Timing, TokenEvent, Usage

Asked = tuple[int | None, ...]  # of one stage: adapters by index, None the base
REQUESTS = 12  # bits of a request's number within its pipeline


def base_and_checks(adapters: int) -> tuple[Asked, ...]:
    """The stages above, for so many adapters."""
    return (None,), (0,), (None,), tuple(range(adapters)), (None,)


@dataclass(frozen=True, slots=True)
class Shape:
    """What every pipeline is like; lengths in tokens.

    Attributes:
        context: with which it begins.
        activated: the adapters are activated LoRAs; else the same as plain ones.
        base_tokens, check_tokens: of an answer of the base, and of an adapter.
        invocation: what an adapter is asked with, behind the conversation and no part of it.
    """

    context: int
    stages: tuple[Asked, ...]
    activated: bool
    base_tokens: int = 256
    check_tokens: int = 16
    invocation: int = 4


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as it went. `end_to_end`: seconds from its stage's begin to its last token."""

    pipeline: int
    stage: int
    adapter: int | None
    usage: Usage
    timing: Timing
    end_to_end: float


@dataclass(slots=True)
class _Talk:
    """A pipeline under way: its conversation, and of its stage when it began and who has not answered."""

    number: int
    tokens: list[int]
    stage: int = -1
    asked: int = 0
    began: float = 0.0
    open: dict[str, tuple[int | None, int]] = field(default_factory=dict)  # request -> adapter, seed
    said: dict[str, Sequence[int]] = field(default_factory=dict)


class Pipelines:
    """Plays pipelines of one shape to a replica that nothing else uses.

    Args:
        starts: when each begins, in seconds from the beginning, ascending; all 0: one batch.

    Attributes:
        answers: in the order in which they were complete.
        peak: the most device blocks that KV held at once, history included.
        seconds: of each pipeline, from its start to its last answer, in the order of their ends.
    """

    def __init__(self, replica: Replica, shape: Shape, starts: Sequence[float]):
        self.answers: list[Answered] = []
        self.seconds: list[float] = []
        self.peak = 0
        self._replica = replica
        self._shape = shape
        while replica.manager.flying:  # the adapters that it was started with
            replica.idle(math.inf)
        now = replica.clock.now
        self._starts = [now + start for start in starts]
        self._coming = deque(range(len(starts)))
        self._talks: dict[str, _Talk] = {}  # by open request

    def play(self) -> None:
        """Until all is answered. Raises ResourceExhausted if the pool can never hold a request."""
        replica = self._replica
        while self._coming or self._talks:
            wake = self._begin()
            if replica.busy:
                self._receive(replica.step(wake))
            else:
                replica.idle(wake)
            self.peak = max(self.peak, replica.manager.cells.device.used[KV])

    # -- inside -----------------------------------------------------------------------------

    def _begin(self) -> float:
        """Begins the pipelines that are due; when the next one is."""
        while self._coming:
            start = self._starts[self._coming[0]]
            if start > self._replica.clock.now:
                return start
            number = self._coming.popleft()
            opening = answer(-1 - number, 0, self._shape.context)  # a seed that no request has
            self._ask(_Talk(number, list(opening)), start)
        return math.inf

    def _ask(self, talk: _Talk, now: float) -> None:
        """Sends the next stage's requests."""
        shape = self._shape
        talk.stage, talk.began = talk.stage + 1, now
        said = tuple(talk.tokens)
        for adapter in shape.stages[talk.stage]:
            talk.asked += 1
            name, seed = f"{talk.number}.{talk.asked}", (talk.number << REQUESTS) + talk.asked
            talk.open[name] = adapter, seed
            self._talks[name] = talk
            prompt, activation, tokens = said, None, shape.base_tokens
            if adapter is not None:
                prompt = (*said, *answer(-(seed << REQUESTS), 0, shape.invocation))
                activation, tokens = len(said) if shape.activated else None, shape.check_tokens
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=seed)
            self._replica.submit(request_for(name, prompt, adapter, activation, sampling=sampling), now)

    def _receive(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.usage is None or event.timing is None:
                continue
            talk = self._talks.pop(event.request_id)
            adapter, seed = talk.open.pop(event.request_id)
            taken = self._replica.clock.now - talk.began
            self.answers.append(Answered(talk.number, talk.stage, adapter, event.usage, event.timing, taken))
            talk.said[event.request_id] = answer(seed, event.usage.prompt_tokens, event.usage.completion_tokens)
            if not talk.open:
                self._go_on(talk)

    def _go_on(self, talk: _Talk) -> None:
        """A stage is answered: what was said, in the order of asking, joins the conversation."""
        now = self._replica.clock.now
        for name in sorted(talk.said, key=lambda name: int(name.partition(".")[2])):
            talk.tokens.extend(talk.said[name])
        talk.said.clear()
        if talk.stage + 1 < len(self._shape.stages):
            self._ask(talk, now)
        else:
            self.seconds.append(now - self._starts[talk.number])
