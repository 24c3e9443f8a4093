"""Requests to a replica in this process, and what came of each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from jlora.engine.local import LocalReplica
from jlora.layout import PoolLayout, smallest_block_tokens
from jlora.model.spec import ModelSpec
from jlora.types import Request, Timing, TokenEvent, TokenLogprob

TIMEOUT_S = 600


@dataclass(slots=True)
class Answer:
    """A sink: tokens so far, and how the request ended."""

    handle: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    timing: Timing | None = None
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.token_id is not None:
                self.tokens.append(event.token_id)
            if event.logprob is not None:
                self.logprobs.append(event.logprob)
            if event.finish_reason is not None or event.error is not None:
                self.timing, self.error = event.timing, event.error
                self.ended.set()

    def submitted(self, outcome: Future[int]) -> None:
        """Takes in its handle, or why it was refused."""
        error = outcome.exception()
        if error is None:
            self.handle = outcome.result()
        else:
            self.error = error
            self.ended.set()

    def wait(self) -> None:
        """Until it has ended, well or not."""
        assert self.ended.wait(TIMEOUT_S), "no answer"

    def end(self) -> Timing:
        """Waits for it. Raises what the request has failed with."""
        self.wait()
        if self.timing is None:
            raise self.error or RuntimeError("it ended without a timing")
        return self.timing


def ask(replica: LocalReplica, request: Request) -> Answer:
    """Submits a request."""
    answer = Answer()
    answer.handle = replica.submit(request, answer).result(TIMEOUT_S)
    return answer


def send(replica: LocalReplica, request: Request) -> Answer:
    """Submits a request, and does not wait until the engine has taken it, which it does between two steps."""
    answer = Answer()
    replica.submit(request, answer).add_done_callback(answer.submitted)
    return answer


def blocks_of(spec: ModelSpec, rank: int, targets: Sequence[str]) -> int:
    """Of an adapter, in the smallest blocks of at least 16 tokens."""
    layout = PoolLayout.of(spec, 2, smallest_block_tokens(spec, 16))
    return sum(-(-rank // layout.units[name].per_block) for name in targets)
