"""How each adapter of the demo is trained: the shape of its LoRA, its steps, its seed.

The shapes differ on purpose (ranks 4 to 64, different projections, rsLoRA, a rank pattern), because
that is what jlora serves in one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ATTENTION = ("q", "k", "v", "o")
ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The adapter that learns a task.

    Attributes:
        rank, alpha: of every target that `ranks` does not name.
        targets: projections, as in `jlora.model.spec.PROJECTIONS`.
        rslora: scale alpha / sqrt(rank) instead of alpha / rank.
        ranks: projection -> its own rank (PEFT's `rank_pattern`).
    """

    rank: int
    targets: tuple[str, ...]
    alpha: int
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)

    def rank_of(self, projection: str) -> int:
        return self.ranks.get(projection, self.rank)

    def scale_of(self, projection: str) -> float:
        rank = self.rank_of(projection)
        return self.alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class Plan:
    """`seed` is added to the run's, so that an adapter trains the same whichever others do."""

    lora: LoraShape
    steps: int
    seed: int


PLANS: Mapping[str, Plan] = {
    "upper": Plan(LoraShape(4, ("o", "down"), 8), steps=200, seed=1),
    "leet": Plan(LoraShape(8, ("q", "v"), 16), steps=300, seed=2),
    "stars": Plan(LoraShape(6, ("v", "gate", "up"), 12), steps=300, seed=3),
    "mock": Plan(LoraShape(12, ("q", "k", "o", "up"), 24), steps=450, seed=4),
    "rot13": Plan(LoraShape(16, ALL_LINEAR, 32), steps=350, seed=6),
    "piglatin": Plan(LoraShape(32, ALL_LINEAR, 32, ranks={"gate": 8, "up": 8, "down": 8}), steps=450, seed=7),
    "reverse": Plan(LoraShape(64, ATTENTION, 16, rslora=True), steps=500, seed=8),
    "numbers": Plan(LoraShape(8, ALL_LINEAR, 16), steps=260, seed=9),
}
