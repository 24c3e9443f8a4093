"""Copies between the tiers: one copy, those under way, and their measured cost. Plain Python, no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node

Direction = Literal["in", "out"]  # host to device; device to host


@dataclass(slots=True, eq=False)
class Copy:
    """Blocks of one adapter or of one run of its KV, over all layers, as one merged transfer."""

    direction: Direction
    adapter: AdapterNode
    nodes: tuple[Node, ...]
    source: tuple[int, ...]  # block ids in the tier it leaves, of all nodes in order
    target: tuple[int, ...]  # the same in the tier it enters
    demand: bool = False  # a request waits for it; a prefetch becomes one when a request comes to wait for it
    streams: bool = False  # comes in groups of layers, so that a step may start before its end
    started: float = 0.0  # when the link took it up, 0 before
    seconds: float = 0.0  # how long the link was busy with it, 0 before its end

    @property
    def kind(self) -> int:
        return self.nodes[0].kind


class Lost(Exception):
    """What a step is to read does not come: the copy has failed."""


class _Fit:
    """seconds = fixed + blocks * each, by exponentially weighted least squares."""

    __slots__ = ("n", "x", "y", "xx", "xy", "fixed", "each")
    KEEP = 0.95  # weight of the past at every observation: about the last 20 copies count

    def __init__(self, fixed: float, each: float):
        self.n = self.x = self.y = self.xx = self.xy = 0.0
        self.fixed, self.each = fixed, each

    def add(self, blocks: int, seconds: float) -> None:
        k = self.KEEP
        self.n, self.x, self.y = k * self.n + 1, k * self.x + blocks, k * self.y + seconds
        self.xx, self.xy = k * self.xx + blocks * blocks, k * self.xy + blocks * seconds
        spread = self.n * self.xx - self.x * self.x
        if spread > 1e-6 * self.xx * self.n:
            each = (self.n * self.xy - self.x * self.y) / spread
            self.each = min(max(each, 0.0), self.y / self.x)
        else:  # every copy had one size: keep the slope, unless it alone predicts more than was measured
            self.each = min(self.each, self.y / self.x)
        self.fixed = max(0.0, (self.y - self.each * self.x) / self.n)


DISK = 10.0  # times a block's copy: its read from the disk, before any was measured
TYPICAL = 8  # blocks of the copy whose cost tells whether costs have moved
FAR = 1.5  # times a cost before: then keys made of it are made again


class Meter:
    """Measured seconds of loads, per kind of node, of recomputing a token, and of a step that only decodes.

    The fixed part of a load matters most to the ranking, and only a measurement tells it.

    Attributes:
        decode_s: of a step that only decodes; 0 before any.

    Args:
        block_s: assumed seconds of a block's copy, before anything was measured.
        token_s: assumed seconds of computing a prompt token.
        block_tokens: tokens of a block; 0: a block cannot be computed again.
    """

    def __init__(self, block_s: float, token_s: float = 1e-4, block_tokens: int = 0):
        self.token_s = token_s
        self.decode_s = self._decoded_s = 0.0
        self._block_tokens = block_tokens
        self._fits = (_Fit(1e-4, block_s), _Fit(1e-4, block_s))
        self._disk = _Fit(5e-3, DISK * block_s)
        self._run = 16.0  # blocks of a typical copy of KV
        self._priced = self._prices()

    def observe(self, copy: Copy) -> None:
        """Takes in a copy to the device that has landed."""
        if copy.direction == "in" and copy.seconds > 0:
            self._fits[copy.kind].add(len(copy.source), copy.seconds)
            if copy.kind == KV:
                self._run += 0.05 * (len(copy.source) - self._run)

    def observe_disk(self, blocks: int, seconds: float) -> None:
        """Takes in an adapter that was read from the disk."""
        if blocks and seconds > 0:
            self._disk.add(blocks, seconds)

    def disk_s(self, blocks: int) -> float:
        """Expected seconds of reading an adapter of so many blocks; always above 0."""
        return max(self._disk.fixed + blocks * self._disk.each, 1e-9)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Takes in a step that computed `tokens` prompt tokens."""
        if tokens > 0 and seconds > 0:
            self.token_s += 0.1 * (seconds / tokens - self.token_s)

    def observe_decode(self, seconds: float) -> None:
        """Takes in a step that computed no prompt token; of two in turn the shorter: one may have been held up."""
        shorter, self._decoded_s = min(self._decoded_s, seconds), seconds
        self.decode_s += (0.1 if self.decode_s else 1.0) * (shorter - self.decode_s)

    def measured(self, kind: int) -> bool:
        """Whether any load of this kind has been."""
        return self._fits[kind].n > 0

    def density(self, kind: int, blocks: int) -> float:
        """Seconds that a block of a node saves.

        KV comes back in runs of many nodes, which share the fixed part of one copy. It can also be computed
        again, so over a slow link it is worth at most what that takes. An adapter cannot be computed.
        """
        if kind == ADAPTER:
            return self.load_s(kind, blocks) / blocks
        size = max(1.0, self._run)
        copied = self.load_s(kind, size) / size
        return min(copied, self._block_tokens * self.token_s) if self._block_tokens else copied

    def moved(self) -> bool:
        """Whether loads cost far more or less than when this was last True."""
        now = self._prices()
        if all(1 / FAR < a / b < FAR for a, b in zip(now, self._priced, strict=True)):
            return False
        self._priced = now
        return True

    def _prices(self) -> tuple[float, ...]:
        return self.load_s(ADAPTER, TYPICAL), self.load_s(KV, TYPICAL), self.density(KV, 1)

    def load_s(self, kind: int, blocks: float) -> float:
        """Expected seconds of one copy of so many blocks; always above 0."""
        fit = self._fits[kind]
        return max(fit.fixed + blocks * fit.each, 1e-9)


class Traffic:
    """The copies that have been decided and have not landed."""

    def __init__(self) -> None:
        self.flying: dict[Node, Copy] = {}  # the copy that a node is part of
        self.outbox: list[Copy] = []  # not handed out yet
        self.arriving: dict[Copy, None] = {}  # on their way to the device, in order (a dict as an ordered set)
        self.backlog: dict[Direction, int] = {"in": 0, "out": 0}  # blocks on their way

    def start(self, copy: Copy) -> None:
        copy.adapter.flying += 1
        self.flying.update(dict.fromkeys(copy.nodes, copy))
        self.outbox.append(copy)
        self.backlog[copy.direction] += len(copy.source)
        if copy.direction == "in":
            self.arriving[copy] = None

    def land(self, copy: Copy) -> None:
        copy.adapter.flying -= 1
        for node in copy.nodes:
            del self.flying[node]
        self.backlog[copy.direction] -= len(copy.source)
        self.arriving.pop(copy, None)

    def promote(self, node: Node) -> None:
        """A request waits for this node's copy: from now on it is no prefetch."""
        copy = self.flying.get(node)
        if copy is not None:
            copy.demand = True
