"""The records that the cache and its users hand to each other. Plain Python, no jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from jlora.cache.tree import AdapterNode, Node, Origin
from jlora.types import ColdStart


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds from its admission to its end. Times are seconds."""

    origin: Origin
    reuse: bool
    granted: float = 0.0
    since: float = 0.0  # from when on it has waited for the copies under way
    blocks: tuple[int, ...] = ()  # its block table: the published path's blocks, then its own; a change makes it anew
    path: list[Node] = field(default_factory=list)  # the published nodes it goes through, one per leading block
    cached: int = 0  # prompt tokens whose KV was known, on the device or on the host
    copied: int = 0  # the part of them that was on the host
    coming: list[Node] = field(default_factory=list)  # of path and adapter, those whose copy was not seen to land
    ahead: bool = False  # its next step may run before the copy of its activated LoRA has landed
    helped: bool = False  # the host computes its adapter's part as long as the adapter's copy is under way
    streamed: bool = False  # a step of it began before its copies had landed
    adapter_s: float = 0.0  # waited for the adapter, from the grant on or from where nothing else was left to do
    kv_s: float = 0.0  # waited for the prefix, from the grant on
    cold_start: ColdStart = ""  # how it met the copy of its adapter

    @property
    def adapter(self) -> AdapterNode:
        return self.origin.adapter


@dataclass(frozen=True, slots=True)
class Want:
    """What a queued sequence will need; others leave before it."""

    adapter: AdapterNode
    nodes: tuple[Node, ...]  # the adapter, and the last nodes of its prefix that are on the device and on the host
    place: int  # in the order of service, smaller ones sooner


@dataclass(frozen=True, slots=True)
class Sizes:
    """The two tiers: blocks of `block_tokens` tokens on the device and on the host.

    Attributes:
        longest: blocks of the longest context; pins leave room for it.
    """

    device: int
    host: int
    block_tokens: int
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Pins:
    """What pinned adapters take of the device, and what must find room beside them, in blocks."""

    pinned: int
    largest: int  # of the adapters that are not pinned
    longest: int  # of the longest context; half the pool if that is less
    total: int

    @property
    def fit(self) -> bool:
        return not self.pinned or self.pinned + self.largest + self.longest <= self.total
