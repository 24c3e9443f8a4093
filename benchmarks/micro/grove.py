"""A cache as a busy server leaves it: conversations over Zipf adapters, most of their KV on the host.

Grown through the real manager (acquire, publish, release, copies that land) with a clock of its own,
so that every heap, flag and counter is as a server would have it. A conversation begins with its
adapter's system prompt and comes back now and then. The device is a small part of the tree.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jlora.cache.catalog import make_policy
from jlora.cache.lease import Lease
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.transfer import Meter
from jlora.cache.tree import AdapterNode, Origin
from jlora.config import CacheConfig

ADAPTER_BLOCKS = 4
SYSTEM_BLOCKS = 8  # of every adapter's conversations
TURN_BLOCKS = (1, 24)  # that a turn adds
COMES_BACK = 0.4  # share of turns that go on with one of the latest conversations
LONG_TOKENS = 8192
SPARE_BLOCKS = 4096  # of the host, free when the tree is full-grown: what is measured finds room
LINK_S = 1e-4  # a copy takes so long, and as long again per block
MONITOR_S = 0.1  # between two rounds of the monitor

_SYSTEM, _ROOM = 1 << 30, 1 << 14  # first token id of system prompts; ids that a conversation may use


@dataclass(frozen=True, slots=True)
class Shape:
    """What to grow: KV nodes, registered adapters, policy, tokens per block."""

    nodes: int
    adapters: int
    policy: str = "jlora"
    block_tokens: int = 32

    @property
    def long_blocks(self) -> int:
        """Blocks of a long prompt."""
        return LONG_TOKENS // self.block_tokens

    @property
    def device_blocks(self) -> int:
        """A sixteenth of the tree, and room for one long conversation."""
        return max(3 * self.long_blocks // 2, self.nodes // 16)

    @property
    def host_blocks(self) -> int:
        """Room for the tree and all adapters."""
        return self.nodes + self.adapters * ADAPTER_BLOCKS + SPARE_BLOCKS


@dataclass(slots=True)
class Talk:
    """A conversation: its adapter, its first own token, how many of its own tokens there are."""

    adapter: AdapterNode
    first: int
    length: int


def add_adapter(manager: CacheManager, uid: int) -> AdapterNode:
    """Registers an adapter; the host has room for it."""
    blocks = manager.reserve(ADAPTER_BLOCKS)
    assert blocks is not None
    return manager.add_adapter(uid, blocks)


class Grove:
    """A manager with a grown tree, and the means to keep it busy.

    Attributes:
        cold: long conversations of the tree's beginning, whose KV has left the device in a large tree.
        warm: long conversations of its end.
    """

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape = shape
        self.now = 1.0
        policy = make_policy(CacheConfig(policy=shape.policy), Meter(LINK_S))
        sizes = Sizes(shape.device_blocks, shape.host_blocks, shape.block_tokens)
        self.manager = CacheManager(sizes, policy, lambda: self.now)
        self._random = random.Random(seed)
        self._adapters = [add_adapter(self.manager, uid) for uid in range(1, shape.adapters + 1)]
        self._shares = list(itertools.accumulate(1 / rank for rank in range(1, shape.adapters + 1)))
        self._latest: deque[Talk] = deque(maxlen=256)
        self._talks = 0
        self.cold: list[Talk] = []
        self.warm: list[Talk] = []

    @property
    def nodes(self) -> int:
        """KV nodes whose data is on the host: all but those under computation."""
        return self.manager.host.history_kv

    def grow(self) -> None:
        """Turns until the tree has the nodes asked for, between long conversations at both ends."""
        size = self.shape.long_blocks
        count = max(1, min(16, self.shape.nodes // (8 * size)))
        self.cold = [self._long() for _ in range(count)]
        while self.nodes < self.shape.nodes - count * size:
            self.turn()
        self.warm = [self._long() for _ in range(count)]

    def turn(self) -> None:
        """One turn of a conversation, new or one that comes back."""
        self.now += 0.02
        added = self._random.randint(*TURN_BLOCKS) * self.shape.block_tokens
        if self._latest and self._random.random() < COMES_BACK:
            talk = self._random.choice(self._latest)
            talk.length = min(talk.length + added, _ROOM)
        else:
            talk = self._new(added)
            self._latest.append(talk)
        self.end(self.begin(talk), talk)
        self.manager.tend(self.now, running=32)
        self.land()

    def begin(self, talk: Talk) -> Lease:
        """Admits the conversation as it is; its copies land at once."""
        lease = self.manager.leases.acquire(Origin(talk.adapter), self.tokens(talk), reuse=True, headroom=0)
        assert lease is not None, "one conversation at a time always fits"
        self.land()
        return lease

    def end(self, lease: Lease, talk: Talk) -> None:
        """Its tokens are computed, published and written through; the lease ends."""
        tokens = self.tokens(talk)
        self.manager.leases.publish(lease, tokens, len(tokens))
        self.manager.leases.release(lease)
        self.land()

    def land(self) -> None:
        """All copies under way are complete."""
        copies = self.manager.take_copies()
        for copy in copies:
            copy.seconds = LINK_S * (1 + len(copy.source))
        self.manager.landed(copies)

    def tokens(self, talk: Talk) -> Sequence[int]:
        """The conversation so far: its adapter's system prompt, then tokens that no other one has."""
        system = _SYSTEM + talk.adapter.uid * _ROOM
        length = SYSTEM_BLOCKS * self.shape.block_tokens
        return [*range(system, system + length), *range(talk.first, talk.first + talk.length)]

    def _long(self) -> Talk:
        talk = self._new(LONG_TOKENS - SYSTEM_BLOCKS * self.shape.block_tokens)
        self.end(self.begin(talk), talk)
        return talk

    def _new(self, length: int) -> Talk:
        drawn = bisect.bisect_left(self._shares, self._random.random() * self._shares[-1])
        self._talks += 1
        return Talk(self._adapters[drawn], self._talks * _ROOM % _SYSTEM, length)
