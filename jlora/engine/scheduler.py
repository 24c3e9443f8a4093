"""Continuous batching with chunked prefill, in plain Python: no jax, no clock of its own.

`plan(now)` decides one step, `commit(plan, drawn, now)` takes its results in. The engine calls
plan for step N+1 before commit of step N, so plan works on counts and never on token values.

Order of service: higher priority first, then the tenant that has received least, then arrival. Running
sequences decode every step, and up to `max_step_tokens` of prompts are computed beside them, in this order.
A sequence whose adapter or prefix lies on the host holds its lease and waits for the copies, or follows
them layer by layer; sequences behind it may run first. `Admission` decides which queued sequences get a
lease. If no slot is free, a tenant that waits takes slots of one that has received more and runs more, up
to equal numbers.

When the pool runs out of blocks, the last sequence in order of service is preempted: it gives up its
lease, keeps its tokens, and computes them again later. It draws the same tokens as without the preemption.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from jlora.cache.manager import CacheManager
from jlora.cache.readiness import Readiness
from jlora.cache.transfer import Copy
from jlora.cache.tree import AdapterNode
from jlora.config import EngineConfig
from jlora.engine.admission import Admission
from jlora.engine.deadlines import Deadlines
from jlora.engine.plan import ROW, Drawn, Sequence, StepPlan, Work
from jlora.engine.shares import account_of, charge_output, owes, refund_prompt, turn
from jlora.engine.turns import Turns
from jlora.errors import QueueFull, ResourceExhausted, ShortOfMemory
from jlora.types import FinishReason, Request, TokenEvent, TokenLogprob

log = logging.getLogger(__name__)

SETBACKS = 3  # copies that fail before a sequence gives up: a link that always fails must not hold it for ever
CALM = 64  # steps without a shortage before a withheld slot is used again, or the next one would be short again


class Scheduler:
    """Decides which sequences run, with how many tokens, on which blocks."""

    def __init__(
        self,
        manager: CacheManager,
        config: EngineConfig,
        eos_ids: Collection[int],
        seeds: random.Random | None = None,
        turns: Turns | None = None,
    ):
        self.manager = manager
        self._leases = manager.leases
        self.config = config
        self.eos_ids = frozenset(eos_ids)
        self.running: list[Sequence] = []  # in order of service
        self.loading: list[Sequence] = []  # hold a lease; their copies are under way, or no slot is free
        self.preemptions = 0
        self.turns = turns or Turns()
        self.queue = Admission(manager, config, self.turns)
        self._requests: dict[int, list[Sequence]] = {}  # live ones, by handle: their unfinished completions
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._order = itertools.count()
        self._came = 0.0  # when the last request came; the clock's readings may be a little out of order
        self._ahead: dict[Sequence, None] = {}  # run before their adapter has landed (a dict as an ordered set)
        self._seeds = seeds or random.Random(0)  # of requests that name none
        self._planned: float | None = None  # when the last step was, if it had work
        self._at: Sequence | None = None  # the one that is being planned
        self._withheld: list[int] = []  # slots of sequences that memory was too short for
        self._calm = 0  # steps since then
        self._deadlines = Deadlines()

    # -- requests in and out ----------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self.queue)

    @property
    def pending(self) -> int:
        """Sequences that do not run yet: in the queue, or with a lease whose copies are under way."""
        return len(self.queue) + len(self.loading)

    @property
    def active(self) -> int:
        """Sequences that run."""
        return len(self.running)

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def submit(self, request: Request, adapter: AdapterNode, now: float, activation: int | None = None) -> int:
        """Queues a validated request.

        Args:
            activation: position of the prompt's first token that an activated LoRA acts on.
        Returns:
            Its handle: unlike the id, which is the client's affair, never used again.
        Raises:
            QueueFull: the queue has no room now.
            ResourceExhausted: the queue can never hold it. Whether the pool can is for the caller to check.
        """
        sampling = request.sampling
        live, limit = self.pending + self.active, self.config.max_queue + self.config.max_seqs
        if sampling.n > limit:
            raise ResourceExhausted(f"n = {sampling.n}: must be at most engine.max_queue + max_seqs = {limit}")
        if live + sampling.n > limit:
            raise QueueFull(f"queue is full: {live} completions run or wait, limit {limit}")
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        self._came = max(self._came, now)
        came = now - request.waited if request.waited else self._came
        siblings: list[Sequence] = []
        try:
            for index in request.open:
                leader = siblings[0] if siblings else None
                order = next(self._order)
                sequence = Sequence(request, index, order, seed % 2**64, adapter, now, leader, activation, came)
                self.queue.enqueue(sequence)
                siblings.append(sequence)
            handle = siblings[0].order
            if request.deadline is not None:
                self._deadlines.add(request.deadline, handle)
            for sequence in siblings:
                self.turns.joined(sequence)
            self._requests[handle] = siblings
        except BaseException:
            for sequence in siblings:
                self.queue.dequeue(sequence)
                self.queue.close(sequence)
            raise
        return handle

    def abort(self, handle: int, now: float, moved: bool = False) -> list[TokenEvent]:
        """Ends a request at once; the final events of its unfinished completions, none if it is not live.

        `moved`: another replica goes on with it, and charges a prompt that has brought no token here.
        """
        for sequence in self._unfinished(handle) if moved else ():
            if not sequence.first_token:
                refund_prompt(sequence)
        return [self._finish(s, "abort", now) for s in self._unfinished(handle)]

    def stop(self, handle: int, index: int, outputs: int, now: float) -> list[TokenEvent]:
        """The front found a stop string after `outputs` tokens: ends that completion."""
        return [self._finish(s, "stop", now, outputs=outputs) for s in self._unfinished(handle) if s.index == index]

    def expire(self, now: float) -> list[TokenEvent]:
        """Aborts requests whose deadline has passed."""
        events = [event for handle in self._deadlines.passed(now) for event in self.abort(handle, now)]
        self._deadlines.forget(self._requests)
        return events

    def can_pin(self, adapter: AdapterNode) -> bool:
        """Whether every live request could still run with `adapter` pinned too."""
        longest: dict[AdapterNode, int] = {}  # thousands may wait, for few adapters
        for s in itertools.chain.from_iterable(self._requests.values()):
            longest[s.adapter] = max(longest.get(s.adapter, 0), s.longest)
        return all(most <= self.manager.capacity(node, pinned=adapter) for node, most in longest.items())

    # -- one step ---------------------------------------------------------------------------

    def tend(self, now: float) -> tuple[Copy, ...]:
        """A round of the cache's monitor if one is due; the copies to start."""
        self.manager.tend(now, len(self.running))
        return self.manager.take_copies()

    def plan(self, now: float) -> StepPlan:
        """Decides the next step; empty if there is nothing to do now. If it raises, it has planned nothing."""
        decode: list[Work] = []
        prefill: list[Work] = []
        try:
            return self._plan(now, decode, prefill)
        except Exception:
            self.undo((*decode, *prefill))
            suspect = self.suspect
            if suspect is not None and suspect.lease is not None and suspect.slot < 0 and suspect not in self.loading:
                self.loading.append(suspect)  # it was on its way from the queue to its slot
            raise

    def _plan(self, now: float, decode: list[Work], prefill: list[Work]) -> StepPlan:
        self._at = self.queue.at = None
        self.manager.forecast.step_s = 0.0 if self._planned is None else now - self._planned
        self._stall_ahead()
        self._stall_excluded()
        if len({sequence.account for sequence in self.running}) > 1:
            self.running.sort(key=turn)  # tenants' turns change
        self._board(now)  # first: some have one token left to compute, so they decode in this step
        if not self._slots:
            for sequence in self.queue.admit(now, self.running, self.loading, owed=True):
                self._at = sequence
                self._run_if_ready(sequence, now)
        prompts = self._plan_decode(decode)
        budget = self.config.max_step_tokens
        for sequence in prompts:
            self._at = sequence
            if budget > 0 and sequence.lease is not None and self.turns.may_run(sequence):
                budget -= self._add_chunk(prefill, sequence, budget)
        admissions = self.queue.admit(now, self.running, self.loading)
        while budget > 0 and self._slots:
            self._at = None  # the queue knows
            sequence = self._at = next(admissions, None)
            if sequence is None:
                break
            if self._run_if_ready(sequence, now):  # or its copies are under way, and the next one may run
                budget -= self._add_chunk(prefill, sequence, budget)
        self._at = self.queue.at = None
        self._planned = now if decode or prefill else None
        self.turns.planned(itertools.chain(decode, prefill))
        leases = [work.sequence.lease for work in prefill if work.sequence.lease is not None]
        streams = self._leases.streams(leases)
        works = (*decode, *prefill) if self.manager.flying else ()
        helps = self._leases.helps([w.sequence.lease for w in works if w.helped and w.sequence.lease])
        copies = self.tend(now)  # last: they are given out once
        return StepPlan(tuple(decode), tuple(prefill), copies, streams, helps, self.turns.merged)

    def commit(self, plan: StepPlan, drawn: list[Drawn], now: float) -> list[TokenEvent]:
        """Takes in the results of a step, in the order of `plan.work`."""
        events: list[TokenEvent] = []
        for work, result in zip(plan.work, drawn, strict=True):
            sequence = work.sequence
            if work.samples:
                sequence.in_flight -= 1
            if sequence.finished is not None:
                continue
            try:
                event = self._take_in(work, result, now)
            except Exception as error:
                events += self.fail(sequence.handle, error, now)
            else:
                if event is not None:
                    events.append(event)
        if self._withheld:
            self._calm += 1
            if self._calm >= CALM:
                self._slots.append(self._withheld.pop())
                self._calm = 0
        return events

    # -- faults -------------------------------------------------------------------------------

    @property
    def suspect(self) -> Sequence | None:
        """The sequence that `plan` was at when it raised, if it was at one."""
        return self._at or self.queue.at

    def undo(self, works: Iterable[Work]) -> None:
        """Takes back work that was planned and not dispatched."""
        for work in works:
            sequence = work.sequence
            sequence.in_flight -= work.samples
            if sequence.lease is not None:
                sequence.computed -= work.count

    def retract(self) -> bool:
        """Memory is short: preempts the youngest running sequence and withholds its slot for some steps.

        False if at most one runs.
        """
        if len(self.running) < 2:
            return False
        self._preempt(max(self.running, key=turn))
        self._withheld.append(self._slots.pop())
        self._calm = 0
        return True

    def fail(self, handle: int, error: Exception, now: float) -> list[TokenEvent]:
        """Ends a request with an error; the final events of its unfinished completions."""
        log.error("request %d has failed", handle, exc_info=error)
        if isinstance(error, MemoryError):
            error = ShortOfMemory("the server has too little memory for the request; try again later")
        return [replace(event, error=error) for event in self.abort(handle, now)]

    def arrived(self, adapter: AdapterNode, now: float) -> None:
        """An adapter has been read from the disk: its sequences may be admitted."""
        for sequence in self.queue:
            if sequence.adapter is adapter and not sequence.admitted:
                sequence.disk_s = now - sequence.arrived

    def fail_adapter(self, adapter: AdapterNode, error: Exception, now: float) -> list[TokenEvent]:
        """An adapter could not be read from the disk: ends the requests that wait for it, and no other."""
        handles = dict.fromkeys(sequence.handle for sequence in self.queue if sequence.adapter is adapter)
        return [replace(event, error=error) for handle in handles for event in self.abort(handle, now)]

    def fail_copy(self, copy: Copy, error: Exception, now: float) -> list[TokenEvent]:
        """Takes the copy's data from its sequences: they end, or start again if memory was short or the host helps."""
        nodes, events = set(copy.nodes), list[TokenEvent]()
        for sequence in (*self.running, *self.loading):
            lease = sequence.lease
            if lease is None or (lease.adapter not in nodes and nodes.isdisjoint(lease.path)):
                continue
            sequence.set_back(copy, not nodes.isdisjoint(lease.path))
            again = isinstance(error, MemoryError) or lease.helped  # no step has read what has not come
            if not (again and sequence.setbacks <= SETBACKS and self._gives_way(sequence)):
                events += self.fail(sequence.handle, error, now)
        return events

    def check_integrity(self) -> None:
        """Raises AssertionError unless each live sequence is in one place, and has a lease outside of the queue."""
        here, live = [*self.running, *self.loading], itertools.chain.from_iterable(self._requests.values())
        assert Counter((*here, *self.queue)) == Counter(live), "a live sequence is nowhere, or in two places"
        assert {id(s.lease) for s in here} == set(self._leases.live), "a lease without its sequence"
        assert all(s.lease is None for s in self.queue), "a sequence waits with a lease"

    # -- inside -----------------------------------------------------------------------------

    def _unfinished(self, handle: int) -> list[Sequence]:
        """The unfinished completions of a live request."""
        return list(self._requests.get(handle, ()))

    def _take_in(self, work: Work, result: Drawn, now: float) -> TokenEvent | None:
        sequence, lease, token = work.sequence, work.sequence.lease, result.token
        if sequence.prompt_logprobs is not None:
            # After a preemption, prompt chunks come again: keep only what is new.
            known = len(sequence.prompt_logprobs) - 1 - work.start
            sequence.prompt_logprobs += result.prompt_logprobs[known:] if known >= 0 else ()
        if token is not None:
            sequence.tokens.append(token)
        if lease is not None:
            self._leases.publish(lease, sequence.tokens, min(sequence.computed, len(sequence.tokens)))
        return None if token is None else self._token(sequence, token, result.logprob, now)

    def _plan_decode(self, decode: list[Work]) -> list[Sequence]:
        """Plans the next token of each sequence that decodes; the running ones whose prompts are to be computed."""
        prompts, grow, only = list[Sequence](), self._leases.grow, self.turns.only
        for sequence in list(self.running):
            lease, computed = sequence.lease, sequence.computed
            left = len(sequence.tokens) + sequence.in_flight - computed
            if lease is None:  # it was preempted in this step
                continue
            if left > 1:
                prompts.append(sequence)
            elif computed + 1 < sequence.longest and only in (None, sequence.adapter):
                self._at = sequence
                if grow(lease, computed + 1) or self._make_room(sequence, decode):
                    decode.append(Work(sequence, computed, 1, True))
                    sequence.computed = computed + 1
                    sequence.in_flight += 1
        self._at = None
        return prompts

    def _make_room(self, sequence: Sequence, planned: list[Work]) -> bool:
        """Room for one more token of a decoding sequence, by preempting from the end of the order."""
        while not self.manager.leaving:  # blocks come free when their copies to the host have landed
            kept = {work.sequence for work in planned}
            victim = max((s for s in (*self.running, *self.loading) if s not in kept), key=turn)
            self._preempt(victim)
            if sequence.lease is None:  # it was the last one itself
                return False
            if self._leases.grow(sequence.lease, sequence.computed + 1):
                return True
        return False

    def _add_chunk(self, works: list[Work], sequence: Sequence, budget: int) -> int:
        """Plans the next tokens of a sequence; the tokens they take of the budget, in whole rows."""
        assert sequence.lease is not None
        reach = sequence.unadapted if sequence in self._ahead else sequence.remaining
        count = min(reach, budget, sequence.most)
        samples = count == sequence.remaining
        works.append(Work(sequence, sequence.computed, count, samples))
        sequence.computed += count
        sequence.in_flight += samples
        return -(-count // ROW) * ROW

    def _board(self, now: float) -> None:
        """Sequences whose copies have landed take their slots, in order of service."""
        for sequence in sorted(self.loading, key=turn):
            self._at = sequence
            if self.turns.may_run(sequence) and self._run_if_ready(sequence, now):
                self.loading.remove(sequence)

    def _stall_ahead(self) -> None:
        """Stalls sequences that have nothing left to compute before their activated LoRA lands."""
        for sequence in list(self._ahead):
            readiness = self._readiness(sequence)
            if readiness is not Readiness.AHEAD:
                del self._ahead[sequence]
            if readiness is Readiness.WAIT:
                self._stall(sequence)

    def _stall_excluded(self) -> None:
        """Stalls sequences that the merged weights exclude, once the host has read their last token."""
        for sequence in [s for s in self.running if not s.in_flight and self.turns.only not in (None, s.adapter)]:
            self._stall(sequence)

    def _stall(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the batch. It keeps its lease and waits in `loading`."""
        assert sequence.lease is not None
        self._ahead.pop(sequence, None)
        self._leases.gate.stall(sequence.lease)
        self._free_slot(sequence)
        self.loading.append(sequence)

    def _readiness(self, sequence: Sequence) -> Readiness:
        assert sequence.lease is not None
        whole = min(sequence.most, self.config.max_step_tokens)
        found = self._leases.gate.readiness(sequence.lease, whole, sequence.unadapted)
        again = sequence.setbacks > 0 and found is Readiness.STREAM  # that may fail, too, and take others back
        return Readiness.WAIT if again else found

    def _run_if_ready(self, sequence: Sequence, now: float) -> bool:
        """Gives a leased sequence its slot, or puts it among those whose copies are under way."""
        assert sequence.lease is not None
        lease, readiness = sequence.lease, self._readiness(sequence)
        if readiness is Readiness.WAIT or not (self._slots or self._preempt_for(sequence)):
            if sequence not in self.loading:
                self.loading.append(sequence)
            return False
        if readiness is Readiness.AHEAD:
            self._ahead[sequence] = None
        if not sequence.boarded:
            sequence.adapter_s, sequence.kv_s, sequence.boarded = lease.adapter_s, lease.kv_s, True
            # The wait between its copies and its slot counts as queueing.
            sequence.slot_s = max(0.0, now - lease.granted - max(lease.adapter_s, lease.kv_s))
        elif not sequence.first_token:  # it was held for its adapter, and then waited for a slot
            sequence.adapter_s = max(sequence.adapter_s, lease.adapter_s)
            sequence.slot_s += max(0.0, now - lease.since - lease.adapter_s)
        sequence.slot = self._slots.pop()
        account_of(sequence).running += 1
        sequence.set_up = False
        self.running.append(sequence)
        self.running.sort(key=turn)
        return True

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempts a sequence of a tenant above its share, or a later one that a merge let go first, if any."""
        passed = sequence in self.turns.passed
        later = (s for s in self.running if owes(s, sequence) or (passed and turn(s) > turn(sequence)))
        taken = max(later, key=turn, default=None)
        if taken is not None:
            self._preempt(taken)
        return taken is not None

    def _preempt(self, sequence: Sequence) -> None:
        self.queue.enqueue(sequence)  # first: its want may be all that keeps its adapter version
        self._leave(sequence)
        self.preemptions += 1

    def _gives_way(self, sequence: Sequence) -> bool:
        """Preempts it; False if memory is too short even for that."""
        try:
            self._preempt(sequence)
        except MemoryError:
            return False
        return True

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._free_slot(sequence)
        else:
            self.loading.remove(sequence)
            if not sequence.boarded:  # so far it has only waited
                sequence.admitted = 0.0
                refund_prompt(sequence)
        assert sequence.lease is not None
        sequence.cold_start = sequence.cold_start or sequence.lease.cold_start
        self._leases.release(sequence.lease)
        self._ahead.pop(sequence, None)
        sequence.lease, sequence.computed = None, 0

    def _free_slot(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        account_of(sequence).running -= 1
        sequence.slot = -1

    def _token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> TokenEvent:
        charge_output(sequence)
        sequence.drew(now)
        outputs = len(sequence.tokens) - sequence.prompt_len
        scored = tuple(sequence.prompt_logprobs) if sequence.prompt_logprobs and outputs == 1 else None
        name, handle = sequence.request.id, sequence.handle
        event = TokenEvent(name, sequence.index, token, logprob, scored, None, None, None, handle)
        reason = sequence.ends(token, self.eos_ids)
        if reason is None:
            return event
        final = self._finish(sequence, reason, now)
        return replace(event, finish_reason=reason, usage=final.usage, timing=final.timing)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float, outputs: int | None = None) -> TokenEvent:
        sequence.finished = reason
        self.turns.left(sequence)
        if sequence.lease is not None:
            self._leave(sequence)
        else:
            self.queue.dequeue(sequence)
        self.queue.close(sequence)
        name, handle = sequence.request.id, sequence.handle
        self._requests[handle].remove(sequence)
        if not self._requests[handle]:
            del self._requests[handle]
        usage, timing = sequence.usage(outputs), sequence.timing(now)
        return TokenEvent(name, sequence.index, None, None, None, reason, usage, timing, handle)
