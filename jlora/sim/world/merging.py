"""The base's weights, into which one adapter at a time is merged, and a policy that draws which.

A piece of the weights holds a number: 0, or the mark of the adapter that is merged into it. A step adds it to what
the adapter's blocks bring, so a piece that is merged twice, not at all, or left behind makes wrong tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from jlora.cache.tree import AdapterNode
from jlora.engine.merging import AdapterCost, Merging, Times
from jlora.engine.plan import Merged, Work
from jlora.engine.ports import Loss, Price, Read
from jlora.sim.world.sites import Site, Sites
from jlora.sim.world.tasks import Tasks

SITES = {
    "merge.measure": Site("memory is too short to measure what a merge loses", 0.7),
    "merge.refused": Site("a merge would lose too much", 0.7),
    "merge.short": Site("memory is too short to merge a piece, or to take it out", 0.1),
    "merge.lost": Site("taking a piece out leaves other weights", 0.15),
}

PIECES = 4
PIECE_S = 0.002
MERGES = 0.4  # chance that a step begins to merge an adapter, while none is
ENDS = 0.06  # that it begins to take it out


class Weights:
    """See `jlora.engine.ports.Merger`."""

    pieces = PIECES
    host_bytes = 0

    def __init__(self, sites: Sites, tasks: Tasks):
        self.done = 0
        self.reloads = 0
        self._held = [0] * PIECES
        self._mark = 0  # of the first piece: all that are merged have the same
        self._read: Callable[[], int] = int  # the mark of the adapter's blocks, as the host tier has them now
        self._lost = False
        self._sites = sites
        self._tasks = tasks

    def price(self, projections: Sequence[str], lost: float) -> Price:
        return Price(PIECE_S, PIECE_S)

    def begin(self, projections: Sequence[str], read: Read) -> None:
        assert not self.done, "another adapter is merged"
        self._read = lambda: hash(tuple(read(range(len(projections)), slice(0, 1))))

    def forget(self) -> None:
        assert not self.done, "the adapter is merged"
        self._read = int

    def measure(self) -> Loss:
        self._sites.lack("merge.measure")
        return Loss(2.0 if self._sites.fires("merge.refused") else 1.0, 0.0)

    def collect(self) -> None:
        """Nothing comes."""

    def forward(self) -> None:
        self._trouble()
        mark = self._read()
        self._mark = self._mark if self.done else mark
        self._held[self.done] = mark
        self.done += 1

    def back(self) -> None:
        self._trouble()
        self.done -= 1
        self._held[self.done] = 0
        self._lost |= self._sites.fires("merge.lost")

    def whole(self) -> bool:
        if self._lost:
            self._reload()
            return False
        return True

    def audit(self) -> None:
        right = [self._mark] * self.done + [0] * (PIECES - self.done)
        assert self._held == right, f"the weights hold {self._held}, with {self.done} pieces merged"

    def act(self, mark: int, merged: Merged, work: Work) -> int | None:
        """What acts on a work in all pieces, if its adapter's blocks hold this mark; None if pieces differ."""
        own = work.sequence.adapter.uid == merged.uid
        beside = [mark if merged.acts(work) and not (own and piece < merged.done) else 0 for piece in range(PIECES)]
        found = {held + block for held, block in zip(self._held, beside, strict=True)}
        return found.pop() if len(found) == 1 else None

    def _trouble(self) -> None:
        self._tasks.sleep(PIECE_S)
        if self._sites.fires("merge.short"):
            self._reload()
            raise MemoryError("merge.short")

    def _reload(self) -> None:
        self.reloads += 1
        self._held, self.done, self._lost = [0] * PIECES, 0, False


class Drawn(Merging):
    """Merges what the seed draws, among adapters with requests, and takes it out soon."""

    def __init__(self, max_seqs: int, draw: random.Random):
        super().__init__(max_seqs, 1.0, Times(AdapterCost()))
        self._draw = draw
        self._chosen: AdapterNode | None = None

    def choose(self, now: float, merged: AdapterNode | None, switch_s: float) -> AdapterNode | None:
        """See `Merging.choose`."""
        chosen = self._chosen
        if merged is not chosen and merged is not None:
            self._chosen = None
        elif chosen is not None:
            stays = self.live[chosen] and self._legal(chosen) and self._draw.random() >= ENDS
            self._chosen = chosen if stays else None
        elif self._draw.random() < MERGES:
            legal = [node for node in self.live if node.size and self._legal(node)]
            self._chosen = self._draw.choice(legal) if legal else None
        return self._chosen
