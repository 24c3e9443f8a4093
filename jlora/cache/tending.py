"""What the cache does between requests: thresholds, backups, fetching ahead. No jax.

    every monitor_s:
        use above `upper`        evict the least valuable candidates until below     (FASTLIBRA 5.3)
        use below `lower`        fetch the most valuable roots while the link idles
        host full, link idle     back up the coldest, over copies of what stays

The backup is why eviction never has to write: what is about to leave has its copy already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jlora.cache.manager import CacheManager
from jlora.cache.policies import Pulse
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node

BACKUPS = 16, 512  # blocks per round, at least and at most
FETCHES = 64  # nodes per round, at most: each is a copy of its own, started while a step waits
BACKUP_SHARE = 0.5  # of a round's time that backups may take of the link
REKEYS = 500  # nodes per round: a tree of a million must not hold up a step


class Tending:
    """The monitor of one cache."""

    def __init__(self, manager: CacheManager, every_s: float):
        self._manager = manager
        self._every = every_s
        self._next = 0.0
        self._stale: Iterator[Node] = iter(())  # nodes whose keys are to be made again

    def due(self, now: float) -> bool:
        """Whether a round should be made."""
        return now >= self._next

    def round(self, now: float, running: int) -> None:
        """One round of the monitor; the copies it decides go out with the next plan."""
        self._next = now + self._every
        manager, policy = self._manager, self._manager.policy
        nodes = list(manager.adapters.values())
        pulse = Pulse(running, nodes, sum(1 for node in nodes if node.device))
        if policy.tick(pulse, manager.cells.clock()):  # the clock of its visits
            self._stale = self._every_node()
        for node in itertools.islice(self._stale, REKEYS):
            manager.cells.offer(node)
        self._evict_above(policy.upper)
        self._fetch_below(policy.lower)
        if not policy.writes_back and manager.prefix_reuse:
            self._back_up()

    def _every_node(self) -> Iterator[Node]:
        """Lazily; a node that comes or goes meanwhile has the right key, or none. Adapters first: they are few."""
        adapters = list(self._manager.adapters.values())
        yield from adapters
        for adapter in adapters:
            yield from self._manager.tree.below(adapter)

    def _evict_above(self, upper: float | None) -> None:
        cells = self._manager.cells
        while upper is not None and cells.device.total - cells.device.free > upper * cells.device.total:
            node = cells.worst()  # never what the queue needs: free room is not worth that
            if node is None:
                return
            cells.evict(node)

    def _fetch_below(self, lower: float) -> None:
        """Into free blocks only: nothing that is there has to leave for a guess; as much as the link carries."""
        cells, meter = self._manager.cells, self._manager.policy.meter
        if cells.traffic.backlog["in"]:
            return
        seconds = 0.0
        for _ in range(FETCHES):
            below = cells.device.total - cells.device.free < lower * cells.device.total
            node = self._dearest() if below and seconds < self._every else None
            if node is None:
                return
            cells.bring(cells.adapter_of(node), [node], demand=False)
            seconds += meter.load_s(node.kind, node.size)

    def _dearest(self) -> Node | None:
        """The most valuable root that there is room for; under a fixed share each part has its own."""
        cells = self._manager.cells
        kinds = (None,) if self._manager.policy.share is None else (ADAPTER, KV)
        roots = [root for kind in kinds if (root := cells.best_root(kind)) is not None]
        fitting = [root for root in roots if len(root.host) <= cells.device.room(root.kind)]
        return max(fitting, key=cells.value, default=None)

    def _back_up(self) -> None:
        """Copies the coldest leaves out while nothing else uses the link."""
        cells = self._manager.cells
        if cells.traffic.backlog["out"] or not cells.bare:
            return
        rounds: dict[AdapterNode, list[Node]] = {}
        for node in cells.coldest(self._batch()):
            adapter = cells.adapter_of(node)
            if adapter.dying or node in rounds.get(adapter, ()):
                continue
            if not cells.make_host_room(1 + sum(map(len, rounds.values())), node):
                break
            rounds.setdefault(adapter, []).append(node)
        for adapter, nodes in rounds.items():
            cells.save(adapter, nodes)

    def _batch(self) -> int:
        """Blocks that the link carries in its part of a round, by what copies were measured to take."""
        least, most = BACKUPS
        load_s = self._manager.policy.meter.load_s
        each = (load_s(KV, most) - load_s(KV, 1)) / (most - 1)
        return max(least, min(most, int(BACKUP_SHARE * self._every / max(each, 1e-9))))
