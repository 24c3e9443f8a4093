"""The records that the cache and its users hand to each other. Plain Python, no jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from jlora.cache.tree import AdapterNode, Node, Origin


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds from its admission to its end. Times are seconds.

    Attributes:
        granted: when it was granted.
        since: from when on it has waited for the copies under way.
        blocks: its block table: the published path's blocks, then its own.
        path: the published nodes it goes through, one per leading block.
        cached: prompt tokens whose KV was known, on the device or on the host.
        coming: nodes of its path, or its adapter, whose copy has not been seen to land.
        ahead: its next step may run before the copy of its activated LoRA has landed.
        streamed: a step of it began before its copies had landed.
        adapter_s: waited for the adapter, from the grant on or from where nothing else was left to do.
        kv_s: waited for the prefix, from the grant on.
    """

    origin: Origin
    reuse: bool
    granted: float = 0.0
    since: float = 0.0
    blocks: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    cached: int = 0
    coming: list[Node] = field(default_factory=list)
    ahead: bool = False
    streamed: bool = False
    adapter_s: float = 0.0
    kv_s: float = 0.0

    @property
    def adapter(self) -> AdapterNode:
        """The adapter that it holds beside its KV."""
        return self.origin.adapter


@dataclass(frozen=True, slots=True)
class Want:
    """What a queued sequence will need; others leave before it.

    Attributes:
        nodes: the adapter, and the last nodes of its prefix that are on the device and on the host.
        place: in the order of service, smaller ones sooner.
    """

    adapter: AdapterNode
    nodes: tuple[Node, ...]
    place: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The two tiers: blocks of `block_tokens` tokens on the device and on the host."""

    device: int
    host: int
    block_tokens: int
