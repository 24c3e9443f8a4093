"""The records that the scheduler and the runner hand to each other. Plain Python, no jax.

A sequence's life:

                          ┌──hold── its activated LoRA has not landed
                          ▼                          │
    waiting ──admit──▶ loading ──copies landed──▶ running ──last token──▶ done
       ▲                  │                          │
       └──────────────────┴────────preempt───────────┘    (its tokens stay known; its KV may come back)

`tokens` are the tokens that the host knows. `in_flight` counts tokens sampled by dispatched steps but
not read yet. `computed` counts tokens whose KV has been dispatched. `len(tokens) + in_flight - computed`
tokens remain to be computed: many for a prompt, one for decode.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from jlora.cache.lease import Lease, Want
from jlora.cache.transfer import Copy
from jlora.cache.tree import AdapterNode, Origin
from jlora.types import ColdStart, Done, FinishReason, Request, Timing, TokenLogprob, Usage

ROW = 32  # tokens; a prompt chunk is laid out in rows, and a step's budget counts whole rows
SCORED_CHUNK = 64  # tokens of a chunk with prompt log-probabilities: it bounds the memory of their logits
ORDER_BITS = 40  # of a place in the order of service: more than there are arrivals


@dataclass(slots=True, eq=False)
class Account:
    """One tenant inside one priority; `jlora.engine.shares` keeps it."""

    served: float = 0.0  # cost of the tokens that it has received
    live: int = 0  # its sequences that have not ended
    running: int = 0  # those with a slot
    line: list[Sequence] = field(default_factory=list)  # those that are queued, by arrival
    here: list[Sequence] = field(default_factory=list)  # of these, those whose adapter was seen to be in memory

    @property
    def leased(self) -> int:
        """How many of its sequences have a lease."""
        return self.live - len(self.line)


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of one request. Times are seconds of the engine's clock."""

    request: Request
    index: int  # which of the request's n completions
    order: int  # arrival number
    seed: int  # 64 bits
    adapter: AdapterNode
    arrived: float
    leader: Sequence | None = None  # the request's completion 0, whose prompt KV the others wait for and share
    activation: int | None = None  # see `Origin.activation`
    came: float = 0.0  # when it came to the service: before `arrived` if it waited at another replica first
    line: tuple[float, int] = field(init=False)  # (came, order): sorts the sequences of one tenant
    rank: int = field(init=False)  # its order, lowered where needed so that ranks follow `line`
    handle: int = field(init=False)  # the engine's name for its request, never used again: its first completion's order
    resumed: int = 0  # of its output tokens, those that came with the request: another replica drew them
    account: Account | None = None  # its tenant's, from when it is first queued
    paid: float = 0.0  # what its prompt has cost its tenant
    tokens: list[int] = field(init=False)  # of the prompt, of earlier attempts, and drawn here
    prompt_len: int = field(init=False)
    longest: int = field(init=False)  # tokens of prompt and output together, at most
    computed: int = 0
    in_flight: int = 0
    slot: int = -1  # its place in the device's slot state while it runs
    lease: Lease | None = None  # what it holds of the cache, from its admission on
    want: Want | None = None  # what it needs of the cache, while it waits
    refused: int = -1  # the cache's epoch when it was last refused a lease
    setbacks: int = 0  # copies for it that have failed
    lost: Copy | None = None  # the last of them
    uncached: bool = False  # one of them was of its cached prefix
    overtaken: int = 0  # how many sequences have gone first because they found everything on the device
    set_up: bool = False  # the slot's tables on the device are this sequence's
    finished: FinishReason | None = None
    cached: int = 0
    copied: int = 0  # of these, from the host
    boarded: bool = False  # it has had a slot
    slot_s: float = 0.0  # seconds it waited for a slot after its copies had landed
    adapter_s: float = 0.0  # seconds its lease waited for the adapter before that
    kv_s: float = 0.0  # and for cached KV
    cold_start: ColdStart = ""  # see `Timing.cold_start`
    disk_s: float = 0.0  # seconds it waited in the queue until its adapter was read from the disk
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self) -> None:
        request = self.request
        done = request.done[self.index] if request.done else Done()
        self.line, self.rank = (self.came, self.order), self.order
        self.handle = self.order if self.leader is None else self.leader.order
        self.tokens, self.resumed = [*request.prompt, *done.tokens], len(done.tokens)
        self.prompt_len = len(request.prompt)
        self.longest = self.prompt_len + (request.sampling.max_tokens or 1)
        if request.sampling.prompt_logprobs is not None and self.index == 0 and not done.tokens:
            self.prompt_logprobs = [None]

    @property
    def place(self) -> int:
        """Its place among all arrivals, smaller ones first: higher priority, then arrival, be it at another replica.

        It never changes while the sequence is queued, so the cache goes by it; in the order of service
        (`jlora.engine.shares.turn`) tenants take turns.
        """
        return self.rank - (self.request.priority << ORDER_BITS)

    @property
    def outputs(self) -> int:
        """Its output tokens that the host knows, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_len

    @property
    def drawn(self) -> int:
        """Of these, those that this engine drew."""
        return self.outputs - self.resumed

    @property
    def origin(self) -> Origin:
        """What its KV depends on beside its tokens."""
        return Origin(self.adapter, self.request.salt, self.activation)

    @property
    def reuses(self) -> bool:
        """Whether it may read cached KV; prompt log-probabilities need every hidden state.

        Not after a copy of its prefix has failed: a long one may never find the memory that its copy takes.
        """
        scored = self.request.sampling.prompt_logprobs is not None and not self.resumed
        return not (self.request.bypass_prefix_cache or scored or self.uncached)

    def set_back(self, copy: Copy, uncached: bool) -> None:
        """A copy for it has failed; `uncached`: of its cached prefix, which it computes then."""
        self.setbacks += copy is not self.lost  # it is told again while what it depends on moves
        self.lost = copy
        if self.lease is not None and not self.lease.helped:
            self.lease.cold_start = ""  # it has not started
        self.uncached |= uncached

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next sample."""
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def most(self) -> int:
        """Of these, those that one step may compute."""
        return self.remaining if self.prompt_logprobs is None else min(self.remaining, SCORED_CHUNK)

    @property
    def unadapted(self) -> int:
        """Of these, tokens before the first that its activated LoRA acts on."""
        return max(0, (self.activation or 0) - self.computed)

    def drew(self, now: float) -> None:
        """A token of it has come."""
        self.last_token = now
        if not self.first_token:
            self.first_token = now
            if self.lease is not None:
                self.lease.first_token = now

    def ends(self, token: int, eos_ids: Container[int]) -> FinishReason | None:
        """Why its last token ends it, if it does."""
        sampling = self.request.sampling
        stops = token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)
        if stops and self.outputs >= sampling.min_tokens:
            return "stop"
        return "length" if self.outputs >= (sampling.max_tokens or 1) else None

    def usage(self, outputs: int | None = None) -> Usage:
        """What it has taken; `outputs` counts its tokens where a front has cut it."""
        return Usage(self.prompt_len, self.cached, self.outputs if outputs is None else outputs, self.copied)

    def timing(self, now: float) -> Timing:
        """Where its time in this engine went."""
        admitted = self.admitted or now
        started = admitted + max(self.adapter_s, self.kv_s) + self.slot_s
        first = self.first_token or now
        gaps = self.drawn - 1
        return Timing(
            queue=max(0.0, admitted - self.arrived + self.slot_s - self.disk_s),
            adapter_cold_start=self.adapter_s + self.disk_s,
            kv_cold_start=self.kv_s,
            prefill=max(0.0, first - started) if self.admitted else 0.0,
            ttft=first - self.arrived,
            tpot=(self.last_token - first) / gaps if gaps > 0 else 0.0,
            cold_start=self.cold_start,
        )


