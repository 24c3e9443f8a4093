"""FASTLIBRA's cost model and its ablations, as published. Plain Python, no jax.

    Eval        = LoRA_Eval * Retain_Eval                                   (Equation 6)
    Retain_Eval = cost_i * prob_i * (1 - sigmoid(t_i / tau))                (Equation 5)
    LoRA_Eval   = max(1, Low_lora / Now_lora), for adapters                 (Equation 4)
    Low_lora    = sum over adapters of 1 - (1 - prob_i)^BS                  (Equation 3)

The paper leaves these points open. Here they are decided so:

    prob_i      the node's share of the visits in a window that slides by exponential decay
    t           is divided by a time scale tau, by default the median reuse interval seen so far
                (tau = 1 is the paper's literal form)
    cost_i      the measured transfer time of the node
    BS          the mean batch of the last 5 s
    prefetch    an idle round fetches what the link carries in a round, at most `monitor.FETCHES` nodes

1 - sigmoid(t) is e^-t / (1 + e^-t). In float64 it is 0 after 37 s, and ties would decide, so everything
is kept in logarithms. Its tail has the exact static key `ln cost + ln C + t/tau'`. Near t = 0 the tail
is not exact, and the equation itself compares the first few candidates. When tau changes, time continues
in the new unit from its value in the old one. So keys made before and after can be compared, and the
keys of a large tree are made again a part at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jlora.cache.policies import Policy, Pulse
from jlora.cache.transfer import Meter
from jlora.cache.tree import ADAPTER, Node

WINDOW_S = 300.0  # seconds after which a visit counts 1/e
BATCH_S = 5.0  # seconds that BS is the mean over
FIRST_TAU_S = 60.0  # seconds, before any reuse was seen


class Knobs(NamedTuple):
    """`cache.upper`, `cache.lower` (shares of the pool) and `cache.tau_s` (seconds; 0: fitted)."""

    upper: float = 0.95
    lower: float = 0.70
    tau_s: float = 0.0


class Fastlibra(Policy):
    """The paper's swapper: every 100 ms, greedy, between two thresholds (section 5.3)."""

    name = "fastlibra"
    lookahead = 8

    def __init__(self, meter: Meter, knobs: Knobs):
        super().__init__(meter)
        self.upper = knobs.upper
        self.lower = knobs.lower
        self.tau = knobs.tau_s or FIRST_TAU_S
        self._median = None if knobs.tau_s else Median(FIRST_TAU_S)
        self._since, self._units = 0.0, 0.0  # when tau was set, and the time then, in units of tau
        self._visits = 0.0  # decayed, of all nodes, as of _visited
        self._visited = 0.0
        self._batch = 0.0  # BS
        self._ticked: float | None = None
        self._pulse: Pulse | None = None  # of the last tick, until LoRA_Eval has been made from it
        self._lora_eval = 1.0

    def visit(self, node: Node, now: float) -> None:
        if self._median is not None and node.last_use:
            self._median.add(now - node.last_use)
        node.count = 1 + node.count * _decay(now - node.last_use)
        node.last_use = now
        self._visits = 1 + self._visits * _decay(now - self._visited)
        self._visited = now

    def leave(self, node: Node, now: float) -> None:
        node.count *= _decay(now - node.last_use)
        node.last_use = now

    def key(self, node: Node) -> tuple[int, float]:
        own = math.log(max(node.count, 1e-12)) + node.last_use / WINDOW_S
        age = self._units + (node.last_use - self._since) / self.tau
        return node.kind, math.log(self._cost(node)) + own + age

    def value(self, node: Node, now: float) -> float:
        """ln Eval (Equation 6)."""
        age = max(0.0, now - node.last_use)
        prob = math.log(max(node.count, 1e-12)) - age / WINDOW_S - self._all(now)
        lora = math.log(self._lora_reward()) if node.kind == ADAPTER else 0.0
        return lora + math.log(self._cost(node)) + prob + _log_retain(age / self.tau)

    def shelf_value(self, node: Node, now: float) -> float:
        return self.value(node, now) + math.log(self.meter.disk_s(node.size) / self._cost(node))

    def tick(self, pulse: Pulse, now: float) -> bool:
        weight = 1.0 if self._ticked is None else 1 - math.exp((self._ticked - now) / BATCH_S)
        self._batch += weight * (pulse.running - self._batch)
        self._ticked, self._pulse = now, pulse
        moved = self.meter.moved()
        return self._fit_tau(now) or moved

    def _lora_reward(self) -> float:
        """LoRA_Eval of the last tick; computed when it is first needed, because it walks all adapters."""
        if self._pulse is not None and self._ticked is not None:
            self._lora_eval, self._pulse = self._reward(self._pulse, self._ticked), None
        return self._lora_eval

    def _reward(self, pulse: Pulse, now: float) -> float:
        """LoRA_Eval: above 1 while fewer adapters are on the device than a batch is expected to need."""
        asked = [node for node in pulse.adapters if node.count]
        visits = [node.count * _decay(now - node.last_use) for node in asked]
        total = sum(visits)
        if not total:
            return 1.0
        loras = [v for v, node in zip(visits, asked, strict=True) if node.size]  # the base is always in
        low = sum(1 - (1 - v / total) ** self._batch for v in loras)
        return max(1.0, low / max(pulse.on_device, 1))

    def _cost(self, node: Node) -> float:
        return self.meter.load_s(node.kind, node.size)

    def _all(self, now: float) -> float:
        """ln of all visits in the window."""
        return math.log(max(self._visits, 1e-12)) - max(0.0, now - self._visited) / WINDOW_S

    def _fit_tau(self, now: float) -> bool:
        """Follows the median reuse interval, in factors of 2: a new tau means new keys for all nodes."""
        if self._median is None:
            return False
        median = min(max(self._median.value, 0.1), 3600.0)
        if 0.5 < median / self.tau < 2:
            return False
        self._units += (now - self._since) / self.tau
        self._since, self.tau = now, median
        return True


class Wom(Fastlibra):
    """Without dependency maintenance: any idle node may be evicted, whatever depends on it."""

    name = "fastlibra-wom"

    def binds(self, node: Node) -> bool:
        return False


class Wos(Fastlibra):
    """Without the cost model: LRU between the same thresholds."""

    name = "fastlibra-wos"
    lookahead = 1

    key = Policy.key
    value = Policy.value
    shelf_value = Policy.shelf_value


class Wol(Fastlibra):
    """Without LoRA_Eval: adapters get no reward."""

    name = "fastlibra-wol"

    def _reward(self, pulse: Pulse, now: float) -> float:
        return 1.0


class Median:
    """A running median in one number: it moves by a small factor towards each value.

    The blocks of a path are used together, so nearly equal values in a row count once: otherwise one long
    prompt would move the median by itself.
    """

    STEP = 0.01
    EQUAL = 0.01

    def __init__(self, first: float):
        self.value = first
        self._last = 0.0

    def add(self, value: float) -> None:
        if abs(value - self._last) <= self.EQUAL * value:
            return
        self._last = value
        self.value *= 1 + self.STEP if value > self.value else 1 - self.STEP


def _decay(age: float) -> float:
    return math.exp(-max(0.0, age) / WINDOW_S)


def _log_retain(x: float) -> float:
    """ln(1 - sigmoid(x)), exact for every x >= 0."""
    return -x - math.log1p(math.exp(-x))
