"""What is sooner, to wait for a copy or to compute: estimates from what was measured. Plain Python, no jax."""

from __future__ import annotations

from collections.abc import Sequence

from jlora.cache.lease import Lease
from jlora.cache.residency import Residency
from jlora.cache.transfer import Copy
from jlora.cache.tree import KV, Node

# A prefix is computed again only if copying it would take so many times as long: near saturation
# compute is the scarce part, and a guard of 1 makes things worse (FASTLIBRA beyond, rule d).
RECOMPUTE = 3.0
# And so many times where the copy itself, without waiting for others, is shorter: then the link carries
# more prefixes in a second than the device computes, and only the wait speaks for computing.
RECOMPUTE_QUICK = 6.0
# A step starts before its copies have landed if they need at most this share of its time.
STREAM = 0.9
# Shorter copies come as one piece: a group of layers costs a transfer of its own.
STREAM_FROM_S = 1e-3


class Forecast:
    """Of one cache; seconds by its meter and its clock."""

    def __init__(self, cells: Residency, block_tokens: int):
        self._cells = cells
        self._meter = cells.policy.meter
        self._block_tokens = block_tokens

    @property
    def wait_s(self) -> float:
        """How long a copy asked for now would wait: for those that requests wait for, and for the one on the link."""
        now = self._cells.clock()
        return sum(self._left_s(copy, now) for copy in self._cells.traffic.arriving if copy.demand or copy.started)

    @property
    def queued_s(self) -> float:
        """How long the link will be busy with all that is on its way, prefetches too."""
        now = self._cells.clock()
        return sum(self._left_s(copy, now) for copy in self._cells.traffic.arriving)

    def worth_copying(self, path: list[Node]) -> list[Node]:
        """The path up to the first block on the host, if copying the rest takes far longer than computing it."""
        missing = [i for i, node in enumerate(path) if not node.device]
        if not missing:
            return path
        tokens = (len(path) - missing[0]) * self._block_tokens
        load_s, computed_s = self._meter.load_s(KV, len(missing)), tokens * self._meter.token_s
        guard = RECOMPUTE_QUICK if load_s <= computed_s else RECOMPUTE
        return path if self.wait_s + load_s <= guard * computed_s else path[: missing[0]]

    def outlasts(self, lease: Lease, tokens: int) -> bool:
        """Whether the copy of a lease's adapter takes longer than computing so many tokens."""
        copy = self._cells.traffic.flying.get(lease.adapter)
        if copy is None or not tokens:
            return False
        left_s = self._left_s(copy, self._cells.clock()) if copy.started else self.wait_s
        return left_s > tokens * self._meter.token_s

    def _left_s(self, copy: Copy, now: float) -> float:
        """How long the link will yet be busy with it."""
        if copy.seconds:  # it has come, and was not seen to land
            return 0.0
        whole = self._meter.load_s(copy.kind, len(copy.source))
        return max(0.0, copy.started + whole - now) if copy.started else whole

    def is_long(self, nodes: Sequence[Node]) -> bool:
        """Whether one copy of these takes long enough to come in groups of layers."""
        blocks = sum(node.size for node in nodes)
        return blocks > 0 and self._meter.load_s(nodes[0].kind, blocks) > STREAM_FROM_S

    def fits_in_step(self, nodes: Sequence[Node], tokens: int) -> bool:
        """Whether what is left of the nodes' copies takes less time than computing so many tokens."""
        flying = self._cells.traffic.flying
        copies = dict.fromkeys(flying[node] for node in nodes)  # in order: a replay adds up alike
        if tokens < 2 or not all(copy.streams and copy.started for copy in copies):
            return False
        now = self._cells.clock()
        left = [self._meter.load_s(c.kind, len(c.source)) + c.started - now for c in copies]
        # A copy that is overdue defies the estimate: a step must not wait for it.
        return min(left) > 0 and sum(left) <= STREAM * tokens * self._meter.token_s
