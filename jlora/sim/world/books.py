"""The scheduler's books, as the world reckons them: slots, tenants' counters, who gives way, and who is passed over."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jlora.cache.lease import Lease
from jlora.cache.manager import CacheManager
from jlora.engine.plan import Account, Sequence
from jlora.engine.ports import Scheduler
from jlora.engine.scheduler import CALM

OUTPUT = 2.0  # what an output token costs, at least: twice a prompt token
PASSED = 48  # others that may be served before a request whose turn it is, beside those that find a free slot
ROUNDING = 1e-6  # of sums of costs


class Books:
    """Looks at a scheduler between two steps. Each check raises AssertionError; `found` keeps what calls have shown."""

    def __init__(self, scheduler: Scheduler, found: list[AssertionError]):
        self._scheduler: Any = scheduler  # the world looks behind the protocol
        self._found = found
        self._withheld, self._commits = 0, 0  # slots, and commits since their number changed
        self._passed: Counter[Sequence] = Counter()  # queued ones -> how many behind them were served meanwhile
        self._bypass: list[Lease] = []  # of requests that bypass the prefix cache, with the last step
        retract, commit, queue = self._scheduler.retract, self._scheduler.commit, self._scheduler.queue
        dequeue = queue.dequeue

        def retracted() -> bool:
            running = list(self._scheduler.running)
            gave_way = retract()
            if gave_way:
                self._last_gave_way(running)
            return gave_way

        def committed(*args: Any) -> Any:
            self._commits += 1
            return commit(*args)

        def dequeued(sequence: Sequence) -> None:
            if sequence.lease is not None:
                self._granted(sequence)
            self._passed.pop(sequence, None)
            dequeue(sequence)

        vars(queue)["dequeue"] = dequeued
        vars(self._scheduler)["retract"], vars(self._scheduler)["commit"] = retracted, committed

    def check_slots(self) -> None:
        """Every slot is free, withheld or taken; one that is withheld comes back."""
        scheduler = self._scheduler
        taken = [sequence.slot for sequence in scheduler.running]
        slots = sorted((*scheduler._slots, *scheduler._withheld, *taken))
        assert slots == list(range(scheduler.config.max_seqs)), f"slots are lost or doubled: {slots}"
        if len(scheduler._withheld) != self._withheld:
            self._withheld, self._commits = len(scheduler._withheld), 0
        assert not self._withheld or self._commits <= CALM, f"a slot is withheld for more than {CALM} calm steps"

    def check_bypass(self) -> None:
        """A request that bypasses the prefix cache reads none of it, and leaves nothing there."""
        live = [s for s in (*self._scheduler.running, *self._scheduler.loading) if s.request.bypass_prefix_cache]
        leases = [sequence.lease for sequence in live if sequence.lease is not None]
        for lease in (*self._bypass, *leases):
            assert not lease.path, "the tree has KV of a request that bypasses it"
        self._bypass = leases

    def check_tree(self, manager: CacheManager) -> None:
        """Nor does the tree have their blocks in another way."""
        if self._bypass:
            nodes = (node for adapter in manager.adapters.values() for node in manager.tree.below(adapter))
            own = {block for lease in self._bypass for block in lease.blocks}
            assert own.isdisjoint(block for node in nodes for block in node.device), "the tree has blocks of a bypass"

    def check_order(self) -> None:
        """What runs and what waits is in order of priority, and the tenant that has received least comes next."""
        running = [sequence.request.priority for sequence in self._scheduler.running]
        assert running == sorted(running, reverse=True), f"priorities run in the order {running}"
        queue = list(self._scheduler.queue)
        waiting = [sequence.request.priority for sequence in queue]
        assert waiting == sorted(waiting, reverse=True), f"priorities wait in the order {waiting}"
        for priority in set(waiting):
            same = [sequence for sequence in queue if sequence.request.priority == priority]
            least = min(_served(sequence) for sequence in same)
            assert _served(same[0]) == least, "a tenant comes next that has received more than another"

    def check_shares(self) -> None:
        """The counters of each tenant are those of its sequences."""
        scheduler = self._scheduler
        live = [sequence for sequences in scheduler._requests.values() for sequence in sequences]
        queued = set(scheduler.queue)
        assert len(scheduler.queue) == len(queued), "the queue's length is wrong"
        assert all((sequence.want is not None) == (sequence in queued) for sequence in live), "a want without its place"
        assert scheduler.queue._shares.keys() == {sequence.request.priority for sequence in live}, "a share is left"
        for account, own in _by_account(live):
            assert account.live == len(own), f"a tenant has {len(own)} sequences, not {account.live}"
            runs = sum(sequence.slot >= 0 for sequence in own)
            assert account.running == runs, f"a tenant runs {runs} sequences, not {account.running}"
            waits = sorted((sequence for sequence in own if sequence in queued), key=lambda sequence: sequence.line)
            assert account.line == waits, "a tenant's line is not that of its sequences"
            cost = sum(sequence.paid + OUTPUT * sequence.drawn for sequence in own)
            assert account.served >= cost - ROUNDING, f"a tenant was charged {account.served:g} for at least {cost:g}"

    def check_empty(self) -> None:
        """No request is live."""
        scheduler = self._scheduler
        left = (scheduler._requests, scheduler.running, scheduler.loading, scheduler._ahead, scheduler.queue._shares)
        assert not any(left), f"sequences are left: {left}"

    def _granted(self, sequence: Sequence) -> None:
        """It has a lease: nobody before it may be passed over for ever, unless its adapter comes from the disk."""
        assert sequence.account is not None
        served = sequence.account.served - (0.0 if sequence.drawn else sequence.paid)  # before it was charged
        turn = (-sequence.request.priority, served, sequence.line)
        most = PASSED + self._scheduler.config.max_seqs
        for other in itertools.chain.from_iterable(self._scheduler._requests.values()):
            if other is sequence or other.want is None or other.adapter.reading:
                continue
            if (-other.request.priority, _served(other), other.line) < turn:
                self._passed[other] += 1
                if self._passed[other] > most:
                    what = f"{other.request.id} is within its share, and {self._passed[other]} behind it were served"
                    self._found.append(AssertionError(what))

    def _last_gave_way(self, running: list[Sequence]) -> None:
        """Memory was short: the one that comes last by priority, its tenant's counter and arrival gave way."""
        last = max(running, key=lambda s: (-s.request.priority, _served(s), s.line))
        if last.slot >= 0:
            self._found.append(AssertionError(f"{last.request.id} comes last, and another sequence gave way"))


def _served(sequence: Sequence) -> float:
    assert sequence.account is not None
    return sequence.account.served


def _by_account(sequences: Iterable[Sequence]) -> Iterable[tuple[Account, list[Sequence]]]:
    found: dict[int, tuple[Account, list[Sequence]]] = {}
    for sequence in sequences:
        assert sequence.account is not None, "a live sequence has no tenant"
        found.setdefault(id(sequence.account), (sequence.account, []))[1].append(sequence)
    tenants = Counter((own[0].request.priority, own[0].request.tenant) for _, own in found.values())
    assert all(count == 1 for count in tenants.values()), "a tenant has two counters of one priority"
    return found.values()
