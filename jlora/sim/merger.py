"""Modelled merging: the time that the pieces of a switch keep the device. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from jlora.engine.merging import AdapterCost, Fixed, Merging, Times
from jlora.engine.ports import Loss, Price, Read
from jlora.sim.device import ModelledDevice
from jlora.step_model import FittedSteps, StepLoad, StepModel

PIECES = 128  # four in each of 32 layers
# A merge reads and writes a weight (2 bytes each), its delta (4 bytes, three times) and the places of lost
# entries (4 bytes, three times): so many times the reading of the weights.
PASSES = 14.0
TYPICAL = 32  # sequences of the step that tells what adapters cost
CONTEXT = 512  # tokens of each


class ModelledMerger:
    """See `jlora.engine.ports.Merger`. It loses nothing."""

    reloads = 0
    host_bytes = 0
    pieces = PIECES

    def __init__(self, model: StepModel | FittedSteps, device: ModelledDevice):
        self.done = 0
        self._piece_s = PASSES * model.weights_s / PIECES
        self._device = device

    def price(self, projections: Sequence[str], lost: float) -> Price:
        """The same for all adapters."""
        return Price(self._piece_s, self._piece_s)

    def begin(self, projections: Sequence[str], read: Read) -> None:
        """A modelled adapter has no factors."""

    def collect(self) -> None:
        """It loses nothing."""

    def forget(self) -> None:
        """It holds nothing."""

    def measure(self) -> Loss:
        """At once."""
        return Loss(1.0, 0.0)

    def forward(self) -> None:
        self.done += 1
        self._device.keep(self._piece_s)

    def back(self) -> None:
        self.done -= 1
        self._device.keep(self._piece_s)

    def whole(self) -> bool:
        return True

    def audit(self) -> None:
        """There are no weights."""


def policy_of(
    merge: str, max_seqs: int, starve_s: float, model: StepModel | FittedSteps, blocks: Sequence[int]
) -> Merging:
    """The policy that `engine.merge` asks for, over adapters of so many blocks."""
    if merge != "auto":
        return Fixed(max_seqs, starve_s)

    def timed(size: int) -> tuple[int, float]:
        load = StepLoad(0, TYPICAL, TYPICAL * CONTEXT, TYPICAL * CONTEXT, size, TYPICAL * size, TYPICAL)
        return size, model.seconds(load)

    few, many = min(blocks, default=0), max(blocks, default=0)
    return Merging(max_seqs, starve_s, Times(AdapterCost.measured(timed(0)[1], timed(few), timed(many))))
