"""A replica of a service under a virtual clock: it learns of an adapter with the first request for it. No jax."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jlora.cache.policies import Policy
from jlora.cache.tree import AdapterNode
from jlora.cluster.routing.ways import PATH_BPS, PEER_BPS, learned
from jlora.cluster.view import ReplicaView
from jlora.engine.records import NewAdapter
from jlora.engine.shelf import Reading
from jlora.sim.replica import Replica, ReplicaSpec
from jlora.sim.uplink import Coming, Transfer, Uplink
from jlora.types import Request, TokenEvent

TIERS_S = 0.1  # how old the tiers in a message may be: a look at all adapters takes time


class Member(Replica):
    """One of many.

    Attributes:
        fetched: blocks fetched so far; received: requests so far.
        most, most_blocks: the most adapters in memory at once, and their blocks; those being fetched count.
        news: adapters may have come or gone since the last look at the tiers.

    Args:
        spec: its `adapters` are the sizes of those that the service has; it begins with none of them.
        way: begins an adapter's way to this host at a time.
    """

    def __init__(self, name: str, spec: ReplicaSpec, policy: Policy, way: Callable[[int, float], Coming]):
        self.name = name
        self.uplink = Uplink()
        self.fetched = self.received = 0
        self.most = self.most_blocks = 0
        self.news = False
        self.indices: dict[int, int] = {}  # uid -> index
        self._uids: dict[int, int] = {}  # index -> uid of the version in service
        self._asked: deque[int] = deque()  # to fetch when nothing more urgent is
        self._ranks: tuple[Sequence[int], dict[int, int]] = (), {}  # by index, and by uid
        self._sizes = spec.adapters
        self._way = way
        self._reading: tuple[Coming, Reading, float] | None = None  # since when
        self._bps = {True: 0.0, False: 0.0}  # from peers, and from paths; 0: not measured yet
        self._tiers: dict[str, str] = {}
        self._looked = -math.inf
        super().__init__(replace(spec, adapters=()), policy)

    def learn(self, adapter: int) -> None:
        """Registers an adapter, unless it is known."""
        name = str(adapter)
        if not self.engine.adapters.has(name):
            self.engine.adapters.register(self._new(adapter))
            uid = self.engine.adapters.get(name).uid
            self.indices[uid] = adapter
            self._uids[adapter] = uid
            if self._ranks[0]:
                self._ranks[1][uid] = self._ranks[0][adapter]

    def preload(self, adapter: int) -> None:
        """Puts an adapter into its memory at no cost, before the clock starts."""
        self.learn(adapter)
        adapters = self.engine.adapters
        adapters.read_in(self._new(adapter), pinned=False)
        self._stores()

    def ask(self, adapter: int) -> None:
        """Fetches an adapter when nothing more urgent is fetched."""
        self.learn(adapter)
        self._asked.append(adapter)
        self._settled = False

    def killed(self, at: float) -> None:
        """It ends: what it fetches takes no part of another's link any more."""
        if self._reading is not None and isinstance(coming := self._reading[0], Transfer):
            coming.uplink.end(coming, at)

    def lost(self, other: Member, at: float) -> None:
        """Another one has ended: what is on its way from there begins anew, from the next holder or the path."""
        if self._reading is None:
            return
        coming, reading, _ = self._reading
        if isinstance(coming, Transfer) and coming.uplink is other.uplink and coming.ends > at:
            self._reading = self._way(self.indices[reading.node.uid], at), reading, at

    def has(self, adapter: int) -> bool:
        """Whether the adapter is in its memory."""
        uid = self._uids.get(adapter)
        return uid is not None and self._here(uid)

    def forget(self, adapter: int) -> None:
        """Drops an adapter when its last request has ended; one that is on its way stays."""
        if self.has(adapter):
            self.engine.adapters.remove(str(adapter))
            del self._uids[adapter]
            self.news = True

    def _here(self, uid: int) -> bool:
        node = self.manager.adapters.get(uid)
        return node is not None and not node.reading

    @property
    def stored(self) -> int:
        """Adapters in its memory."""
        return len(self.manager.adapters) - 1  # the base is one

    def _stores(self) -> None:
        """Updates the peaks: an adapter has come, or is about to."""
        self.most = max(self.most, self.stored)
        self.most_blocks = max(self.most_blocks, sum(node.size for node in self.manager.adapters.values()))

    def ranks(self, by_index: Sequence[int]) -> Mapping[int, int]:
        """The ranks of the adapters that it knows, by uid, from now on."""
        self._ranks = by_index, {}
        return self._ranks[1]

    def submit(self, request: Request, at: float) -> int:
        if request.adapter is not None:
            self.learn(int(request.adapter))
        self.received += 1
        return super().submit(request, at)

    def step(self, until: float) -> list[TokenEvent]:
        events = super().step(min(until, self._fetch()))
        self.news |= not self.busy  # asleep, it tells nothing of what this step has evicted
        return events

    def idle(self, until: float) -> None:
        super().idle(min(until, self._fetch()))

    @property
    def wakes(self) -> float:
        """When an idle replica has something to do again."""
        arrival = self._fetch()
        return min(self.clock.now + self.pause_s, self.link.next_landing(), arrival)

    def _fetch(self) -> float:
        """Completes fetches that have arrived and starts new ones; returns when the next arrives."""
        shelf = self.engine.adapters.shelf
        while True:
            if self._reading is not None:
                coming, reading, began = self._reading
                if coming.ends > self.clock.now:
                    return coming.ends
                self._reading, self.news = None, True
                self.fetched += reading.node.size
                self._measured(isinstance(coming, Transfer), reading.node.size, coming.ends - began)
                self.engine.arrived(reading, self._new(self.indices[reading.node.uid]))
            while self._asked and (self.has(self._asked[0]) or self._hinted(self._asked[0])):
                self._asked.popleft()
            begun = shelf.begin()  # one at a time
            if not begun:
                return math.inf
            self._stores()
            self._reading = self._way(self.indices[begun[0].node.uid], self.clock.now), begun[0], self.clock.now

    def _measured(self, peer: bool, blocks: int, seconds: float) -> None:
        if seconds > 0 and self.spec.block_bytes:  # else every host has all adapters, or nobody wants to know
            known = self._bps[peer] or (PEER_BPS if peer else PATH_BPS)
            self._bps[peer] = learned(known, blocks * self.spec.block_bytes, seconds)

    def _hinted(self, adapter: int) -> bool:
        """Whether the engine takes the hint; at most some are open at once."""
        self.learn(adapter)
        return self.engine.adapters.hint(self.engine.adapters.get(str(adapter)).uid) > 0

    def _new(self, adapter: int) -> NewAdapter:
        size = self._sizes[adapter]
        return NewAdapter(str(adapter), "", {}, (), (), ("q",) * size, None, size, 0.0, path="registry")

    # -- what it says -----------------------------------------------------------------------

    @property
    def looks(self) -> float:
        """When its tiers are looked at next, at the earliest."""
        return self._looked + TIERS_S

    def seen(self, at: float) -> ReplicaView:
        """Its state, as a message of this time tells it."""
        scheduler, device = self.scheduler, self.manager.device
        if at >= self.looks:
            self._looked, self.news = at, False
            nodes = self.manager.adapters
            self._tiers = {str(index): _tier(nodes[uid]) for uid, index in self.indices.items() if uid in nodes}
        counts = scheduler.active, scheduler.pending
        return ReplicaView(
            self.name, "up", 0, *counts, device.free, self.manager.total, tiers=self._tiers,
            peer_bps=self._bps[True], path_bps=self._bps[False],
        )  # fmt: skip


def _tier(node: AdapterNode) -> str:
    if node.reading:
        return "LOADING"
    return "HBM" if node.on_device else "HOST"
