"""Estimates, from what was measured, of how long copies will take. Plain Python, no jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jlora.cache.transfer import Copy, Meter, Traffic
from jlora.cache.tree import ADAPTER, KV, AdapterNode, Node

# A prefix is computed again only if copying it would take so many times as long: near saturation
# compute is the scarce part, and a guard of 1 makes things worse (docs/notes/cache-policy.md, Copy or compute).
RECOMPUTE = 3.0
# And so many times where the copy itself, without waiting for others, is shorter: then the link carries
# more prefixes in a second than the device computes, and only the wait speaks for computing.
RECOMPUTE_QUICK = 6.0
# A step starts before its copies have landed if it waits for them for at most this share of its time.
STREAM = 0.9


class Forecast:
    """Estimates for one cache, in seconds.

    Attributes:
        step_s: from the plan of the step before this one to this plan; 0 if that had no work.
        busy: whether the device has just begun a step that was planned before.
    """

    def __init__(self, traffic: Traffic, meter: Meter, clock: Callable[[], float], block_tokens: int):
        self._traffic = traffic
        self._meter = meter
        self._clock = clock
        self._block_tokens = block_tokens
        self.step_s = 0.0
        self.busy = False

    @property
    def wait_s(self) -> float:
        """How long a copy asked for now would wait: for those that requests wait for, and for the one on the link."""
        now = self._clock()
        return sum(self._left_s(copy, now) for copy in self._traffic.arriving if copy.demand or copy.started)

    @property
    def queued_s(self) -> float:
        """How long the link will be busy with all copies on their way, prefetches too."""
        now = self._clock()
        return sum(self._left_s(copy, now) for copy in self._traffic.arriving)

    def worth_copying(self, path: list[Node]) -> list[Node]:
        """The path up to the first block on the host, if copying the rest takes far longer than computing it."""
        missing = [i for i, node in enumerate(path) if not node.device]
        if not missing:
            return path
        tokens = (len(path) - missing[0]) * self._block_tokens
        load_s, computed_s = self._meter.load_s(KV, len(missing)), tokens * self._meter.token_s
        guard = RECOMPUTE_QUICK if load_s <= computed_s else RECOMPUTE
        return path if self.wait_s + load_s <= guard * computed_s else path[: missing[0]]

    def arrival_s(self, adapter: AdapterNode) -> float:
        """How long an adapter will yet take to the device if a request waits for it from now on."""
        copy = self._traffic.flying.get(adapter)
        if copy is None:
            return 0.0 if adapter.on_device else self.wait_s + self._meter.load_s(ADAPTER, adapter.size)
        return self._left_s(copy, self._clock()) if copy.started else self.wait_s

    def usable_s(self, adapter: AdapterNode, tokens: int) -> float:
        """As `arrival_s`, but a step of so many tokens that cannot stream the copy leaves it to the next step."""
        arrival_s = self.arrival_s(adapter)
        streams = adapter in self._traffic.flying and self.fits_in_step([adapter], tokens)
        return arrival_s if streams or not arrival_s else max(arrival_s, self.step_s)

    def outlasts(self, adapter: AdapterNode, tokens: int) -> bool:
        """Whether the adapter's copy under way takes longer than computing so many tokens."""
        if adapter not in self._traffic.flying or not tokens:
            return False
        return self.arrival_s(adapter) > tokens * self._meter.token_s

    def fits_in_step(self, nodes: Sequence[Node], tokens: int) -> bool:
        """Whether a step with so many tokens of a prompt may follow the nodes' copies.

        It may if it waits for them for less time than it takes, once the device has done the step in flight. It reads
        all weights, as one that only decodes does, so it takes about as long at least.
        """
        copies = set(map(self._traffic.flying.__getitem__, nodes))
        if tokens < 2 or not all(copy.streams and (copy.started or self._goes_out(copy)) for copy in copies):
            return False
        now, left = self._clock(), list[float]()
        for copy in self._traffic.arriving:  # the link carries one after the other
            if (copy.demand or copy.started) and not copy.seconds:
                left.append(self._meter.load_s(copy.kind, len(copy.source)) + (copy.started or now) - now)
            copies.discard(copy)
            if not copies:
                break
        step_s = max(self._meter.decode_s, tokens * self._meter.token_s)
        # A copy that is overdue defies the estimate: a step must not wait for it.
        return min(left, default=1) > 0 and sum(left) <= STREAM * step_s + self.busy * self._meter.decode_s

    def _goes_out(self, copy: Copy) -> bool:
        """Whether it begins with the step that is being planned; of its kind, one has been measured."""
        return copy in self._traffic.outbox and self._meter.measured(copy.kind)

    def _left_s(self, copy: Copy, now: float) -> float:
        """How long the link will yet be busy with it."""
        if copy.seconds:  # it has come, and was not seen to land
            return 0.0
        whole = self._meter.load_s(copy.kind, len(copy.source))
        return max(0.0, copy.started + whole - now) if copy.started else whole
