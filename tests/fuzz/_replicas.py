"""A replica's messages, as a router reads them: the router's own links and dispatcher over a scripted stream.

The router has requests under way. Whatever the replica sends, each of them is live or has ended once, its client's
tokens are in order, and what the client has been given goes through the front's own books.
"""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jlora.cluster import attach, wire
from jlora.cluster.attach import Attached, Terms
from jlora.cluster.dispatch import Dispatcher
from jlora.cluster.proto import link_pb2 as link
from jlora.cluster.requests import Broken
from jlora.cluster.routing.least_loaded import LeastLoaded
from jlora.errors import FailedPrecondition, JloraError, Unavailable
from jlora.serve.observed import Ended, Observed
from jlora.serve.stream import Answer
from jlora.types import Request, SamplingParams, Timing, TokenEvent, TokenLogprob, Usage
from tests.cluster import _port as port
from tests.cluster._links import INFO, VOCAB, FakeDirectory
from tests.fuzz._cluster import changing, joined, split
from tests.fuzz._engine import Target
from tests.fuzz._fronts import run

REQUESTS = (
    Request("a", (1, 2, 3), SamplingParams(max_tokens=4, seed=1)),
    Request("b", (1, 2), SamplingParams(max_tokens=4, n=2, logprobs=1, prompt_logprobs=0, seed=2), tenant="t"),
)


@dataclass
class _Client:
    """One request's front."""

    request: Request
    submitted: Future[int] = field(default_factory=Future)
    events: list[TokenEvent] = field(default_factory=list)

    def check(self, observed: Observed) -> None:
        ends = [event.index for event in self.events if event.finish_reason]
        assert len(ends) == len(set(ends)) <= self.request.sampling.n
        assert len(ends) == self.request.sampling.n or not self.submitted.done() or self.submitted.exception()
        answer = Answer(self.request, None, INFO.eos_ids)
        try:
            answer.push(self.events)
        except (JloraError, RuntimeError):  # what ended it: the replica's own bug is a RuntimeError
            return
        for event in self.events:
            assert event.token_id is None or 0 <= event.token_id < VOCAB
        if answer.ended:
            usage, timing = answer.totals()
            observed.answered(Ended(self.request, "base", usage, timing, answer.longest, 0.0, 1.0))
            assert 0 <= observed.first_token.sum <= wire.LONGEST_S  # one answer's times can spoil no sum


class _Call:
    """The stream: what the replica sends."""

    def __init__(self, messages: list[link.FromReplica]):
        self._messages = list(reversed(messages))

    async def write(self, message: link.ToReplica) -> None:
        message.SerializeToString()

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._messages.pop() if self._messages else attach.EOF


class _Channel:
    """As `grpc.aio.Channel`, and the login that makes it."""

    metadata = ()

    def __init__(self, call: _Call):
        self._call = call

    def aio(self, address: str, options: Any) -> _Channel:
        return self

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return lambda metadata=(): self._call


async def _played(messages: list[link.FromReplica]) -> str:
    login: Any = _Channel(_Call(messages))
    terms = Terms("r", login)
    dispatcher = Dispatcher(FakeDirectory(), LeastLoaded(), terms, random.Random(1))
    one = dispatcher.links["one"] = Attached("one", "h:1", terms, dispatcher)
    dispatcher.books.heard(one.view())
    clients = [_Client(request) for request in REQUESTS]
    for client in clients:
        name = client.request.tenant, client.request.id
        dispatcher.names[name] = client.submitted
        dispatcher.admit(client.request, client.events.extend, client.submitted)
    said = "OK"
    try:
        await port.attach(one)
    except (Broken, FailedPrecondition):  # another protocol
        said = "broken"
    except ValueError:
        said = "no hello"
    port.end(one)
    dispatcher.tick()
    one.look(time.monotonic())
    dispatcher.members()
    dispatcher.end_all(Unavailable("the router closes"))
    assert not len(dispatcher.table) and not dispatcher.names and not dispatcher.table.completions
    observed = Observed()
    for client in clients:
        client.check(observed)
    return said


def link_router() -> Target:
    """A hello, then messages with tokens, failures and states."""
    hello = link.FromReplica(hello=link.HelloBack(replica="one", protocol=1, info=wire.info_bytes(INFO)))
    scored = TokenLogprob(5, -0.5, ((5, -0.5),))
    state = link.State(
        number=1, steps=3, running=2, waiting=1, free_blocks=9, blocks=10, age_s=0.1,
        adapters=[link.Residency(key="sql@1", tier="HBM", rank=8)],
    )  # fmt: skip
    usage, timing = Usage(3, 1, 4), Timing(0.1, 0.1, 0.1, 0.1, 0.2, 0.01, "wait")
    last = TokenEvent("", 0, 8, finish_reason="length", usage=usage, timing=timing)
    ends = [wire.token(2, 1, TokenEvent("", i, None, finish_reason="stop", usage=usage, timing=timing)) for i in (0, 1)]
    seeds = [
        [
            link.FromReplica(begun=[1, 2], state=state),
            link.FromReplica(tokens=[wire.token(1, i, TokenEvent("", 0, 5 + i)) for i in range(3)]),
            link.FromReplica(tokens=[wire.token(1, 3, last)], state=state),
            link.FromReplica(tokens=[wire.token(2, 0, TokenEvent("", 1, 5, scored, (None, scored))), *ends]),
        ],
        [
            link.FromReplica(
                failures=[wire.failure(1, Unavailable("it drains"), True), link.Failure(rid=2, kind="NotFound")]
            ),
            link.FromReplica(state=link.State(draining=True, compiling=True)),
        ],
    ]
    words = (
        b"stop",
        b"length",
        b"abort",
        b"sql@1",
        b"Busy",
        b"InvalidArgument",
        b"JloraError",
        b'"max_seqs":',
        b'"vocab":',
    )
    return Target(
        "link-router",
        lambda data: run(_played(split(data, link.FromReplica))),
        [joined([hello, *messages]) for messages in seeds],
        words,
        changing(link.FromReplica),
    )
