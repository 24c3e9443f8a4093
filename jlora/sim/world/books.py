"""The scheduler's books, as the world reckons them: slots, tenants' counters, and who gives way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jlora.engine.plan import Account, Sequence
from jlora.engine.ports import Scheduler
from jlora.engine.scheduler import CALM

OUTPUT = 2.0  # what an output token costs, at least: twice a prompt token
ROUNDING = 1e-6  # of sums of costs


class Books:
    """Looks at a scheduler between two steps. Each check raises AssertionError; `found` keeps what calls have shown."""

    def __init__(self, scheduler: Scheduler, found: list[AssertionError]):
        self._scheduler: Any = scheduler  # the world looks behind the protocol
        self._found = found
        self._withheld, self._commits = 0, 0  # slots, and commits since their number changed
        retract, commit = self._scheduler.retract, self._scheduler.commit

        def retracted() -> bool:
            running = list(self._scheduler.running)
            gave_way = retract()
            if gave_way:
                self._last_gave_way(running)
            return gave_way

        def committed(*args: Any) -> Any:
            self._commits += 1
            return commit(*args)

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
