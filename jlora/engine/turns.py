"""Which sequences may run on the weights as they are: the scheduler asks, `Switching` answers. No jax."""

from __future__ import annotations

from jlora.engine.plan import NOTHING, Merged, Sequence


class Turns:
    """Every sequence may run, on the base's own weights."""

    @property
    def merged(self) -> Merged:
        """What is merged into the weights that the next step runs on."""
        return NOTHING

    def may_run(self, sequence: Sequence) -> bool:
        """Whether the next step computes this sequence right."""
        return True

    def joined(self, sequence: Sequence) -> None:
        """A sequence has been queued."""

    def left(self, sequence: Sequence) -> None:
        """A queued or running sequence has ended."""
