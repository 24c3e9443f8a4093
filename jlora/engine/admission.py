"""The queue, and who of it gets what it needs of the cache next. Plain Python, no jax, no clock.

Order of service: higher priority first, then arrival. While the link is behind with the copies that
requests wait for, those that find all they need on the device go first: they cost neither a copy nor
computing again, and what they came for has not left for others yet. When requests come faster than they
are served that decides how many are served at all. Nobody is passed so by more than `PASSES`, nor by a
lower priority.

A sequence that is admitted has a lease. Before that it holds nothing, but its want tells the cache what
it will need, and when.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Generator
from collections.abc import Sequence as Ordered

from jlora.cache.manager import CacheManager
from jlora.config import EngineConfig
from jlora.engine.plan import Sequence

FEW = 16  # a batch with less than this part of its slots in use is worth filling, whatever it costs
LOOKAHEAD = 64  # sequences that admission looks at, or as many as there are free slots
HELD = 32  # sequences stay in the queue for the link, and nobody behind them is asked if computing were sooner
PASSES = 48  # sequences that may go ahead of one because they find all they need
AHEAD_S = 0.1  # of copies that requests wait for: with more, and more than until the next plan, the link is behind


class Admission:
    """The waiting sequences.

    Args:
        running, loading: the scheduler's sequences that hold a lease, read here and changed there.

    Attributes:
        pace: seconds between this step and the last, 0 if that had no work.
    """

    def __init__(
        self, manager: CacheManager, config: EngineConfig, running: Ordered[Sequence], loading: Ordered[Sequence]
    ):
        self.pace = 0.0
        self._manager = manager
        self._leases = manager.leases
        self._max_seqs = config.max_seqs
        self._running, self._loading = running, loading
        self._queue: list[tuple[int, Sequence]] = []  # by place

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, sequence: Sequence) -> None:
        """Puts it into its place."""
        sequence.want = self._manager.expect(sequence.origin, sequence.tokens, sequence.reuses, sequence.place)
        sequence.refused = -1
        bisect.insort(self._queue, (sequence.place, sequence))

    def dequeue(self, sequence: Sequence) -> None:
        """Takes it out: it has a lease, or has ended."""
        del self._queue[bisect.bisect_left(self._queue, sequence.place, key=lambda entry: entry[0])]
        assert sequence.want is not None
        self._manager.unexpect(sequence.want)
        sequence.want = None

    def admit(self, now: float) -> Generator[Sequence, None, None]:
        """Waiting sequences that can have a lease, and have it when they are given out.

        While the link is behind, those that find all they need have their turn first. Then, or when the room is
        not made yet, a sequence whose adapter is not there stays in the queue, where it holds no blocks, and so
        does one behind it whose prefix would be copied: it has the older claim to the link. Those that need no
        copy go ahead, as far as they leave room for the first that stays.
        """
        many = max(LOOKAHEAD, self._max_seqs - len(self._running))
        window = list(itertools.islice((s for _, s in self._queue if not self._not_yet(s)), many))
        later: list[Sequence] = []  # whose turn is after that of the others
        closed = False  # nobody else may go ahead of them in this step
        held: list[Sequence] = []
        behind = self._spare_s() < 0
        for turn, sequence in enumerate(itertools.chain(window, later)):
            first = turn < len(window)
            if first and behind and (closed or self._can_be_passed(sequence, later)):
                later.append(sequence)
            elif behind and self._needs_link(sequence, len(held)):
                held.append(sequence)
            elif (not held or self._fit(held[0], sequence)) and self._lease(sequence, now):
                if first:
                    closed = _pass(later)
                yield sequence
                behind = behind or self._spare_s() < 0
            elif self._manager.lacks_share(sequence.adapter):
                continue  # others need no room in the adapters' share
            elif first and later:  # what it lacks is room, and those before it come before it there
                later.append(sequence)
                closed = True
            elif held or sequence.adapter.ready or not self._fit(sequence):
                return
            else:  # there is room for it, but the queue needs that: it becomes free bit by bit
                held.append(sequence)
                behind = True

    def _can_be_passed(self, sequence: Sequence, later: Ordered[Sequence]) -> bool:
        """Whether others may go ahead of it; `later`: those before it that have been passed."""
        if later and later[0].request.priority > sequence.request.priority:
            return True  # or it would pass a higher one
        return sequence.passed < PASSES and not self._finds_all(sequence)

    def _finds_all(self, sequence: Sequence) -> bool:
        """Whether its adapter, and what was known of its prompt when it was queued, is on the device."""
        assert sequence.want is not None
        return sequence.adapter.ready and all(node.on_device for node in sequence.want.nodes[1:])

    def _spare_s(self) -> float:
        """Seconds of copies that the link takes before it has enough to do until there is another plan, and some.

        Below 0 it is behind; none are left when as many wait as can run.
        """
        if len(self._loading) >= self._max_seqs:
            return -math.inf
        return max(AHEAD_S, self.pace) - self._manager.forecast.wait_s

    def _needs_link(self, sequence: Sequence, others: int) -> bool:
        """Whether it would wait for its adapter, or with `others` before it that do for its prefix.

        An activated LoRA's request computes what its adapter does not act on meanwhile; but its adapter's
        copy would come after those of the others.
        """
        if not sequence.adapter.ready:
            return others > 0 or not sequence.unadapted
        if not others or self._finds_all(sequence):
            return False
        return others >= HELD or self._leases.needs_copy(sequence.origin, sequence.tokens, sequence.reuses)

    def _fit(self, *sequences: Sequence) -> bool:
        return self._leases.fit([(s.adapter, len(s.tokens)) for s in sequences], self._headroom)

    @property
    def _headroom(self) -> int:
        """Blocks that must stay available to those who run when one more is admitted."""
        return min(len(self._running), self._manager.total // 16)

    def _not_yet(self, sequence: Sequence) -> bool:
        """A token is unread (preempted this instant), or its leader's prompt is not in the tree yet."""
        leader = sequence.leader
        behind = leader is not None and leader.finished is None and len(leader.tokens) == leader.prompt_len
        return sequence.in_flight > 0 or (behind and self._manager.prefix_reuse and sequence.reuses)

    def _lease(self, sequence: Sequence, now: float) -> bool:
        """Whether the cache grants the sequence what it needs; asks again only after something changed.

        What the queue needs may leave for it as far as the link has time to spare, or if few run: then one
        more in the batch is worth any copy (and with none running nothing else would ever end the wait).
        """
        manager = self._manager
        if sequence.refused == manager.epoch:
            return False
        few = len(self._running) < max(1, self._max_seqs // FEW)
        spare_s = math.inf if few else self._spare_s()
        again = sequence.admitted > 0
        lease = self._leases.acquire(sequence.origin, sequence.tokens, sequence.reuses, self._headroom, again, spare_s)
        if lease is None:
            sequence.refused = manager.epoch
            return False
        manager.serve(sequence.place)
        sequence.lease = lease
        sequence.computed = lease.cached
        if not sequence.admitted:
            sequence.admitted = now
            sequence.cached = lease.cached
        self.dequeue(sequence)
        return True


def _pass(later: Ordered[Sequence]) -> bool:
    """One more has gone ahead of these; whether one of them has now been passed as often as may be."""
    for sequence in later:
        sequence.passed += 1
    return any(sequence.passed >= PASSES for sequence in later)
