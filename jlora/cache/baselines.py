"""The published systems that jlora is compared with, as policies; FASTLIBRA is in `fastlibra`. Plain Python, no jax."""

from __future__ import annotations

from jlora.cache.policies import Policy
from jlora.cache.transfer import Meter
from jlora.cache.tree import KV, Node
from jlora.cache.writeback import Split, WriteBack


class Vllm(Policy):
    """vLLM as the FASTLIBRA paper ran it (section 6.1): a static split, LRU in each half.

    Adapters and KV know nothing of each other, so an adapter may leave while its KV stays
    ("invalid KV"). Loads happen on demand only; evicted KV is written out first.
    """

    name = "vllm"
    share = 0.2
    residency = WriteBack
    saves_ahead = False
    lower = 0.0

    def binds(self, node: Node) -> bool:
        return node.kind == KV


class VllmFair(Vllm):
    """The same split with this library's mechanism: clean eviction, fetching ahead, a share of your choice."""

    name = "vllm-fair"
    residency = Split
    saves_ahead = True
    lower = 0.95

    def __init__(self, meter: Meter, share: float):
        super().__init__(meter)
        self.share = share


class Slora(Policy):
    """S-LoRA: one pool, no KV of finished requests, an adapter leaves with its last request."""

    name = "slora"
    history = False
    lower = 0.0

    def keeps(self, node: Node) -> bool:
        return bool(node.wanted)
