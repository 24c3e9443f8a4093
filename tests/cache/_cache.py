"""A small cache to try things on: its copies land when told, its clock moves when told."""

from __future__ import annotations

from jlora.cache.inspect import cells, check_integrity
from jlora.cache.manager import CacheManager, Lease, Sizes
from jlora.cache.readiness import Readiness
from jlora.cache.transfer import Copy, Meter
from jlora.cache.tree import ADAPTER, AdapterNode, Node, Origin
from tests.cache._world import POLICIES

BLOCK = 4  # tokens
BLOCK_S, TOKEN_S = 1e-3, 1e-3  # computing a block takes four times as long as copying it
A, B, C, D = [1] * 9, [2] * 9, [3] * 9, [4] * 9  # prompts: two full blocks each, and one token more


def measure(meter: Meter) -> None:
    """An adapter's copy has taken as long as is assumed."""
    node = AdapterNode(99, 1)
    meter.observe(Copy("in", node, (node,), (0,), (0,), seconds=meter.load_s(ADAPTER, 1)))


class Cache:
    """A manager with a link whose copies land when told, and a clock that moves when told."""

    def __init__(self, device: int = 16, host: int = 64, policy: str = "lru", streams: bool = False):
        self.now = 1.0
        meter = Meter(BLOCK_S, TOKEN_S)
        made = POLICIES[policy](meter)
        self.manager = CacheManager(Sizes(device, host, BLOCK), made, lambda: self.now, streams=streams)
        self.cells = cells(self.manager)
        self.flying: list[Copy] = []

    def adapter(self, uid: int, size: int) -> AdapterNode:
        blocks = self.manager.reserve(size)
        assert blocks is not None
        return self.manager.add_adapter(uid, blocks)

    def origin(self, adapter: AdapterNode | Origin | None) -> Origin:
        return adapter if isinstance(adapter, Origin) else Origin(adapter or self.manager.base)

    def lease(self, tokens: list[int], adapter: AdapterNode | Origin | None = None, reuse: bool = True) -> Lease | None:
        self.now += 1.0
        lease = self.manager.leases.acquire(self.origin(adapter), tokens, reuse, headroom=0)
        check_integrity(self.manager)
        return lease

    def leased(self, tokens: list[int], adapter: AdapterNode | Origin | None = None, reuse: bool = True) -> Lease:
        lease = self.lease(tokens, adapter, reuse)
        assert lease is not None
        return lease

    def copies(self) -> list[Copy]:
        """The copies under way."""
        self.flying += self.manager.take_copies()
        return self.flying

    def land(self, *copies: Copy) -> None:
        """These copies are complete; without any, all that are under way."""
        done = list(copies) or list(self.copies())
        self.flying = [copy for copy in self.copies() if copy not in done]
        self.manager.landed(done)
        check_integrity(self.manager)

    def ready(self, lease: Lease, tokens: int = 1, unadapted: int = 0) -> bool:
        """Whether a step of so many tokens could begin."""
        return self.manager.leases.gate.readiness(lease, tokens, unadapted) is not Readiness.WAIT

    def run(self, tokens: list[int], adapter: AdapterNode | Origin | None = None, reuse: bool = True) -> int:
        """A whole request, all its copies included; how many of its tokens were cached."""
        lease = self.leased(tokens, adapter, reuse)
        self.land()
        assert self.ready(lease)
        self.manager.leases.publish(lease, tokens, len(tokens))
        self.now += 1.0
        self.manager.leases.release(lease)
        self.land()
        return lease.cached

    def tend(self, running: int = 0) -> None:
        self.now += 0.2
        self.manager.tend(self.now, running)
        check_integrity(self.manager)

    def path(self, tokens: list[int], adapter: AdapterNode | Origin | None = None) -> list[Node]:
        return self.manager.tree.match(self.origin(adapter), tokens, len(tokens))

    def tiers(self, tokens: list[int], adapter: AdapterNode | Origin | None = None) -> str:
        """Where each block of a prompt is: d(evice), h(ost), b(oth)."""
        names = {(True, False): "d", (False, True): "h", (True, True): "b"}
        return "".join(names[bool(n.device), bool(n.host)] for n in self.path(tokens, adapter))

    def drop_from_device(self, tokens: list[int]) -> None:
        for node in reversed(self.path(tokens)):
            self.cells.evict(node)
