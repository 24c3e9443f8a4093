"""The requests of a router: what each has delivered, which attempt is under way, how it goes on after a loss.

An attempt is one try at a request on one replica, under a name (`rid`) that is never used again. A token is
delivered if it comes from the attempt under way and is the next one of its completion. All others are old or
doubled, and are dropped. So every token reaches the client exactly once, whatever replicas and links do.

Nothing here knows a wire, a clock or a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

from jlora.cluster.directory import Version
from jlora.replica import ReplicaInfo, Sink
from jlora.types import Done, FinishReason, Request, Timing, TokenEvent, Usage

# Attempts in a row that deliver nothing before a request is given up: it may be what kills the replicas.
MOST_LOSSES = 8
PATIENCE_S = 60.0  # that a request without a deadline waits for a replica
# Moves of a request to replicas that are less busy; from then on it stays where it is.
MOST_MOVES = 2
# Seconds before the next attempt after a refusal by a full replica, or a second attempt that came to nothing:
# the first, doubled up to the last.
AGAIN_S = (0.05, 1.0)


class Broken(Exception):
    """A replica's messages do not follow the protocol: its stream is of no use."""


@dataclass(slots=True)
class _Completion:
    """What the client has of one completion."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    stop: int | None = None  # tokens before which a front has found a stop string
    rid: int = 0  # the attempt of the first token
    first: float = 0.0  # when it came
    last: float = 0.0

    def done(self) -> Done:
        return Done(tuple(self.tokens), self.ended)


@dataclass(slots=True, eq=False)
class Routed:
    """A request of this router, from its submission to its last event.

    Attributes:
        handle: the router's name for it.
        request: with its seed, so that its tokens depend on no replica.
        version: of its adapter, the same for all attempts; None is the base.
        at: when it came.
        rid, replica: the attempt under way, and where; 0 and "" while it waits for a replica.
        sent: when the attempt under way was sent; before the first one, when the request came.
        since: from when on it has waited for a replica.
        losses: attempts in a row that have delivered nothing.
        refusals: attempts in a row that a replica has refused because it is full.
        moves: attempts that the router has ended to balance its replicas.
        avoid: where the last attempt was lost; "" on the first one.
        others: replicas whose weights of its adapter turned out to be others.
        base: of a replica that has made tokens of it; None before the first one.
        strange: replicas that serve another model than `base`.
        open: completions that have not ended.
    """

    handle: int
    request: Request
    version: Version | None
    sink: Sink
    at: float
    rid: int = 0
    replica: str = ""
    sent: float = 0.0
    since: float = 0.0
    losses: int = 0
    refusals: int = 0
    moves: int = 0
    avoid: str = ""
    others: set[str] = field(default_factory=set)
    base: ReplicaInfo | None = None
    strange: set[str] = field(default_factory=set)
    open: int = field(init=False)
    _fruitful: bool = False  # the attempt under way has delivered something
    _parts: list[_Completion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent = self.since = self.at
        self._parts = [_Completion() for _ in range(self.request.sampling.n)]
        self.open = len(self._parts)

    @property
    def name(self) -> tuple[str, str]:
        """The client's: tenant and id."""
        return self.request.tenant, self.request.id

    @property
    def delivered(self) -> int:
        """Tokens that the client has."""
        return sum(len(part.tokens) for part in self._parts)

    @property
    def given_up(self) -> bool:
        """Whether it has cost too many attempts."""
        return self.losses >= MOST_LOSSES

    def made_of(self, digest: str) -> bool:
        """Whether an attempt has the weights of those before. If nobody knew their digest, it is this one.

        Raises Broken if it has an adapter's weights, and the request asks for none.
        """
        if self.version is None:
            raise Broken("an adapter's weights for a request without one")
        if not self.version.digest:
            self.version = replace(self.version, digest=digest)
        return self.version.digest == digest

    def made_by(self, replica: ReplicaInfo | None) -> None:
        """A replica has made tokens of it. The first one that tells a fingerprint counts: others may serve anything."""
        if replica is not None and (self.base is None or (replica.base and not self.base.base)):
            self.base = replica

    @property
    def movable(self) -> bool:
        """Whether the balance may move it once more: not if only some replicas have its weights."""
        return self.moves < MOST_MOVES and not (self.others or self.strange)

    @property
    def due(self) -> float:
        """When its next attempt may begin."""
        (first, longest), tries = AGAIN_S, max(self.refusals, self.losses - 1)
        return self.since + min(first * 2.0 ** min(tries - 1, 16), longest) if tries > 0 else self.since

    def resumed(self) -> Request:
        """The request for the next attempt: it goes on behind what has been delivered."""
        if not any(part.tokens or part.ended for part in self._parts):
            return self.request
        return replace(self.request, done=tuple(part.done() for part in self._parts))

    def again(self, now: float) -> Request:
        """As `resumed`, with the time that it has waited since it came."""
        return replace(self.resumed(), waited=now - self.at)

    def wants(self, index: int, position: int | None) -> bool:
        """Whether the token at `position` of a completion, or its end without a token (None), is new.

        Raises Broken if tokens before it are missing.
        """
        if not 0 <= index < len(self._parts):
            raise Broken(f"completion {index} of {len(self._parts)}")
        part = self._parts[index]
        if position is not None and position > len(part.tokens):
            raise Broken(f"token {position} of completion {index} after {len(part.tokens)} tokens")
        return not part.ended and (position is None or position == len(part.tokens))

    def deliver(self, event: TokenEvent, now: float) -> TokenEvent:
        """Takes an event that `wants` accepts; the one for the client, its usage and times over all attempts."""
        part = self._parts[event.index]
        self._fruitful, self.refusals = True, 0
        if event.prompt_logprobs is not None and part.tokens:
            event = replace(event, prompt_logprobs=None)  # the client has them
        if event.token_id is not None:
            if not part.tokens:
                part.rid, part.first = self.rid, now
            part.tokens.append(event.token_id)
            part.last = now
        if event.finish_reason is None:
            return event
        self._end(part)
        return replace(event, usage=self._usage(part, event.usage), timing=self._timing(event.index, event.timing))

    def measured(self, index: int) -> bool:
        """Whether one attempt has all times of a completion that has ended; `_timing` puts the others together."""
        return self._parts[index].rid in (0, self.rid)

    def stop(self, index: int, outputs: int) -> bool:
        """A front has found a stop string after `outputs` tokens; whether the completion still runs."""
        part = self._parts[index]
        if not part.ended:
            part.stop = min(outputs, len(part.tokens))
        return not part.ended

    def end(self, reason: FinishReason, error: Exception | None = None) -> list[TokenEvent]:
        """Ends the completions that run; their last events."""
        return [self._last(i, reason, error) for i, part in enumerate(self._parts) if not part.ended]

    def lose(self, refused: bool = False, moved: bool = False, drained: bool = False) -> list[TokenEvent]:
        """The attempt has ended without its last events; see `stopped`.

        `refused`: by a full replica; `moved`: the router itself has ended it; `drained`: its replica drains.
        """
        if refused:
            self.refusals += 1
        elif self._fruitful:
            self.losses = 0
        elif not (moved or drained):
            self.losses += 1
        self.moves += moved
        self._fruitful = False
        return self.stopped()

    def stopped(self) -> list[TokenEvent]:
        """The last events of completions that a stop string has ended, while no attempt is under way to tell them."""
        return [self._last(i, "stop") for i, part in enumerate(self._parts) if part.stop is not None and not part.ended]

    def _last(self, index: int, reason: FinishReason, error: Exception | None = None) -> TokenEvent:
        part = self._parts[index]
        self._end(part)
        usage, timing = self._usage(part, None), self._timing(index, None)
        return TokenEvent(
            self.request.id, index, None, finish_reason=reason, usage=usage, timing=timing, handle=self.handle,
            error=error,
        )  # fmt: skip

    def _end(self, part: _Completion) -> None:
        part.ended = True
        self.open -= 1

    def _usage(self, part: _Completion, told: Usage | None) -> Usage:
        """Counts what the client has; what the cache gave is known of the last attempt only."""
        prompt, tokens = len(self.request.prompt), len(part.tokens)
        completion = tokens if part.stop is None else min(part.stop, tokens)
        if told is None:
            return Usage(prompt, 0, completion)
        cached = min(told.cached_tokens, prompt)
        return Usage(prompt, cached, completion, min(told.host_tokens, cached))

    def _timing(self, index: int, told: Timing | None) -> Timing:
        """Times since the request came.

        The attempt of the first token tells them if it also ends the completion. Otherwise the router's own clock
        does: the parts of the first token's time are lost with the attempt.
        """
        part, waited = self._parts[index], self.sent - self.at
        if told is not None and self.measured(index):
            ttft = told.ttft + waited if told.ttft else 0.0
            return replace(told, queue=told.queue + waited, ttft=ttft)
        if not part.tokens:
            return Timing(queue=waited)
        gaps = len(part.tokens) - 1
        ttft = part.first - self.at
        return Timing(prefill=ttft, ttft=ttft, tpot=(part.last - part.first) / gaps if gaps else 0.0)


