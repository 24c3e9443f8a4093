"""Fair shares between the tenants of one priority: virtual token counters. Plain Python, no jax, no clock.

A counter adds up what a tenant has received. The tenant with the smallest is served next, and within a
tenant the oldest sequence. A prompt is charged at its first admission without its cached tokens, and an
output token when it is drawn. So tokens that are computed again, after a preemption or because another replica
gave the request up, are not charged again.

A tenant that begins to wait has its counter lifted to the least of those that wait: no tenant saves up
service while away. Then the service of two tenants that both wait for long differs by a bound that does
not grow with time. (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, Algorithm 2.)
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter

from jlora.cache.tree import AdapterNode
from jlora.engine.plan import Account, Sequence

PROMPT, OUTPUT = 1.0, 2.0  # cost of a prompt token and of an output token, as in the paper
# A tenant with fewer slots than its share takes more until it has received this much more than the other. Without it,
# a burst would wait; the cost of a full batch's answers is of this size, and so is the paper's bound.
AHEAD = 16384.0
IDLE = 1024  # tenants without a live sequence whose counters are kept, those with the largest
LINE = attrgetter("line")


def account_of(sequence: Sequence) -> Account:
    """Its tenant's, once it has been queued."""
    assert sequence.account is not None
    return sequence.account


def turn(sequence: Sequence) -> tuple[int, float, tuple[float, int]]:
    """Its turn in the order of service, smaller ones first: higher priority, then tenant, then arrival."""
    return -sequence.request.priority, account_of(sequence).served, sequence.line


def charge_prompt(sequence: Sequence) -> None:
    """The sequence is admitted for the first time. One that goes on with a request has been charged elsewhere."""
    sequence.paid = 0.0 if sequence.resumed else PROMPT * (sequence.prompt_len - sequence.cached)
    account_of(sequence).served += sequence.paid


def refund_prompt(sequence: Sequence) -> None:
    """The sequence leaves before a token of it was computed; if it comes back, it is admitted anew."""
    account_of(sequence).served -= sequence.paid
    sequence.paid = 0.0


def charge_output(sequence: Sequence) -> None:
    """The sequence, which has been queued, has one output token more."""
    assert sequence.account is not None
    sequence.account.served += OUTPUT


def owes(one: Sequence, other: Sequence) -> bool:
    """Whether a running sequence makes way for one of a tenant that runs fewer and has received hardly more.

    After the exchange its tenant still runs as many as the other, so it is never reversed. A prompt that is being
    computed does not make way: its KV is not in the prefix cache yet.
    """
    if not one.first_token or one.request.priority != other.request.priority:
        return False
    richer, poorer = account_of(one), account_of(other)
    return richer.running > poorer.running + 1 and poorer.served - other.paid <= richer.served + AHEAD


