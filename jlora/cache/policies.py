"""What a cache policy decides, and jlora's own. Plain Python, no jax.

A policy ranks nodes. It moves nothing, and it keeps no part of the tree. The mechanism
(`residency`, `monitor`) is the same for all: asynchronous copies, one pool, one tree. A
published system differs in a few answers of its class (`baselines`, `fastlibra`):

    key, value    which idle node is worth least
    ask, meet     what it learns from a request: how long its adapter and its conversation were silent
    history       whether KV of finished requests is kept at all
    keeps(node)   whether an adapter that nothing uses stays
    binds(node)   whether a node must stay while something below it is on the device
    residency     another mechanism of eviction (`writeback`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jlora.cache.returns import Returns, Silences
from jlora.cache.transfer import Meter
from jlora.cache.tree import ADAPTER, KV, Node

if TYPE_CHECKING:
    from jlora.cache.residency import Residency


class Pulse(NamedTuple):
    """What a policy may know of the replica, a few times a second."""

    running: int  # sequences in the batch now
    adapters: Sequence[Node]  # in service, the base (size 0) among them
    on_device: int  # how many of them hold device blocks


class Policy:
    """Least recently used, over one pool: the base that the others refine.

    Keys are static (see `order`) and come in two heaps; `value` is exact and compares candidates of
    both. Any increasing function of worth will do.
    """

    name = "lru"
    residency: type[Residency] | None = None  # None: one pool, and evictions that never write
    share: float | None = None  # of the device blocks, for adapters, where `residency` splits it
    saves_ahead = True  # whether KV is copied to the host while it is idle
    history = True
    upper: float | None = None  # share of the pool in use above which the monitor evicts
    lower = 0.95  # share in use below which the monitor fetches ahead, while the link is idle
    lookahead = 1  # candidates per heap whose exact value is compared

    def __init__(self, meter: Meter):
        self.meter = meter

    def keeps(self, node: Node) -> bool:
        """Whether an adapter that nothing uses stays on the device."""
        return True

    def binds(self, node: Node) -> bool:
        """Whether `node` must stay on the device while something below it is there."""
        return True

    def ask(self, adapter: Node, now: float) -> None:
        """A request for this adapter has come, and is among its users; its visits follow."""

    def meet(self, path: Sequence[Node], now: float) -> None:
        """A request has come that knows this path of KV; its visits follow."""

    def visit(self, node: Node, now: float) -> None:
        """A request goes through the node."""
        node.last_use = now

    def leave(self, node: Node, now: float) -> None:
        """A request that went through the node has ended: used until now."""
        node.last_use = now

    def key(self, node: Node) -> tuple[int, float]:
        """(heap 0 or 1, static key): smaller keys are worth less."""
        return node.kind, node.last_use

    def value(self, node: Node, now: float) -> float:
        """What keeping the node is worth at `now`."""
        return node.last_use

    def shelf_value(self, node: Node, now: float) -> float:
        """What keeping an idle adapter's host copy is worth, beside `value` of KV on the host."""
        return self.value(node, now)

    def tick(self, pulse: Pulse, now: float) -> bool:
        """Takes in the replica's state; True if every key has changed and must be made again."""
        return False


class Jlora(Policy):
    """Two-class rate density: load seconds saved per second, per block.

        v_i(now) = rate_i(now) * load_i / blocks_i
        adapters and shared prefixes   rate = C exp(-(now - t) / T) / W,  C <- 1 + C exp(-(now - t) / T),
          adapters at least              how often one that was silent so long is asked for (`Silences`)
        KV of one conversation         rate = how often a conversation of that age comes back (`Returns`)

    Many users ask for an adapter or a system prompt: its decayed frequency predicts the next request. One
    user continues a conversation, soon or never: only its age predicts that. What ages mean is learned,
    because it differs: agents come back every few seconds, readers of long answers after minutes,
    translations never. Both rates are in returns per second, so they can be compared.

    A count forgets an adapter that is used every ten minutes (e^-6 of a visit is left), and such adapters
    are many. So their return rate by age is learned too, from all adapters together.

    `load` is *measured*, its fixed part included. Both classes have static keys: `ln C + t/T + ln(load/blocks)`,
    and `t`, by which conversations leave in order of age. The keys are exact while counts decide and rates
    fall with age. Elsewhere, the values of the first few candidates decide.

    W is the time that C has counted over: T in the long run, but T (1 - exp(-s / T)) in a replica that has
    served for s seconds, since its first request or since a silence in which all counts have decayed.
    Dividing by T from the start would underestimate these rates and give the room to conversations. W is
    the same for all nodes, so keys omit it.
    """

    name = "jlora"
    lookahead = 8
    T = 100.0  # seconds
    LEAST_S = 5.0  # seconds, of W: one visit is no frequency
    SILENCE = 3.0  # times T without a request, after which the counts have decayed

    def __init__(self, meter: Meter):
        super().__init__(meter)
        self.returns = Returns()
        self.silences = Silences()
        self._began = -math.inf  # when requests began to come
        self._asked = -math.inf  # when the last one did

    def ask(self, adapter: Node, now: float) -> None:
        if adapter.size and adapter.users == 1:  # it was idle until now; the base never leaves
            self.silences.end(max(0.0, now - adapter.last_use))

    def meet(self, path: Sequence[Node], now: float) -> None:
        last = path[-1] if path else None
        if last is not None and last.users > 1:
            return  # its conversation is not silent: another completion or request uses it now
        self.returns.add(None if last is None or last.shared else max(0.0, now - last.last_use))

    def visit(self, node: Node, now: float) -> None:
        if node.kind == KV:  # a request's; an adapter is also visited when it is loaded
            if now - self._asked > self.SILENCE * self.T:
                self._began = now
            self._asked = now
        # Counted for all: the node may be shared later.
        node.count = 1 + node.count * math.exp((node.last_use - now) / self.T)
        node.last_use = now

    def leave(self, node: Node, now: float) -> None:
        node.count *= math.exp((node.last_use - now) / self.T)  # decays to `now`, as `last_use` moves there
        node.last_use = now

    def key(self, node: Node) -> tuple[int, float]:
        if not node.shared:
            return 1, node.last_use
        density = self.meter.density(node.kind, node.size)
        return 0, math.log(max(node.count, 1e-12)) + node.last_use / self.T + math.log(density)

    def value(self, node: Node, now: float) -> float:
        age = max(0.0, now - node.last_use)
        if node.shared:
            rate = node.count * math.exp(-age / self.T) / self._window(now)
            if node.kind == ADAPTER:
                rate = max(rate, self.silences.rate(age))
        else:
            rate = self.returns.rate(age)
        return rate * self.meter.density(node.kind, node.size)

    def shelf_value(self, node: Node, now: float) -> float:
        return self.value(node, now) * self.meter.disk_s(node.size) / self.meter.load_s(ADAPTER, node.size)

    def tick(self, pulse: Pulse, now: float) -> bool:
        self.silences.look((now - node.last_use for node in pulse.adapters if node.size and not node.users), now)
        return self.meter.moved()

    def _window(self, now: float) -> float:
        """Seconds that counts have been taken over."""
        return self.T * -math.expm1(-max(now - self._began, self.LEAST_S) / self.T)