@dataclass(slots=True, eq=False)  # one for each token: a frozen one takes four times as long to make
class Work:
    """Compute `count` tokens of a sequence from position `start`; `samples`: then draw the next."""

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @property
    def adapted(self) -> bool:
        """Whether an adapter acts on any of its tokens."""
        return self.sequence.adapter.size > 0 and self.start + self.count > (self.sequence.activation or 0)

    @property
    def helped(self) -> bool:
        """Whether the host computes its adapter's part, because the adapter's copy is under way."""
        lease = self.sequence.lease
        return lease is not None and lease.helped and lease.adapter.coming and self.adapted


class Merged(NamedTuple):
    """What is merged into the base's weights: the first `done` of so many pieces, of the adapter `uid`."""

    uid: int
    done: int
    pieces: int

    @property
    def whole(self) -> bool:
        return self.done == self.pieces > 0

    @property
    def share(self) -> float:
        return self.done / self.pieces if self.done else 0.0

    def acts(self, work: Work) -> bool:
        """Whether an adapter acts on the work beside the weights."""
        return work.adapted and not (work.sequence.adapter.uid == self.uid and self.whole)


NOTHING = Merged(-1, 0, 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: copies to start, then decode and prompt work, on the weights as they are then."""

    decode: tuple[Work, ...]
    prefill: tuple[Work, ...]
    copies: tuple[Copy, ...]
    streams: tuple[Copy, ...] = ()  # of `copies`, or under way; the prompt work reads them, each layer its part
    helps: tuple[Copy, ...] = ()  # of adapters, under way; the host computes what has not come of them
    merged: Merged = NOTHING

    @property
    def work(self) -> tuple[Work, ...]:
        return self.decode + self.prefill

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill or self.copies)


@dataclass(slots=True)  # as `Work`
class Drawn:
    """The result of one work item."""

    token: int | None = None  # None if the work did not sample
    logprob: TokenLogprob | None = None  # of the token, when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt tokens after start .. start + count - 1