class Shares:
    """The tenants of one priority."""

    def __init__(self) -> None:
        self.live = 0  # sequences that have not ended
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[str, Account] = {}  # those with queued sequences
        self._line: list[Sequence] = []  # the queued sequences of all tenants, by arrival
        self._away: dict[AdapterNode, dict[Sequence, None]] = {}  # those whose adapter comes from the disk
        self._level = 0.0  # the counter of the tenant that was the last to wait
        self._limit = 2 * IDLE  # accounts; with more, those that do not matter are forgotten

    def __len__(self) -> int:
        """Tenants whose counters are kept."""
        return len(self._accounts)

    def __iter__(self) -> Iterator[Sequence]:
        """The queued sequences in order of service."""
        if len(self._waiting) == 1:
            return iter(next(iter(self._waiting.values())).line)
        return _in_turn([(account.served, account.line) for account in self._waiting.values()])

    def present(self) -> Iterator[Sequence]:
        """The same without those whose adapter comes from the disk, if one tenant waits.

        Between several, their prompts count as if they were admitted.
        """
        if len(self._waiting) == 1:
            return iter(next(iter(self._waiting.values())).here)
        return iter(self)

    def arrive(self) -> None:
        """Some adapters may have come from the disk."""
        for adapter in [adapter for adapter in self._away if not adapter.reading]:
            for sequence in self._away.pop(adapter):
                bisect.insort(account_of(sequence).here, sequence, key=LINE)

    def owed(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        """Queued sequences for which running ones of this priority's other tenants should make way (`owes`).

        Those whose adapter comes from the disk hold up no other of their tenant.
        """
        if len(self._accounts) < 2:
            return iter(())
        others = {account_of(s) for s in running}
        most = max((account.running for account in others), default=0)
        richest = max((account.served for account in others), default=0.0)
        short = [(a, max(0, (most - a.leased) // 2)) for a in self._waiting.values() if a.served <= richest + AHEAD]
        able = [(a.served, list(islice((s for s in a.line if not s.adapter.reading), count))) for a, count in short]
        return _in_turn((served, line) for served, line in able if line)

    def rank(self, sequence: Sequence) -> int:
        """Its order, moved between the ranks of the queued sequences before and behind it in line."""
        at = bisect.bisect_left(self._line, sequence.line, key=LINE)
        rank = sequence.order
        if at:
            rank = max(rank, self._line[at - 1].rank)
        return min(rank, self._line[at].rank) if at < len(self._line) else rank

    def enter(self, sequence: Sequence) -> None:
        """Queues a sequence: a new one, or one that was preempted."""
        tenant = sequence.request.tenant
        account = sequence.account or self._accounts.get(tenant) or Account()
        bisect.insort(account.line, sequence, key=LINE)
        bisect.insort(self._line, sequence, key=LINE)
        if sequence.adapter.reading:
            self._away.setdefault(sequence.adapter, {})[sequence] = None
        else:
            bisect.insort(account.here, sequence, key=LINE)
        if tenant not in self._waiting:
            account.served = max(account.served, self._floor)
            self._waiting[tenant] = account
        if sequence.account is None:
            sequence.account = self._accounts[tenant] = account
            account.live += 1
            self.live += 1
        if len(self._accounts) > self._limit:
            self._forget()

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue."""
        account, away = account_of(sequence), self._away.get(sequence.adapter, {})
        lines = [account.line, self._line]
        if sequence not in away:
            lines.append(account.here)
        elif len(away) > 1:
            del away[sequence]
        else:
            del self._away[sequence.adapter]
        for line in lines:
            del line[bisect.bisect_left(line, sequence.line, key=LINE)]
        if not account.line:
            del self._waiting[sequence.request.tenant]
            self._level = account.served

    def close(self, sequence: Sequence) -> None:
        """The sequence, which is not queued, has ended."""
        account_of(sequence).live -= 1
        self.live -= 1

    @property
    def _floor(self) -> float:
        """The least counter that a tenant may begin to wait with."""
        return min((account.served for account in self._waiting.values()), default=self._level)

    def _forget(self) -> None:
        """Forgets idle tenants whose counters would be lifted anyway, and the least of the others if there are many."""
        floor = self._floor
        idle = [(a.served, tenant) for tenant, a in self._accounts.items() if not a.live]
        kept = heapq.nlargest(IDLE, (each for each in idle if each[0] > floor))
        for tenant in {tenant for _, tenant in idle} - {tenant for _, tenant in kept}:
            del self._accounts[tenant]
        self._limit = 2 * (len(self._accounts) + IDLE)


def _in_turn(lines: Iterable[tuple[float, list[Sequence]]]) -> Iterator[Sequence]:
    """The sequences of several tenants, by counter, each charged as if it were admitted when its turn comes."""
    heads = [(served, line[0].line, 0, line) for served, line in lines]
    heapq.heapify(heads)
    while heads:
        served, _, at, line = heads[0]
        sequence = line[at]
        yield sequence
        if at + 1 == len(line):
            heapq.heappop(heads)
            continue
        served += 0.0 if sequence.paid or sequence.resumed else PROMPT * sequence.prompt_len
        heapq.heapreplace(heads, (served, line[at + 1].line, at + 1, line))
