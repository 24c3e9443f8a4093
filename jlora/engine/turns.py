"""Which sequences may run on the weights as they are: the scheduler asks, `Switching` answers. No jax."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jlora.cache.tree import AdapterNode
from jlora.engine.plan import NOTHING, Merged, Sequence, Work


class Turns:
    """Every sequence may run, on the base's own weights."""

    @property
    def merged(self) -> Merged:
        """What is merged into the weights that the next step runs on."""
        return NOTHING

    @property
    def only(self) -> AdapterNode | None:
        """The next step computes only this adapter's sequences right; None: everyone's."""
        return None

    def may_run(self, sequence: Sequence) -> bool:
        """Whether the next step computes this sequence right."""
        return self.only in (None, sequence.adapter)

    @property
    def passed(self) -> Collection[Sequence]:
        """Live sequences that a merge has kept waiting, and that have not been planned since."""
        return ()

    def joined(self, sequence: Sequence) -> None:
        """A sequence has been queued."""

    def planned(self, works: Iterable[Work]) -> None:
        """These are in the next step."""

    def left(self, sequence: Sequence) -> None:
        """A queued or running sequence has ended."""
