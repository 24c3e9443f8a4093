"""A policy that knows the future, as a bound for every on-line eviction policy. No jax.

Belady's rule for blocks of unequal cost. The policy evicts the block of the least value

    v_i(now) = load_i / blocks_i / (next use of i - now)

which is load seconds saved, per block held, per second of holding it. All other mechanisms are the
product's, so its gain over `jlora` is the most that a better ranking can gain. It is no lower bound
of the time to first token: it does not prefetch, and it assumes that answers take no time.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from jlora.cache.policies import Policy
from jlora.cache.transfer import Meter
from jlora.cache.tree import AdapterNode, Key, Node, suffix_key

SOONEST_S = 1e-3  # least time to a next use
UNKNOWN = -1


class Oracle:
    """The times at which every block of the trace's prompts, and every adapter, is used.

    Prompts are known beforehand because a simulated answer is a hash of its request. `start` is the clock's
    time at the trace's time 0.
    """

    def __init__(self, start: float, block_tokens: int):
        self._start = start
        self._size = block_tokens
        self._ids: dict[tuple[int, Key], int] = {}  # (above, tokens) -> number; an adapter's is its uid
        self._uses: dict[int, list[float]] = {}

    def expect(self, at: float, uid: int, tenant: str, prompt: Sequence[int], activation: int | None = None) -> None:
        """Adds a request at `at` of the trace, in order of time; `activation` as in `Origin`."""
        use = self._start + at
        above = uid if activation is None else 0  # the base model's
        suffix = -1 if activation is None else activation // self._size
        self._uses.setdefault(uid, []).append(use)
        data = array("i", prompt[: (len(prompt) - 1) // self._size * self._size]).tobytes()
        step = 4 * self._size
        for index, begin in enumerate(range(0, len(data), step)):
            block = data[begin : begin + step]
            if activation is not None and index == suffix:
                block = suffix_key(block, uid, activation % self._size)
            key = (above, block if index else (tenant, block))
            above = self._ids.setdefault(key, -2 - len(self._ids))
            self._uses.setdefault(above, []).append(use)

    def number(self, above: int, key: Key) -> int:
        """The number of the block with this key below `above`."""
        return self._ids.get((above, key), UNKNOWN)

    def next_use(self, number: int, now: float) -> float:
        """Time of its next use after `now`; infinity if there is none."""
        uses = self._uses.get(number, ())
        after = bisect_right(uses, now)
        return uses[after] if after < len(uses) else math.inf


class Clairvoyant(Policy):
    """Evicts the block whose next use is furthest in the future, weighted by its cost to load.

    A node's `count` holds its next use as of its last use. So blocks of equal cost are ordered
    exactly; adapters of unequal size are ordered among the first `lookahead` only.
    """

    name = "clairvoyant"
    lookahead = 8

    def __init__(self, meter: Meter, oracle: Oracle):
        super().__init__(meter)
        self._oracle = oracle
        self._numbers: dict[Node, int] = {}

    def visit(self, node: Node, now: float) -> None:
        if node not in self._numbers:
            self._numbers[node] = self._number(node)
        self._see(node, now)

    def leave(self, node: Node, now: float) -> None:
        self._see(node, now)

    def key(self, node: Node) -> tuple[int, float]:
        return node.kind, -node.count

    def value(self, node: Node, now: float) -> float:
        return self.meter.density(node.kind, node.size) / max(node.count - now, SOONEST_S)

    def _see(self, node: Node, now: float) -> None:
        node.last_use = now
        node.count = self._oracle.next_use(self._numbers[node], now)

    def _number(self, node: Node) -> int:
        if isinstance(node, AdapterNode):
            return node.uid
        above = node.parent
        assert above is not None, "visited a node outside the tree"
        # The base also holds paths of activated LoRAs, whose requests do not visit it.
        return self._oracle.number(above.uid if isinstance(above, AdapterNode) else self._numbers[above], node.key)
