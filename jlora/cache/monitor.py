"""What the cache does between requests: keep room free, fetch ahead, back up. No jax.

    every monitor_s:
        use above `upper`        evict the least valuable candidates until below     (FASTLIBRA 5.3)
        use below `lower`        prefetch the most valuable roots while the link idles
        link idle                copy the coldest KV to the host, in place of copies of KV that stays here
    every second:
        memory short             the host tier grows no further

Thanks to the backups, a node usually has a host copy before it is evicted, so an eviction never writes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping

from jlora.cache.policies import Pulse
from jlora.cache.residency import Residency
from jlora.cache.tree import KV, AdapterNode, Node, adapter_of

log = logging.getLogger(__name__)

LEAST_BACKUPS, MOST_BACKUPS = 16, 512  # blocks per round: for a slow link, and to bound Python's time in a step
BACKUP_SHARE = 0.5  # of a round's time that backups may take of the link
FETCHES = 64  # nodes per round: each is a copy of its own, which bounds Python's time in a step
LOOK_S = 1.0  # between two looks at the host's memory
REKEYS = 500  # nodes per round: bounds Python's time in a step, whatever the tree's size


class Monitor:
    """The rounds of one cache."""

    def __init__(self, cells: Residency, every_s: float, backs_up: bool, spare: Callable[[], int] | None):
        self._cells = cells
        self._adapters: Mapping[int, AdapterNode] = cells.tree.adapters
        self._every = every_s
        self._backs_up = backs_up
        self._spare, self._told = spare, False
        self._next = self._look = 0.0
        self._stale: Iterator[Node] = iter(())  # nodes whose keys are to be made again

    def tend(self, now: float, running: int) -> None:
        """Makes a round if one is due, with so many sequences in the batch."""
        if now < self._next:
            return
        self._next = now + self._every
        self._bound_host(now)
        policy = self._cells.policy
        nodes = list(self._adapters.values())
        pulse = Pulse(running, nodes, sum(1 for node in nodes if node.device))
        if policy.tick(pulse, self._cells.clock()):  # the clock of its visits
            self._stale = self._every_node()
        for node in itertools.islice(self._stale, REKEYS):
            self._cells.candidates.offer(node)
        self._evict_above(policy.upper)
        self._fetch_below(policy.lower)
        if self._backs_up:
            self._back_up()

    def _bound_host(self, now: float) -> None:
        """Blocks whose memory was touched stay. The others are for use as far as the machine has memory for them.

        There is always room for the largest adapter: a request would wait for it without end.
        """
        host = self._cells.host
        touched, before = host.total - host.fresh, host.total
        if self._spare is None or now < self._look or touched == host.most:
            return
        self._look = now + LOOK_S
        largest = max((node.size for node in self._adapters.values()), default=0)
        host.bound(max(self._spare(), largest - touched))
        if host.total > before:
            self._cells.epoch += 1
        if host.total < host.most and not self._told:
            log.warning("memory is short: the host tier has %d blocks of %d for now", host.total, host.most)
            self._told = True

    def _every_node(self) -> Iterator[Node]:
        """All nodes, lazily, adapters first. A node that comes meanwhile has the right key already."""
        adapters = list(self._adapters.values())
        yield from adapters
        for adapter in adapters:
            yield from self._cells.tree.below(adapter)

    def _evict_above(self, upper: float | None) -> None:
        cells = self._cells
        while upper is not None and cells.device.total - cells.device.free > upper * cells.device.total:
            node = cells.candidates.victim()  # nothing that the queue needs: free room is not worth that
            if node is None:
                return
            cells.evict(node)

    def _fetch_below(self, lower: float) -> None:
        """Fetches into free blocks, as much as the link carries in a round. Evicts nothing for a guess."""
        cells, meter = self._cells, self._cells.policy.meter
        if cells.traffic.backlog["in"]:
            return
        seconds = 0.0
        for _ in range(FETCHES):
            below = cells.device.total - cells.device.free < lower * cells.device.total
            node = cells.best_root() if below and seconds < self._every else None
            if node is None:
                return
            cells.bring(adapter_of(node), [node], demand=False)
            seconds += meter.load_s(node.kind, node.size)

    def _back_up(self) -> None:
        """Copies the coldest leaves out while nothing else uses the link."""
        cells = self._cells
        if cells.traffic.backlog["out"] or not cells.bare:
            return
        rounds: dict[AdapterNode, list[Node]] = {}
        for node in cells.candidates.coldest(self._batch()):
            adapter = adapter_of(node)
            if adapter.dying or node in rounds.get(adapter, ()):
                continue
            if not cells.make_host_room(1 + sum(map(len, rounds.values())), node):
                break
            rounds.setdefault(adapter, []).append(node)
        for adapter, nodes in rounds.items():
            cells.save(adapter, nodes)

    def _batch(self) -> int:
        """Blocks that the link carries in its part of a round, by what copies were measured to take."""
        load_s = self._cells.policy.meter.load_s
        each = (load_s(KV, MOST_BACKUPS) - load_s(KV, 1)) / (MOST_BACKUPS - 1)
        return max(LEAST_BACKUPS, min(MOST_BACKUPS, int(BACKUP_SHARE * self._every / max(each, 1e-9))))
