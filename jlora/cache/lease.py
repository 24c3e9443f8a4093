"""The records that the cache and its users hand to each other. Plain Python, no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jlora.cache.tree import AdapterNode, Node, Origin
from jlora.types import ColdStart


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds from its admission to its end. Times are seconds."""

    origin: Origin
    reuse: bool
    granted: float = 0.0
    since: float = 0.0  # when it began to wait for copies: at the grant, or when its sequence stalled
    blocks: tuple[int, ...] = ()  # its block table: blocks of `path`, then its own. A change makes a new tuple
    path: list[Node] = field(default_factory=list)  # the published nodes it goes through, one per leading block
    cached: int = 0  # prompt tokens whose KV was known, on the device or on the host
    copied: int = 0  # the part of them that was on the host
    coming: list[Node] = field(default_factory=list)  # nodes of path and adapter whose copies were not seen to land
    ahead: bool = False  # its next step may run before the copy of its activated LoRA has landed
    helped: bool = False  # the host computes its adapter's part as long as the adapter's copy is under way
    streamed: bool = False  # a step of it began before its copies had landed
    adapter_s: float = 0.0  # how long it waited for its adapter, counted from `since`
    kv_s: float = 0.0  # how long it waited for its prefix, counted from the grant
    cold_start: ColdStart = ""  # how it met the copy of its adapter
    left: int = 0  # tokens that it computes before the next sample, as of the grant
    predicted: Mapping[str, float] = field(default_factory=dict)  # seconds to its first token, by `cold_start`
    predicted_at: float = 0.0  # when that was predicted
    first_token: float = 0.0  # when its sequence's first token came; 0: not under this lease

    @property
    def adapter(self) -> AdapterNode:
        return self.origin.adapter


@dataclass(slots=True, eq=False)
class Want:
    """What a queued sequence will need; others leave before it."""

    adapter: AdapterNode
    # The adapter, and the last nodes of its prefix that are on the device and on the host. None of these while the
    # adapter is on the disk.
    nodes: tuple[Node, ...]
    place: int  # in the order of service, smaller ones sooner
    begun: bool  # the sequence has drawn tokens before


@dataclass(frozen=True, slots=True)
class Sizes:
    """The two tiers: blocks of `block_tokens` tokens on the device and on the host.

    Attributes:
        longest: blocks of the longest context; pins leave room for it.
        spare: blocks that the host's memory can still give, now; None: as many as there are.
    """

    device: int
    host: int
    block_tokens: int
    longest: int = 0
    spare: Callable[[], int] | None = None


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
