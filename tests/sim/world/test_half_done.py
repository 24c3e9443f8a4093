"""An error in the middle of a change of the cache: it leaves everything whole, or it ends the engine.

The world looks for the rest: no request reads wrong KV, none is left, and no block is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from jlora.cache.blocks import Tier
from jlora.cache.leases import Leases
from jlora.cache.residency import Residency
from jlora.cache.tree import Tree
from jlora.sim.world.replica import World
from jlora.sim.world.report import Journal
from jlora.sim.world.sites import Planted, Shortage
from jlora.sim.world.struck import Struck

SEEDS, ROUNDS = 8, 150
EVERY = 7  # so many changes go well, and the next one does not
INNER: dict[str, tuple[tuple[type, str], ...]] = {  # what each change calls
    "publish": ((Tree, "insert"), (Tier, "give"), (Residency, "adopt"), (Residency, "lock"), (Residency, "visit")),
    "release": ((Tier, "give"), (Residency, "save"), (Residency, "unlock"), (Residency, "retire")),
}


class Trouble:
    """Raises behind the `count`-th call within a change, if it has so many."""

    def __init__(self, patch: pytest.MonkeyPatch, change: str, count: int, error: Callable[[str], Exception]):
        self.struck, self.ceased = 0, False
        self._left = 0  # calls until it strikes; 0: it does not
        self._error = error
        real, changes = getattr(Leases, change), itertools.count(1)

        def changing(*args: Any) -> None:
            self._left = 0 if self.ceased or next(changes) % EVERY else count
            try:
                real(*args)
            finally:
                self._left = 0

        patch.setattr(Leases, change, changing)
        for thing, name in INNER[change]:
            patch.setattr(thing, name, self._behind(getattr(thing, name)))

    def _behind(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if self._left:
                self._left -= 1
                if not self._left:
                    self.struck += 1
                    raise self._error("half done")
            return result

        return call


@pytest.mark.parametrize("error", [Planted, Shortage])
@pytest.mark.parametrize("count", range(1, 5))
@pytest.mark.parametrize("change", INNER)
def test_half_a_change_leaves_everything_whole_or_ends_the_engine(
    change: str, count: int, error: Callable[[str], Exception], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Struck, "ends", lambda struck, handle: True)  # whom it ends is not the question here
    trouble = Trouble(monkeypatch, change, count, error)
    for seed in range(SEEDS):
        world, trouble.ceased = World(seed, Journal()), False
        world.sites.ended = True  # the engine may end
        for _ in range(ROUNDS):
            if not world.over:
                world.round()
        trouble.ceased = True
        world.finish()
    assert trouble.struck
