"""Switches the weights between steps, a few pieces at a time. No jax.

While the first pieces of an adapter are merged, its requests run at any point of the switch: its blocks
act in the other pieces only. No other request runs until everything is taken out and proved. Those that ran
keep their blocks meanwhile. If they leave its requests no room, so that nobody runs, it is taken out at once.
It is merged again once a request of it has blocks, or nobody else asks.

Each piece reads its layer of the host copy. If that copy is dropped in the middle of a switch, what is
merged is taken out again, for which nothing more of it is needed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from functools import lru_cache

from jlora.adapters.registry import AdapterRegistry
from jlora.cache.tree import AdapterNode
from jlora.engine.merging import SMOOTH, Fixed, Merging
from jlora.engine.plan import NOTHING, Merged, Sequence, StepPlan, Work
from jlora.engine.ports import Loss, Merger, Price, Swapper
from jlora.engine.turns import Turns
from jlora.types import MergeState

log = logging.getLogger(__name__)

MOST_ERROR = 1.1  # times the unmerged path's error: with more, merging swallows the adapter
PRICES = 1024  # that are kept: of so many shapes of adapters
IDLE_S = 0.01  # of switching between two looks at the queue before any step was seen
IN_SHARE = 0.5  # of a usual step's time for the pieces before a step; all of it for taking out, as others wait then


class Switching(Turns):
    """Carries out what the policy decides, and tells the scheduler which sequences may run."""

    def __init__(self, policy: Merging, merger: Merger, registry: AdapterRegistry, swapper: Swapper, name: str = ""):
        self.policy = policy
        self.switches = 0
        self.moved = False  # the last `advance` has kept the device: weights were changed, or a loss measured
        self.name = name  # of the adapter that the configuration asks for
        self._merger = merger
        self._priced = lru_cache(PRICES)(merger.price)
        self._registry = registry
        self._swapper = swapper
        self._node: AdapterNode | None = None  # whose factors the merger has
        self._merged_name = ""  # its name
        self._losses: dict[int, Loss] = {}  # by uid
        self._unpaid_s = 0.0  # of the pieces of a measurement under way
        self._target: AdapterNode | None = None
        self._short: set[int] = set()  # uids refused because memory was short
        self._usual_s = 0.0  # of a step that decodes
        self._step_s = 0.0  # of any step: rises at once and falls slowly
        self._seen = NOTHING  # of the last step that was observed
        self._live: set[Sequence] = set()
        self._passed: set[Sequence] = set()
        self._leaving = False  # what is merged is being taken out: that goes on to its end
        self._in_vain: AdapterNode | None = None  # it was merged, but no request of it has got blocks since

    # -- what the scheduler asks ------------------------------------------------------------

    @property
    def merged(self) -> Merged:
        done = self._merger.done
        return Merged(self._node.uid if self._node and done else -1, done, self._merger.pieces)

    @property
    def only(self) -> AdapterNode | None:
        """While anything is merged, its adapter."""
        return self._node if self._merger.done else None

    @property
    def passed(self) -> set[Sequence]:
        return self._passed

    def joined(self, sequence: Sequence) -> None:
        self.policy.joined(sequence.adapter)
        self._live.add(sequence)
        if not self.may_run(sequence):
            self._passed.add(sequence)

    def planned(self, works: Iterable[Work]) -> None:
        served = {work.sequence for work in works}
        self._passed -= served
        # Before others' last tokens are read, they keep their slots.
        if not served and self.only and not (self._leased(self.only) or any(s.in_flight for s in self._live)):
            self._in_vain = self.only

    def left(self, sequence: Sequence) -> None:
        self.policy.left(sequence.adapter)
        self._live.discard(sequence)
        self._passed.discard(sequence)

    # -- what the engine asks ---------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether it has anything to do although no request is live."""
        done, node = self._merger.done, self._target
        return bool(done and node is not self._node) or (node is not None and done < self._merger.pieces)

    def holds(self, uid: int) -> bool:
        """Whether anything of this version is merged."""
        return bool(self._merger.done) and self._node is not None and self._node.uid == uid

    def decide(self, now: float) -> None:
        """Lets the policy choose. Called before every step, and while nothing runs."""
        merger = self._merger
        self._leaving = self._leaving and merger.done > 0
        merged = self._node if merger.done else None
        price = self._price(merged or self.policy.most_asked())
        pieces = merger.done or merger.pieces
        steps = -(-pieces // self._pieces_at_once(price.out_s))
        self.policy.out_s = pieces * price.out_s + (steps + 1) * self._step_s
        self.policy.passed = bool(self._passed)
        if isinstance(self.policy, Fixed):
            found = self._registry.get(self.name) if self.name in self._registry else None
            self.policy.adapter = None if found is None else found.node
        switch_s = merger.pieces * (price.into_s + price.out_s) / 2
        target, vain = self.policy.choose(now, merged, switch_s), self._in_vain
        if vain is not None and (self._leased(vain) or not self.policy.live[vain]):
            vain = self._in_vain = None
        others = self.policy.live.keys() - {target}
        self._target = None if self._leaving or (others and target is vain) else target
        if self._node not in (None, self._target) and not merger.done and self._unwanted(self._node):
            self._pay()
            merger.forget()  # a measurement may hold a layer's merged projections
            self._node = None

    def observe(self, plan: StepPlan, seconds: float, stalled: bool) -> None:
        """Learns from a step, unless it waited for a copy or for pieces of a switch, or its reading did."""
        if plan.work:
            self.policy.ran(plan.merged.share, seconds)
        waited, self._seen = stalled or plan.merged != self._seen or self.moved, plan.merged
        if waited:
            return
        self._step_s = max(seconds, self._step_s + SMOOTH * (seconds - self._step_s))
        if plan.decode and not plan.prefill:
            self._usual_s += (SMOOTH if self._usual_s else 1.0) * (seconds - self._usual_s)
            blocks = sum(node.size for node in {work.sequence.adapter for work in plan.decode})
            self.policy.times.observe(plan.merged.whole, len(plan.decode), blocks, seconds)

    def advance(self) -> bool:
        """Goes on with the switch under way, for a usual step's time at most.

        Returns:
            False if the weights have been loaded anew: taking an adapter out left others, or memory ended.
        """
        self.moved = False
        merger, node, reloads = self._merger, self._target, self._merger.reloads
        if merger.done and node is not self._node:
            return self._take_out()
        if merger.done == merger.pieces:
            merger.collect()
        if node is None or merger.done == merger.pieces:
            return True
        if merger.done and not node.on_host:
            return self._take_out()
        try:
            if not self._measured(node):
                return True
            if not merger.done:
                if node.coming:  # the host may add what the weights would have
                    return True
                self._read(node)  # anew: what the merger has may be old
                self._passed |= {sequence for sequence in self._live if sequence.adapter is not node}
                self.switches += 1
            into_s = self._price(node).into_s
            for _ in range(min(self._pieces_at_once(into_s, IN_SHARE), merger.pieces - merger.done)):
                self.moved = True
                self.policy.spent(into_s)
                merger.forward()
            if merger.done == merger.pieces:
                log.info("adapter %r, uid=%d, is merged", self._merged_name, node.uid)
        except MemoryError as error:  # nothing is merged, and all goes on without it
            self._forgo(node, error)
        return merger.reloads == reloads

    def state(self) -> MergeState:
        """What is merged now, and what decides it."""
        merged, reloads, policy = self.merged, self._merger.reloads, self.policy
        name, kept = (self._merged_name, self._merger.host_bytes) if merged.done else ("", 0)
        cost = policy.times.cost.share
        return MergeState(name, merged.uid, merged.share, self.switches, reloads, kept, cost, policy.alpha, policy.beta)

    def check(self) -> None:
        """Raises AssertionError if the weights are not what `merged` says. Reads all of them; see `Merger.audit`."""
        merger = self._merger
        assert 0 <= merger.done <= merger.pieces, f"{merger.done} of {merger.pieces} pieces are merged"
        assert not merger.done or self._node is not None, "weights are merged with an adapter that nobody knows"
        assert all(count > 0 for count in self.policy.live.values()), "an adapter has fewer than no live sequences"
        merger.audit()

    def loss(self, node: AdapterNode) -> tuple[float, str]:
        """The error of merging it over the error of not merging it (0: not measured), and why it is not merged."""
        loss = self._losses.get(node.uid)
        if loss is None:
            why = "memory was too short for it" if node.uid in self._short else "it is an activated LoRA"
            return 0.0, why if node.uid in self.policy.refused else ""
        return loss.error, _refusal(loss)

    # -- inside -----------------------------------------------------------------------------

    def _price(self, node: AdapterNode | None) -> Price:
        """Of a piece of an adapter; of one with all projections while its own are not known."""
        record = None if node is None else self._registry.live(node.uid)
        if node is None or record is None:
            return self._priced((), 0.0)
        loss = self._losses.get(node.uid)
        return self._priced(record.projections, 0.0 if loss is None else loss.lost)

    def _pay(self) -> None:
        """Pays for a measurement that ends or is given up. One that paused for each piece would rarely end."""
        self.policy.spent(self._unpaid_s)
        self._unpaid_s = 0.0

    def _unwanted(self, node: AdapterNode) -> bool:
        """Whether a measurement of it is of no use. While nobody asks it stays: who asks next may ask for the same."""
        return node.dying or node.gone or bool(self.policy.live and not self.policy.live[node])

    def _leased(self, node: AdapterNode | None) -> bool:
        """Whether a request of this adapter holds blocks."""
        return any(s.adapter is node and s.lease is not None for s in self._live)

    def _pieces_at_once(self, each_s: float, share: float = 1.0) -> int:
        return max(1, int((share * self._usual_s or IDLE_S) / max(each_s, 1e-6)))

    def _take_out(self) -> bool:
        reloads, self.moved, self._leaving = self._merger.reloads, True, True
        with contextlib.suppress(MemoryError):  # then everything is taken out
            out_s = self._price(self._node).out_s
            for _ in range(min(self._pieces_at_once(out_s), self._merger.done)):
                self.policy.spent(out_s)
                self._merger.back()
        if self._merger.done:
            return True
        self._leaving = False
        log.info("adapter %r, uid=%d, is taken out", self._merged_name, self._node.uid if self._node else -1)
        self._forget_old()
        return self._merger.whole() and self._merger.reloads == reloads

    def _measured(self, node: AdapterNode) -> bool:
        """Whether the adapter's factors are there and its loss is known and small; goes on with finding out."""
        record = self._registry.live(node.uid)
        if self._merger.done:
            return True
        if record is None or not node.on_host or node.coming:
            return False
        if record.alora_invocation_tokens:
            self._refuse(node)
            return False
        if node is not self._node:
            self._pay()
            self._read(node)
        if node.uid not in self._losses:
            self.moved = True
            self._unpaid_s += self._price(node).into_s
            loss = self._merger.measure()
            if loss is None:
                return False
            self._pay()
            self._losses[node.uid] = loss
            refusal = _refusal(loss)
            level = logging.WARNING if refusal and record.name == self.name else logging.INFO
            said = f"is never merged: {refusal}" if refusal else f"has {loss.error:.3g} times the error if it is merged"
            log.log(level, "adapter %r, uid=%d, %s", record.name, node.uid, said)
            if refusal:
                self._refuse(node)
                self._target = None
            return False  # taking it out takes longer the more is lost: the policy decides again
        return node.uid not in self.policy.refused

    def _forgo(self, node: AdapterNode, error: MemoryError) -> None:
        log.warning("adapter uid=%d is not merged: memory is short", node.uid, exc_info=error)
        self._pay()
        self._losses.pop(node.uid, None)
        self._short.add(node.uid)
        self._refuse(node)
        self._node = self._target = None

    def _refuse(self, node: AdapterNode) -> None:
        """Never merges this version."""
        self.policy.refused.add(node.uid)
        self._forget_old()

    def _forget_old(self) -> None:
        """Forgets what is known of versions that no name stands for any more."""
        live = self._registry.live
        self._losses = {uid: loss for uid, loss in self._losses.items() if live(uid)}
        self.policy.refused = {uid for uid in self.policy.refused if live(uid)}
        self._short &= self.policy.refused

    def _read(self, node: AdapterNode) -> None:
        """Tells the merger where the adapter's factors are."""
        record = self._registry.by_uid(node.uid)
        read = self._swapper.read
        # The blocks as they are then: the host copy may leave and come to others.
        self._merger.begin(record.projections, lambda which, layers: read([node.host[i] for i in which], layers))
        self._node, self._merged_name = node, record.name


def _refusal(loss: Loss) -> str:
    if loss.error > MOST_ERROR:
        return f"its error would be {loss.error:.3g} times the unmerged one, at most {MOST_ERROR:g} is merged"
    if loss.lost > 1:
        return "rounding loses too many of the weights' entries to put them back"
    return ""
