"""Clients of a modelled service, and what each must get: an answer once, whole, of one version, or a mapped error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jlora.sim.world.cluster.model import answer
from jlora.types import Request, TokenEvent


class Violation(AssertionError):
    """A promise is broken."""


@dataclass(slots=True, eq=False)
class Ask:
    """One request of a client, and what it has got.

    Attributes:
        digests: the weights that may answer; a token rules out those that do not say it.
        accepted: its handle at the router; None before, and if it was refused.
        refused: why its submission failed.
        left: the client has gone, or asked for the end.
        stops: completions that the client has stopped.
        lost: its router's process is gone.
        judge: hears of its errors as they come.
        losses: attempts in a row that were lost without a token; `refusals`: by replicas that were full.
        moves: attempts that its router has ended to balance its replicas.
        fruitful: the attempt under way has brought a token.
        lacked: a replica lacked its adapter's files, or memory, and the router asks another one.
        causes: what replicas have said of its attempts: kind of error -> how often.
        final: those after which no other replica is asked.
        due: why it should have ended -> since when nothing hinders that.
    """

    request: Request
    digests: list[str]
    clock: Callable[[], float]
    router: Any = None
    judge: Callable[[Ask, BaseException], None] = lambda ask, error: None
    accepted: int | None = None
    refused: BaseException | None = None
    left: bool = False
    lost: bool = False
    stops: dict[int, int] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    submitted: Future[int] | None = None
    losses: int = 0
    refusals: int = 0
    moves: int = 0
    fruitful: bool = False
    lacked: bool = False
    causes: Counter[str] = field(default_factory=Counter)
    final: set[str] = field(default_factory=set)
    due: dict[str, float] = field(default_factory=dict)
    _answers: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.request.sampling.n
        self.tokens, self.reasons = [[] for _ in range(n)], [""] * n

    @property
    def over(self) -> bool:
        """Whether the client knows how it has ended."""
        return self.lost or self.refused is not None or all(self.reasons)

    @property
    def held(self) -> bool:
        """Whether the router has taken it, and so has chosen its version."""
        return (self.request.tenant, self.request.id) in self.router.router._dispatcher._handles

    @property
    def name(self) -> str:
        return f"request {self.request.id}"

    def answered(self, submitted: Future[int]) -> None:
        """Its submission has been answered."""
        if submitted.cancelled():
            self.left, self.refused = True, TimeoutError("its client has gone")
        elif (error := submitted.exception()) is not None:
            if any(map(len, self.tokens)):
                raise Violation(f"{self.name} is refused after its first token: {error}")
            self.refused = error
            self.judge(self, error)
        else:
            self.accepted = submitted.result()

    def hear(self, events: list[TokenEvent]) -> None:
        """The router's sink."""
        for event in events:
            index = event.index
            if self.reasons[index]:
                raise Violation(f"{self.name}: an event after the end of completion {index}")
            if event.token_id is not None:
                self.tokens[index].append(event.token_id)
                self.fruitful, self.refusals = True, 0
                self._compare(index)
            if event.error is not None:
                self.errors.append(event.error)
                self.judge(self, event.error)
            if event.finish_reason is not None:
                self.reasons[index] = event.finish_reason
                self._ended(index, event)

    def lose(self, refused: bool, moved: bool) -> None:
        """An attempt is over before the request is."""
        if refused:
            self.refusals += 1
        elif self.fruitful:
            self.losses = 0
        elif not moved:
            self.losses += 1
        self.moves += moved
        self.fruitful = False

    def _compare(self, index: int) -> None:
        at = len(self.tokens[index]) - 1
        fitting = [d for d in self.digests if self._answer(d, index)[at : at + 1] == self.tokens[index][-1:]]
        if not fitting:
            raise Violation(f"{self.name}: token {at} of completion {index} is not what {self.digests} say")
        self.digests = fitting

    def _answer(self, digest: str, index: int) -> list[int]:
        if digest not in self._answers:
            self._answers[digest] = [answer(digest, self.request, i) for i in range(self.request.sampling.n)]
        return self._answers[digest][index]

    def _ended(self, index: int, event: TokenEvent) -> None:
        got, why = len(self.tokens[index]), event.finish_reason
        most = self.request.sampling.max_tokens or 1
        deadline = self.request.deadline
        if why == "abort" and event.error is None and not self.left and (deadline is None or self.clock() < deadline):
            raise Violation(f"{self.name}: completion {index} was aborted, and nobody asked for it")
        if event.usage is None or event.timing is None:
            raise Violation(f"{self.name}: completion {index} ends without usage and timing")
        if event.usage.prompt_tokens != len(self.request.prompt):
            raise Violation(f"{self.name}: usage counts {event.usage.prompt_tokens} tokens of the prompt")
        if why == "length" and got != most:
            raise Violation(f"{self.name}: completion {index} ends by length after {got} of {most} tokens")
        if why == "stop" and index not in self.stops:
            raise Violation(f"{self.name}: completion {index} was stopped, and nobody asked for it")
        if why != "stop" and event.usage.completion_tokens != got and index not in self.stops:
            raise Violation(f"{self.name}: usage counts {event.usage.completion_tokens} of {got} tokens")

    def check_served(self) -> None:
        """Raises Violation if it has failed: nothing may excuse that."""
        for error in (*self.errors, *filter(None, [self.refused])):
            raise Violation(f"{self.name} has failed: {type(error).__name__}: {error}")
