"""The queue, and which of its sequences get a lease next. Plain Python, no jax, no clock.

Order of service: higher priority first, then the tenant that has received least (`jlora.engine.shares`),
then arrival. While the link is behind with copies that requests wait for, sequences that find everything
on the device overtake the others: they need no copy, and they run before their data is evicted for others.
Near saturation this rule decides how many requests are served. A request's turn on the link is put off for at
most `OVERTAKES` others, and never for one of lower priority. While it then waits for the link, those run that need
neither the link nor its room. One of lower priority also leaves it a slot.

A queued sequence holds no blocks, but its want tells the cache what it will need, and when.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from enum import Enum, auto

from jlora.cache.manager import CacheManager
from jlora.config import EngineConfig
from jlora.engine.plan import Sequence
from jlora.engine.shares import Shares, charge_prompt, turn
from jlora.engine.turns import Turns

FEW = 16  # while fewer than 1/FEW of the slots are in use, one more sequence is worth any eviction
LOOKAHEAD = 64  # sequences that a step looks at, or the free slots: bounds Python's time per step
HEADROOM = 16  # at most 1/HEADROOM of the pool stays free for growth: more would leave half of a small pool empty
HELD = 32  # sequences held back; behind them no step asks whether computing were sooner: bounds searches of the tree
OVERTAKES = 48  # times that a sequence may be overtaken: bounds how long it waits for the others
AHEAD_S = 0.1  # seconds of demanded copies; with more, and more than one step's, the link is behind. 0.2 is worse


class Verdict(Enum):
    """What happens to a waiting sequence in this step."""

    RUN = auto()  # it asks the cache for a lease
    DEFER = auto()  # sequences behind it may overtake it; it is judged again in the second pass
    HOLD = auto()  # it waits for the link or for room; those behind it may run if they leave it room
    STOP = auto()  # it waits for room, and so does everything behind it


@dataclass(slots=True)
class Step:
    """How far the admissions of one step have come."""

    running: Ordered[Sequence]  # have a lease and a slot; they grow meanwhile
    loading: Ordered[Sequence]  # have a lease only
    behind: bool = False  # the link is behind, or a sequence is held
    second: bool = False  # the second pass, over the deferred sequences
    closed: bool = False  # no sequence may overtake the deferred ones any more
    deferred: list[Sequence] = field(default_factory=list)  # by verdict, in order of service
    held: list[Sequence] = field(default_factory=list)  # likewise


def judge(facts: _Waiting, step: Step) -> Verdict:
    """The verdict on the next sequence in order of service; changes nothing."""
    if facts.refused:
        if step.deferred and not step.second:  # it lacks room, and the deferred come before it there
            return Verdict.DEFER
        if step.held or facts.adapter_ready or not facts.fits():
            return Verdict.STOP
        return Verdict.HOLD  # there is room, but the queue needs it: it comes free bit by bit
    if step.behind:
        if not step.second and (step.closed or facts.may_be_overtaken()):
            return Verdict.DEFER
        if facts.needs_link():
            return Verdict.HOLD
    return Verdict.RUN


class Admission:
    """The waiting sequences."""

    def __init__(self, manager: CacheManager, config: EngineConfig, turns: Turns):
        self.at: Sequence | None = None  # the one that is being judged
        self._manager = manager
        self._leases = manager.leases
        self._turns = turns
        self._max_seqs = config.max_seqs
        self._shares: dict[int, Shares] = {}  # by priority, of the sequences that have not ended
        self._length = 0
        self._epoch = -1  # of the cache, when it was last asked which adapters have come from the disk

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences in order of service."""
        for priority in sorted(self._shares, reverse=True):
            yield from self._shares[priority]

    def enqueue(self, sequence: Sequence) -> None:
        """If it raises, the sequence is not in the queue."""
        shares = self._shares.get(sequence.request.priority, Shares())
        sequence.rank = shares.rank(sequence)
        origin, begun = sequence.origin, sequence.drawn + sequence.in_flight > 0
        want = self._manager.expect(origin, sequence.tokens, sequence.reuses, sequence.place, begun)
        try:
            shares.enter(sequence)
        except BaseException:
            self._manager.unexpect(want)
            raise
        self._shares[sequence.request.priority] = shares
        sequence.want, sequence.refused = want, -1
        self._length += 1

    def dequeue(self, sequence: Sequence) -> None:
        """Takes it out: it has a lease, or has ended."""
        self._shares[sequence.request.priority].leave(sequence)
        self._length -= 1
        assert sequence.want is not None
        self._manager.unexpect(sequence.want)
        sequence.want = None

    def close(self, sequence: Sequence) -> None:
        """A sequence that is not in the queue has ended."""
        shares = self._shares[sequence.request.priority]
        shares.close(sequence)
        if not shares.live:  # nobody is ahead of anybody
            del self._shares[sequence.request.priority]

    def admit(
        self, now: float, running: Ordered[Sequence], loading: Ordered[Sequence], owed: bool = False
    ) -> Generator[Sequence, None, None]:
        """Waiting sequences that can have a lease; each has it when it is given out.

        With `owed`, only those for which running ones of other tenants should make way, or later ones after a merge.

        The first pass goes over the head of the queue, and defers sequences that may be overtaken. The
        second pass goes over those.
        """
        if not self._length:
            return
        step = Step(running, loading)
        step.behind = self._spare_s(step) < 0
        many = max(LOOKAHEAD, self._max_seqs - len(running))
        queue = dict.fromkeys(self._owed(running)) if owed else self._present()
        window = list(itertools.islice((s for s in queue if not self._not_yet(s)), many))
        yield from self._admit(window, step, now)
        step.second = True
        yield from self._admit(step.deferred, step, now)

    def _present(self) -> Iterator[Sequence]:
        """The sequences in order of service; few of those whose adapter comes from the disk."""
        if self._epoch != self._manager.epoch:
            self._epoch = self._manager.epoch
            for shares in self._shares.values():
                shares.arrive()
        for priority in sorted(self._shares, reverse=True):
            yield from self._shares[priority].present()

    def _owed(self, running: Ordered[Sequence]) -> Iterator[Sequence]:
        for priority in sorted(self._shares, reverse=True):
            yield from self._shares[priority].owed(s for s in running if s.request.priority == priority)
        passed = self._turns.passed
        if passed and running:
            last = turn(max(running, key=turn))
            head = itertools.islice(self._present(), self._max_seqs)
            yield from (sequence for sequence in head if sequence in passed and turn(sequence) < last)

    def _admit(self, sequences: Iterable[Sequence], step: Step, now: float) -> Generator[Sequence, None, None]:
        for sequence in sequences:
            self.at = sequence
            facts = _Waiting(sequence, step, self)
            verdict = judge(facts, step)
            if verdict is Verdict.RUN:
                if facts.leaves_slots() and facts.leaves_room() and self._lease(sequence, step, now):
                    if not step.second:
                        step.closed = _overtake(step.deferred)
                    yield sequence
                    step.behind = step.behind or self._spare_s(step) < 0
                    continue
                if self._manager.lacks_share(sequence.adapter):
                    continue  # others need no room in the adapters' share
                facts.refused = True
                verdict = judge(facts, step)
            if verdict is Verdict.STOP:
                return
            if verdict is Verdict.HOLD:
                step.held.append(sequence)
                step.behind = True
            else:
                step.deferred.append(sequence)
                step.closed = step.closed or facts.refused

    def _spare_s(self, step: Step) -> float:
        """Seconds of further copies that the link can take without being behind. Negative: it is behind.

        It always is while as many sequences load as can run, without those that wait for a merged adapter to go.
        """
        if len(step.loading) >= self._max_seqs and sum(map(self._turns.may_run, step.loading)) >= self._max_seqs:
            return -math.inf
        forecast = self._manager.forecast
        return max(AHEAD_S, forecast.step_s) - forecast.wait_s

    def _not_yet(self, sequence: Sequence) -> bool:
        """Its adapter is on the disk, it is not its turn, it gives way to a request that waits for host memory, a
        token is unread (preempted this instant), or its leader's prompt is not in the tree."""
        adapter = sequence.adapter
        if adapter.reading or not self._turns.may_run(sequence):
            return True
        assert sequence.want is not None
        stays = adapter.dying or adapter.pinned or not adapter.backed or sequence.want.begun  # in memory anyway
        if not stays and sequence.place > self._manager.give_way_to:
            return True
        leader = sequence.leader
        behind = leader is not None and leader.finished is None and not leader.drawn
        return sequence.in_flight > 0 or (behind and self._manager.prefix_reuse and sequence.reuses)

    def _lease(self, sequence: Sequence, step: Step, now: float) -> bool:
        """Whether the cache grants the sequence what it needs; asks again only after something changed.

        It may evict what the queue needs as far as the link has time to spare, or if few run (and with
        none running, nothing else would ever end the wait).
        """
        manager = self._manager
        if sequence.refused == manager.epoch:
            return False
        few = len(step.running) < max(1, self._max_seqs // FEW)
        spare_s = math.inf if few else self._spare_s(step)
        headroom, again = self._headroom(step), sequence.admitted > 0
        lease = self._leases.acquire(sequence.origin, sequence.tokens, sequence.reuses, headroom, again, spare_s)
        if lease is None:
            sequence.refused = manager.epoch
            return False
        manager.serve(sequence.place)
        sequence.lease = lease
        sequence.computed = lease.cached
        if not sequence.admitted:
            sequence.admitted = now
            sequence.cached = min(lease.cached, sequence.prompt_len)  # behind it are tokens of earlier attempts
            sequence.copied = min(lease.copied, sequence.cached)
            charge_prompt(sequence)
        self.dequeue(sequence)
        return True

    def _headroom(self, step: Step) -> int:
        """Blocks that must stay available to the running sequences when one more is admitted."""
        return min(len(step.running), self._manager.total // HEADROOM)

    def fit(self, step: Step, *sequences: Sequence) -> bool:
        """Whether all of these could have a lease now, if the queue needed nothing."""
        return self._leases.fit([(s.adapter, len(s.tokens)) for s in sequences], self._headroom(step))

    def leaves_slots(self, sequence: Sequence, step: Step) -> bool:
        """Whether a slot is left for each sequence of higher priority that is held, or whose copies are under way."""
        if len(self._shares) == 1:
            return True
        priority = sequence.request.priority
        first = [s for s in (*step.held, *step.loading) if s.request.priority > priority and self._turns.may_run(s)]
        return not first or len(step.running) + len(first) < self._max_seqs

    def host_helps(self, sequence: Sequence) -> bool:
        """Whether it could run at once although its adapter is missing."""
        return self._leases.gate.could_help(sequence.adapter, len(sequence.tokens))

    def needs_copy(self, sequence: Sequence) -> bool:
        """Whether it would wait for copies of its prefix if it got a lease now."""
        return self._leases.needs_copy(sequence.origin, sequence.tokens, sequence.reuses)


class _Waiting:
    """What `judge` asks about a sequence, only when it matters: some answers search the tree."""

    def __init__(self, sequence: Sequence, step: Step, queue: Admission):
        self.refused = False  # it asked for a lease in this pass, and there was no room
        self._sequence = sequence
        self._step = step
        self._queue = queue

    @property
    def adapter_ready(self) -> bool:
        return self._sequence.adapter.ready

    def may_be_overtaken(self) -> bool:
        """Whether sequences behind it may go first."""
        deferred, sequence = self._step.deferred, self._sequence
        if deferred and deferred[0].request.priority > sequence.request.priority:
            return True  # or it would overtake one of higher priority
        return sequence.overtaken < OVERTAKES and not self._finds_all()

    def needs_link(self) -> bool:
        """Whether it would wait for copies while the link is behind: of its adapter, or, behind others, of its prefix.

        An activated LoRA's request computes what its adapter does not act on meanwhile; but behind others,
        its adapter's copy comes after theirs.
        """
        sequence, held = self._sequence, len(self._step.held)
        if not self.adapter_ready and not self._queue.host_helps(sequence):
            return held > 0 or not sequence.unadapted
        if not held or self._finds_all():
            return False
        return held >= HELD or self._queue.needs_copy(sequence)

    def fits(self) -> bool:
        """Whether there would be room for it if the queue needed nothing."""
        return self._queue.fit(self._step, self._sequence)

    def leaves_slots(self) -> bool:
        """Whether those of higher priority that wait for the link or for copies still find their slots."""
        return self._queue.leaves_slots(self._sequence, self._step)

    def leaves_room(self) -> bool:
        """Whether it leaves room for the first sequence that is held."""
        return not self._step.held or self._queue.fit(self._step, self._step.held[0], self._sequence)

    def _finds_all(self) -> bool:
        """Whether its adapter, and what was known of its prompt when it was queued, is on the device."""
        want = self._sequence.want
        assert want is not None
        return self.adapter_ready and all(node.on_device for node in want.nodes[1:])


def _overtake(deferred: Ordered[Sequence]) -> bool:
    """One more has overtaken these; whether one of them may not be overtaken again."""
    for sequence in deferred:
        sequence.overtaken += 1
    return any(sequence.overtaken >= OVERTAKES for sequence in deferred)
