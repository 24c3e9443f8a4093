"""A request from its submission to its end, and what may come of it: the world's own reckoning, not the product's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

from jlora.adapters.registry import Record
from jlora.engine.local import LocalReplica
from jlora.errors import JloraError
from jlora.sim.world.device import Key, expected, salt_of, scored
from jlora.sim.world.disk import INVOCATION, SPEC, Disk, Version
from jlora.sim.world.excuses import Excuses
from jlora.sim.world.report import Journal
from jlora.sim.world.sites import Planted, Shortage, Sites
from jlora.types import Request, TokenEvent

ROUNDING_S = 1e-6  # of sums of times


@dataclass(frozen=True, slots=True)
class Around:
    """What clients deal with.

    Attributes:
        at: where a request is, for counting: "", or "queued", "copying", "running".
        began: when the engine began the second step before this one.
        context: tokens of the longest context that any adapter has room for, whatever is pinned.
        excuses: which errors may come while the replica is not `over`.
    """

    replica: LocalReplica
    disk: Disk
    versions: tuple[Version, ...]
    record: Callable[[str], Record]  # by name, on the engine's thread
    at: Callable[[int], str]
    began: Callable[[], float]
    now: Callable[[], float]
    block_tokens: int
    context: int
    sites: Sites
    journal: Journal
    excuses: Excuses
    over: Callable[[], bool]


@dataclass(slots=True, eq=False)
class Call:
    """One request, from its submission to its last event."""

    request: Request
    floor: int  # the smallest uid that may answer it
    came: float
    key: Key | None = None  # from its admission on
    due: float = math.inf  # two steps later nothing of it may come: its deadline, or its admission if that is later
    handle: int | None = None
    got: dict[int, list[int]] = field(init=False)  # by completion, those of earlier attempts, too
    had: dict[int, int] = field(init=False)  # how many those were
    first: dict[int, tuple[float, float]] = field(default_factory=dict)  # between which times its first token was drawn
    open: set[int] = field(init=False)
    stops: dict[int, int] = field(default_factory=dict)  # completion -> the tokens that its front kept
    cancelled: bool = False
    aborted: bool = False  # its end has been carried out
    deaf: bool = False  # its receiver has failed
    refused: bool = False
    submitted: Future[int] | None = None

    def __post_init__(self) -> None:
        done = self.request.done
        self.open = set(self.request.open)
        self.got = {index: list(done[index].tokens) if done else [] for index in self.open}
        self.had = {index: len(tokens) for index, tokens in self.got.items()}

    @property
    def over(self) -> bool:
        return self.refused or not self.open or (self.deaf and self.handle is not None)

    @property
    def untouched(self) -> bool:
        """Whether no token has come of it."""
        return all(len(tokens) == self.had[index] for index, tokens in self.got.items())


def mapped(name: str, error: BaseException) -> None:
    """Raises AssertionError unless a front has a status for the error."""
    known = isinstance(error, JloraError | Planted | Shortage | CancelledError)
    assert known, f"{name}: {type(error).__name__}: {error}"


class Answers:
    """Checks what comes of calls. Raises AssertionError."""

    def __init__(self, around: Around):
        self._around = around
        self._marks = {version.digest: version for version in around.versions}

    def admitted(self, call: Call) -> None:
        """The engine has taken it in, just now: what answers it is bound."""
        request, mark, activation = call.request, 0, None
        if request.adapter is not None:
            record = self._around.record(request.adapter)
            assert record.node.uid >= call.floor, "a request is bound to a version that had been replaced or unloaded"
            version = self._marks.get(record.digest)
            assert version is not None, "an adapter is served that is a mix of two"
            mark = version.mark
            if version.activated:
                activation = _invoked(request.prompt)
        if request.deadline is not None:
            call.due = max(request.deadline, self._around.now())
        assert request.sampling.seed is not None
        call.key = Key(mark, salt_of(request), request.sampling.seed, 0, activation)

    def check(self, call: Call, event: TokenEvent) -> None:
        """An event of it has come."""
        name = f"{call.request.id}/{event.index}"
        assert event.index in call.open, f"{name} goes on after its end"
        assert call.due >= self._around.began(), f"{name} outlives its deadline by more than two steps"
        tokens = call.got[event.index]
        if event.token_id is not None:
            self._token(call, event, event.token_id, name)
        if event.finish_reason is None:
            assert event.token_id is not None, f"{name} has an event of nothing"
            assert not _complete(call, tokens, SPEC.max_len), f"{name} goes on behind its end"
            return
        call.open.discard(event.index)
        stopped = event.token_id is None and event.index in call.stops
        if event.finish_reason == "abort":
            self._aborted(call, event, name)
        elif stopped:
            assert event.finish_reason == "stop", f"{name} was stopped"
        else:
            assert _complete(call, tokens, self._around.context), f"{name} ends early"
        if event.error is None:
            cut = stopped and event.finish_reason == "stop"
            self._usage(call, event, call.stops[event.index] if cut else len(tokens))
            self._timing(call, event)

    def _token(self, call: Call, event: TokenEvent, token: int, name: str) -> None:
        assert not call.aborted, f"{name} goes on after it was cancelled"
        assert call.key is not None, f"{name} has tokens before its admission"
        request, tokens, around = call.request, call.got[event.index], self._around
        right = expected(replace(call.key, index=event.index), (*request.prompt, *tokens), around.block_tokens)
        assert token == right, f"{name}: token {len(tokens)} is {token}, and must be {right}"
        scores = None
        if request.sampling.prompt_logprobs is not None and event.index == 0 and not tokens:
            scores = scored(call.key, request.prompt)
        assert event.prompt_logprobs == scores, f"{name}: the prompt's log-probabilities are {event.prompt_logprobs}"
        tokens.append(token)
        call.first.setdefault(event.index, (around.began(), around.now()))

    def _aborted(self, call: Call, event: TokenEvent, name: str) -> None:
        around = self._around
        if event.error is not None:
            mapped(name, event.error)
            excused = around.over() or around.excuses.request(call.handle)
            assert excused, f"{name} has failed, and nothing has struck it: {type(event.error).__name__}: {event.error}"
            return
        late = call.request.deadline is not None and around.now() >= call.request.deadline
        assert call.cancelled or late, f"{name} is aborted, and nobody asked for it"

    def _usage(self, call: Call, event: TokenEvent, outputs: int) -> None:
        request, usage = call.request, event.usage
        assert usage is not None, f"{request.id} ends without its usage"
        prompt = len(request.prompt)
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, outputs), (
            f"{request.id} counts {usage}, of {prompt} + {outputs} tokens"
        )
        # A token is drawn from what is computed of the prompt, unless there are tokens behind it.
        most = 0 if request.bypass_prefix_cache else prompt if request.done else prompt - 1
        assert 0 <= usage.host_tokens <= usage.cached_tokens <= most, f"{request.id} counts {usage}, at most {most}"

    def _timing(self, call: Call, event: TokenEvent) -> None:
        timing, name, here = event.timing, call.request.id, self._around.now() - call.came + ROUNDING_S
        assert timing is not None, f"{name} ends without its times"
        times = [seconds for what, seconds in timing.fields().items() if what != "cold_start"]
        assert all(0 <= seconds <= here for seconds in times), f"{name} was here for {here}, not {timing}"
        if event.index not in call.first:
            return
        begin, end = call.first[event.index]
        first = call.came + timing.ttft
        assert begin - ROUNDING_S <= first <= end + ROUNDING_S, f"{name}: the first token of {begin}..{end}: {timing}"
        gaps = len(call.got[event.index]) - call.had[event.index] - 1
        assert timing.ttft + gaps * timing.tpot <= here, f"{name} was here for {here}, not {timing}"
        if not (timing.adapter_cold_start or timing.kv_cold_start):
            apart = timing.queue + timing.prefill - timing.ttft
            assert abs(apart) <= ROUNDING_S, f"{name}: queue and prefill are not ttft: {timing}"


def _invoked(prompt: Sequence[int]) -> int | None:
    """Where a prompt last invokes an activated LoRA."""
    size = len(INVOCATION)
    return next((at for at in range(len(prompt) - size, -1, -1) if tuple(prompt[at : at + size]) == INVOCATION), None)


def _complete(call: Call, tokens: Sequence[int], context: int) -> bool:
    """Whether the answer has come to its end; one without a limit, to so many tokens with its prompt."""
    sampling = call.request.sampling
    last = tokens[-1] if tokens else None
    stops = last in sampling.stop_token_ids or (last in SPEC.eos_ids and not sampling.ignore_eos)
    ends = stops and len(tokens) >= sampling.min_tokens
    if sampling.max_tokens is None:  # as many as fit
        return ends or len(tokens) + len(call.request.prompt) >= context
    return ends or len(tokens) == sampling.max_tokens
