"""Plays pipelines of a base and its adapters over one conversation to a simulated replica. No jax.

A pipeline has stages. All requests of a stage read the conversation so far, at the same time. The
next stage begins when the last of them is answered, and the answers join the conversation.

    x                          the context
    base (x)            -> y
    check 1 (x y)       -> r   a check ends with its invocation
    base (x y r)        -> z
    checks 1..n (x y r z)      all at once
    base (x y r z r1..rn)

In a trace (`jlora.sim.trace`) a user asks one thing at a time; a pipeline forks and joins. Activated
LoRA was measured with such pipelines (arXiv 2512.17910).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jlora.sim.device import answer
from jlora.sim.replica import Replica, request_for
from jlora.types import SamplingParams, Timing, TokenEvent, Usage

Asked = tuple[int | None, ...]  # the requests of a stage: adapters by index, None is the base
REQUESTS = 12  # bits of a request's number within its pipeline


def base_and_checks(adapters: int) -> tuple[Asked, ...]:
    """The stages above, for a number of adapters."""
    return (None,), (0,), (None,), tuple(range(adapters)), (None,)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of every pipeline; lengths in tokens.

    Attributes:
        context: at the start.
        activated: the adapters are activated LoRAs, else plain ones.
        base_tokens, check_tokens: of an answer of the base, and of an adapter.
        invocation: appended to the conversation for an adapter's request only.
    """

    context: int
    stages: tuple[Asked, ...]
    activated: bool
    base_tokens: int = 256
    check_tokens: int = 16
    invocation: int = 4


@dataclass(frozen=True, slots=True)
class Answered:
    """One answered request. `end_to_end`: seconds from the start of its stage to its last token."""

    pipeline: int
    stage: int
    adapter: int | None
    usage: Usage
    timing: Timing
    end_to_end: float


@dataclass(slots=True)
class _Talk:
    """A running pipeline: its conversation, and the start and open requests of its stage."""

    number: int
    tokens: list[int]
    stage: int = -1
    asked: int = 0
    began: float = 0.0
    open: dict[str, tuple[int | None, int]] = field(default_factory=dict)  # request -> adapter, seed
    said: dict[str, Sequence[int]] = field(default_factory=dict)


class Pipelines:
    """Plays pipelines of one shape to a replica without other requests.

    Args:
        starts: start of each, in seconds, ascending; all 0 for one batch.

    Attributes:
        answers: in order of completion.
        peak: most device blocks that KV held at once, with history.
        seconds: of each pipeline, from its start to its last answer, in order of completion.
    """

    def __init__(self, replica: Replica, shape: Shape, starts: Sequence[float]):
        self.answers: list[Answered] = []
        self.seconds: list[float] = []
        self.peak = 0
        self._replica = replica
        self._shape = shape
        while replica.manager.flying:  # copies of the initial adapters
            replica.idle(math.inf)
        now = replica.clock.now
        self._starts = [now + start for start in starts]
        self._coming = deque(range(len(starts)))
        self._talks: dict[str, _Talk] = {}  # by open request

    def play(self) -> None:
        """Plays until every request is answered. Raises ResourceExhausted if the pool can never hold one."""
        replica = self._replica
        while self._coming or self._talks:
            wake = self._begin()
            if replica.busy:
                self._receive(replica.step(wake))
            else:
                replica.idle(wake)
            device = replica.manager.device
            self.peak = max(self.peak, device.history_kv + device.running_kv)

    # -- inside -----------------------------------------------------------------------------

    def _begin(self) -> float:
        """Starts the pipelines that are due. Returns when the next one is."""
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
        """Adds a stage's answers to the conversation, in order of requests, and starts the next stage."""
        now = self._replica.clock.now
        for name in sorted(talk.said, key=lambda name: int(name.partition(".")[2])):
            talk.tokens.extend(talk.said[name])
        talk.said.clear()
        if talk.stage + 1 < len(self._shape.stages):
            self._ask(talk, now)
        else:
            self.seconds.append(now - self._starts[talk.number])
