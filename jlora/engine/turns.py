"""Who may run in a step: the scheduler's one question to whoever changes the weights. No jax."""

from __future__ import annotations

from jlora.engine.plan import NOTHING, Merged, Sequence


class Turns:
    """Everyone may run, on the base's own weights."""

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
