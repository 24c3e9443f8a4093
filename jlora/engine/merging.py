"""When to merge which adapter: dLoRA's dynamic batching (Wu et al. 2024, Algorithms 1 to 3). No jax, no clock.

A merged adapter's requests run the base's program, which is faster than the base's and an adapter's
together. All others wait meanwhile. So an adapter is merged when its requests, all that wait or run,
exceed `alpha` times the batch that would run in order of arrival (the ratio can exceed 1), and taken
out below `beta`. Both follow from measured throughput with the switch's cost inside. While nobody else asks
for anything, nobody waits. Then an adapter is also merged, after `PERIOD` such steps, if it pays within as many again.

Nobody knows who asks next, and estimates err. So merges are paid from a budget of latency, summed over all requests:
`BUDGET` of it, and what merged steps gain, minus what the waiting requests lose. Every piece of a switch costs its time
for all requests, and so does measuring what a merge loses. The price of a merge is both switches. What is alone and
does not exceed `alpha` is merged when its price is there. What exceeds `alpha` has requests that wait for the merge: it
begins unless those before it have left a debt.

Credits bound how long others wait. Each second that an adapter is merged while others wait moves a
second of credit from it to each of them. Once one of them has `engine.merge_starve_s` of credit, the
adapter is taken out. Credits return to 0 while all requests run. Nothing is merged before that, nor before
every request that has waited has had a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jlora.cache.tree import AdapterNode

PERIOD = 64  # steps between two tunings, and after which one adapter is taken to be all that is asked for
HORIZON = 256  # steps that a switch is expected to serve
DECREMENT, FACTOR = 0.1, 1.5  # of the thresholds, after a period in which the merged state was better, or worse
LEAST, MOST = 0.05, 1.5  # of the thresholds: a quiet hour must not keep a busy one from merging
# By which merged throughput must exceed unmerged throughput, as estimates err: while others wait, and if nobody does.
MARGIN, MARGIN_ALONE = 1.1, 1.05
SMOOTH = 0.1  # share of the newest step in a mean
BUDGET = 0.02  # of latency that merging may cost if it gains nothing
AGE = 1 / 4096  # of the way back to what the start measured, each step: a few slow steps must not end merging for good


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """What one adapter of all rows adds to a decode step: linear in its blocks.

    Attributes:
        share: the part that it is of the step, for an adapter of `blocks` blocks.
        block: what a block more adds, over the base's step.
    """

    share: float = 0.0
    blocks: int = 0
    block: float = 0.0

    @classmethod
    def measured(cls, base_s: float, small: tuple[int, float], large: tuple[int, float]) -> AdapterCost:
        """From three measured steps. Noise makes no cost negative.

        Args:
            base_s: seconds of a step without an adapter.
            small, large: blocks of an adapter, and seconds of a step with it; both may be the same.
        """
        few, many = small[0], large[0]
        small_s = max(base_s, small[1])
        block = max(0.0, large[1] - small_s) / base_s / (many - few) if many > few else 0.0
        return cls(1 - base_s / small_s, few, block)

    def share_of(self, blocks: float) -> float:
        """The share of a step that an adapter of so many blocks is."""
        added = max(0.0, self.share / (1 - self.share) + self.block * (blocks - self.blocks))
        return added / (1 + added)


@dataclass(slots=True)
class _Mean:
    """Of recent steps: their seconds, and the blocks of their adapters, each counted once."""

    seconds: float
    blocks: float

    def moved(self, seconds: float, blocks: float) -> None:
        self.seconds += SMOOTH * (seconds - self.seconds)
        self.blocks += SMOOTH * (blocks - self.blocks)


class Times:
    """Seconds of a decode step by its sequences, merged and not; what was not seen yet follows from what was.

    Steps of 2^n to 2^(n+1) - 1 sequences count as one size. A merged step runs the base's program, so its time does
    not depend on the adapter.
    """

    def __init__(self, cost: AdapterCost):
        self.cost = cost
        self._means: dict[bool, dict[int, _Mean]] = {True: {}, False: {}}  # merged -> size -> mean

    def observe(self, merged: bool, count: int, blocks: int, seconds: float) -> None:
        """Learns from a step of `count` sequences, whose adapters have so many blocks."""
        size, own = count.bit_length(), self._means[merged]
        beside = self._means[not merged].get(size)
        if size not in own:  # the first step may be a slow one
            expected = beside.seconds * self._over(merged, size, blocks) if beside else seconds
            own[size] = _Mean(expected, blocks)
        own[size].moved(seconds, blocks)
        if beside:
            left = self._left(blocks)
            expected = own[size].seconds * (1 / left if merged else left)
            beside.seconds += AGE * (expected - beside.seconds)

    def step_s(self, merged: bool, count: int, blocks: int) -> float | None:
        """Of an adapter of so many blocks, merged or not; None if no step was seen.

        A step of the same size of the other kind tells more than one of another size of this kind.
        """
        size, own, other = count.bit_length(), self._means[merged], self._means[not merged]
        if size in own or (own and size not in other):
            return own[_nearest(own, size)].seconds
        return other[_nearest(other, size)].seconds * self._over(merged, size, blocks) if other else None

    def _over(self, merged: bool, size: int, blocks: int) -> float:
        """A step of this kind over one of the other: as measured at the start, corrected by the nearest size seen."""
        found, left = self._means, self._left(blocks)
        both = found[True].keys() & found[False].keys()
        if both:
            seen = _nearest(both, size)
            bare, adapted = found[True][seen], found[False][seen]
            left *= bare.seconds / (adapted.seconds * self._left(adapted.blocks))
        return left if merged else 1 / left

    def _left(self, blocks: float) -> float:
        """A merged step over an unmerged one with so many blocks, as measured at the start."""
        return 1 - self.cost.share_of(blocks)


def _nearest(sizes: Iterable[int], size: int) -> int:
    return min(sizes, key=lambda each: (abs(each - size), each))


class Merging:
    """The decision of one replica. Adapters that activate later, or that lose too much, are refused."""

    def __init__(self, max_seqs: int, starve_s: float, times: Times):
        self.alpha, self.beta = 1.0, 0.5
        self.live: Counter[AdapterNode] = Counter()  # sequences that wait or run, the base's too
        self.refused: set[int] = set()  # uids: a version that comes back from the disk has another node
        self.times = times
        self.out_s = 0.0  # until what is merged, or would be, is out, with the steps between its pieces
        self.passed = False  # a request that a merge has kept waiting has had no step since
        self._max_seqs = max_seqs
        self._starve_s = starve_s
        self._credits: dict[AdapterNode, float] = {}
        self._steps = 0  # since the last tuning
        self._alone = 0  # steps since anybody else has asked
        self._budget_s = 0.0  # request-seconds that merging may still cost; below 0: a debt
        self._dominant = False  # the ratio has passed `alpha`, and while merged has not fallen below `beta` since
        self._at: float | None = None  # when it last chose
        self._top: AdapterNode | None = None

    def joined(self, adapter: AdapterNode) -> None:
        self.live[adapter] += 1

    def left(self, adapter: AdapterNode) -> None:
        self.live[adapter] -= 1
        if not self.live[adapter]:
            del self.live[adapter]

    def spent(self, seconds: float) -> None:
        """A piece of a switch has kept all requests waiting, or measuring what a merge would lose has."""
        self._budget_s -= seconds * self.live.total()

    def ran(self, share: float, seconds: float) -> None:
        """A step has ended after so many seconds, with this share of the chosen adapter merged."""
        self._steps += 1
        self._alone += 1
        self._budget_s += BUDGET * seconds * self.live.total()
        if share and self._top is not None:
            self._budget_s += self._gain_s(self._top, share, seconds) * self.live.total()

    def choose(self, now: float, merged: AdapterNode | None, switch_s: float) -> AdapterNode | None:
        """The adapter to have merged from now on; called before every step, and while nothing can run.

        Args:
            merged: the one that is, wholly or in part; only its requests run.
            switch_s: seconds that a switch takes, one way, with `merged`, or with what `most_asked` names.
        """
        self._move_credits(now, merged)
        if not self.live:  # whoever asks next will probably ask for the same
            self._dominant = False
            return merged if merged and self._legal(merged) and self._alone >= PERIOD else None
        top = merged or self.most_asked()
        if top is None or not self._legal(top):
            self._top = None
            return None
        self._budget_s = min(self._budget_s, 2 * switch_s * max(self._max_seqs, self.live.total()))
        if top is not self._top or not self._only(top):
            self._alone = 0
        if top is not self._top or (self._alone and not self._dominant):  # the thresholds do not count
            self._steps, self._top = 0, top
        elif self._steps >= PERIOD:
            self._tune(top, merged is not None, switch_s)
            self._steps = 0
        ratio = self.live[top] / self._batch
        self._dominant = ratio > self.alpha or (merged is not None and self._dominant and ratio >= self.beta)
        if merged is not None:
            return merged if self._stays(merged, switch_s) else None
        return top if self._eligible(top) and self._pays(top, switch_s) else None

    def most_asked(self) -> AdapterNode | None:
        """The adapter with the most sequences that wait or run, of those that may be merged."""
        legal = [(count, -node.uid, node) for node, count in self.live.items() if node.size and self._legal(node)]
        return max(legal, key=lambda entry: entry[:2])[2] if legal else None

    def starving(self, merged: AdapterNode, switch_s: float) -> bool:
        """Whether a request has waited for so long that the merged adapter must go now."""
        others = [self._credits.get(node, 0.0) for node in self.live if node is not merged]
        return bool(others) and max(others) + max(switch_s, self.out_s) >= self._starve_s

    # -- inside -----------------------------------------------------------------------------

    @property
    def _batch(self) -> int:
        """Sequences of the batch in order of arrival."""
        return max(1, min(self._max_seqs, self.live.total()))

    def _legal(self, node: AdapterNode) -> bool:
        return not node.dying and not node.gone and node.uid not in self.refused

    def _only(self, node: AdapterNode) -> bool:
        """Whether nobody asks for anything else."""
        return self.live.keys() == {node}

    def _eligible(self, top: AdapterNode) -> bool:
        """Whether it has the credit to be served before others."""
        if self._only(top):
            return True
        return not self.passed and not any(self._credits.get(node, 0.0) for node in (top, *self.live))

    def _pays(self, top: AdapterNode, switch_s: float) -> bool:
        if max(switch_s, self.out_s) >= self._starve_s:  # whoever comes next would wait for too long
            return False
        if self._dominant:
            ready, steps = self._budget_s >= 0, max(self._alone, HORIZON)
        else:
            ready, steps = self._alone >= PERIOD and self._budget_s >= self._price_s(switch_s), self._alone
        if not ready:
            return False
        rates = self._rates(top, switch_s, steps)
        margin = MARGIN_ALONE if self._only(top) else MARGIN
        return rates is not None and rates[0] > margin * rates[1]

    def _stays(self, merged: AdapterNode, switch_s: float) -> bool:
        if self._only(merged):  # its requests run the base's program, which adapters never make faster
            return True
        return self._dominant and not self.starving(merged, switch_s)

    def _price_s(self, switch_s: float) -> float:
        """Of a merge: both switches, for every request."""
        return 2 * switch_s * self.live.total()

    def _gain_s(self, top: AdapterNode, share: float, seconds: float) -> float:
        """What a step of so many seconds saved, with such a share merged. Below 0: a loss.

        Its sequences are a part of the batch. What it took beside its decode, for prompts, it takes unmerged, too.
        A loss while nobody else asks means that the machine became slower, so it does not count.
        """
        count, batch = min(self.live[top], self._max_seqs), self._batch
        merged_s, own_s = (self.times.step_s(kind, count, top.size) for kind in (True, False))
        batch_s = self.times.step_s(False, batch, top.size)
        if not (count and merged_s and own_s and batch_s):
            return 0.0
        beside_s = seconds - share * merged_s - (1 - share) * own_s
        gain_s = count / batch * (batch_s + beside_s) - seconds
        return max(0.0, gain_s) if self._only(top) else gain_s

    def _rates(self, top: AdapterNode, switch_s: float, steps: float) -> tuple[float, float] | None:
        """Sequences served per second: merged for so many steps, with both switches, and unmerged."""
        count = min(self.live[top], self._max_seqs)
        merged_s = self.times.step_s(True, count, top.size)
        unmerged_s = self.times.step_s(False, self._batch, top.size)
        if not count or not merged_s or not unmerged_s:
            return None
        if len(self.live) > 1:  # others wait, so it ends soon
            steps = min(steps, max(1.0, (self._starve_s - 2 * max(switch_s, self.out_s)) / merged_s))
        return count * steps / (steps * merged_s + 2 * switch_s), self._batch / unmerged_s

    def _tune(self, top: AdapterNode, merged: bool, switch_s: float) -> None:
        """Algorithm 2, at a break point."""
        rates = self._rates(top, switch_s, HORIZON)
        if rates is None:
            return
        better = rates[0] > rates[1]
        old = self.beta if merged else self.alpha
        new = min(MOST, max(LEAST, old - DECREMENT if better else old * FACTOR))
        if merged:
            self.beta = min(new, self.alpha)
        else:
            self.alpha, self.beta = new, min(self.beta, new)

    def _move_credits(self, now: float, merged: AdapterNode | None) -> None:
        passed = 0.0 if self._at is None else now - self._at
        self._at = now
        others = [node for node in self.live if node is not merged]
        if merged is not None and others:
            self._credits[merged] = self._credits.get(merged, 0.0) - passed
            for node in others:  # what one owes from its own merge must not make it wait longer
                self._credits[node] = max(0.0, self._credits.get(node, 0.0)) + passed
        else:
            for node, credit in list(self._credits.items()):
                left = max(0.0, abs(credit) - passed)
                if left and not node.dying:
                    self._credits[node] = left if credit > 0 else -left
                else:
                    del self._credits[node]


class Fixed(Merging):
    """`engine.merge = NAME`: that adapter is merged, except while others must run."""

    def __init__(self, max_seqs: int, starve_s: float):
        super().__init__(max_seqs, starve_s, Times(AdapterCost()))
        self.alpha = self.beta = 0.0  # it has no thresholds
        self.adapter: AdapterNode | None = None  # the version that the name stands for

    def choose(self, now: float, merged: AdapterNode | None, switch_s: float) -> AdapterNode | None:
        """See `Merging.choose`."""
        self._move_credits(now, merged)
        node = self.adapter
        if node is None or node.reading or not self._legal(node):
            return None
        if merged is not None and merged is not node:
            return None
        others = self.live.keys() - {node}
        if not others:
            return node
        if not self.live[node] or self.starving(node, switch_s):
            return None
        return node if merged is node or self._eligible(node) else None