class Table:
    """The live requests of a router, by handle and by the attempt under way."""

    def __init__(self) -> None:
        self._requests: dict[int, Routed] = {}
        self._attempts: dict[int, Routed] = {}
        self._handles, self._rids = count(1), count(1)
        self.completions = 0  # of the live requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, version: Version | None, sink: Sink, now: float) -> Routed:
        """A new request; it waits for a replica."""
        routed = Routed(next(self._handles), request, version, sink, now)
        self._requests[routed.handle] = routed
        self.completions += request.sampling.n
        return routed

    def get(self, handle: int) -> Routed | None:
        """The request, while it is live."""
        return self._requests.get(handle)

    def attempt(self, rid: int) -> Routed | None:
        """The request whose attempt under way this is; None for an old attempt."""
        return self._attempts.get(rid)

    def begin(self, routed: Routed, replica: str, now: float) -> None:
        """Gives a request that waits its next attempt, on `replica`."""
        routed.rid, routed.replica, routed.sent = next(self._rids), replica, now
        self._attempts[routed.rid] = routed

    def lose(
        self, routed: Routed, now: float, refused: bool = False, moved: bool = False, drained: bool = False
    ) -> list[TokenEvent]:
        """The attempt is over, and the request waits for a replica; see `Routed.lose`."""
        self._attempts.pop(routed.rid, None)
        routed.avoid = routed.replica
        routed.rid, routed.replica, routed.since = 0, "", now
        return routed.lose(refused, moved, drained)

    def end(self, routed: Routed) -> None:
        """Forgets a request; what its attempt still sends is old."""
        self._attempts.pop(routed.rid, None)
        del self._requests[routed.handle]
        self.completions -= routed.request.sampling.n

    def at(self, replica: str) -> list[Routed]:
        """The requests with an attempt on the replica, oldest first."""
        return [routed for routed in self._requests.values() if routed.replica == replica]

    def waiting(self) -> list[Routed]:
        """The requests without an attempt, in order of priority, then oldest first."""
        return sorted((r for r in self._requests.values() if not r.rid), key=lambda r: -r.request.priority)

    def all(self) -> Iterable[Routed]:
        """Every live request."""
        return list(self._requests.values())
