"""Replicas that are killed at set times: `--fail T:REPLICA[:DOWN_S]`. No jax."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jlora.errors import ConfigError

_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
_FORM = re.compile(rf"({_NUMBER}):r?([0-9]+)(?::({_NUMBER}))?")


@dataclass(frozen=True, slots=True)
class Loss:
    """Replica `replica` (r0 is 0) is killed at `at` of the trace, and begins anew, with nothing, `down_s` later."""

    at: float
    replica: int
    down_s: float = math.inf


def parse(texts: Sequence[str], replicas: int) -> tuple[Loss, ...]:
    """The losses in the order of their times. Raises ConfigError."""
    losses = []
    for text in texts:
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"--fail {text[:40]}: must be T:REPLICA or T:REPLICA:DOWN_S, like 30:r1:10")
        at, replica, down = found.groups()
        if int(replica) >= replicas:
            raise ConfigError(f"--fail {text[:40]}: must name one of r0 to r{replicas - 1}")
        if float(at) < 0 or float(down or 0) < 0:
            raise ConfigError(f"--fail {text[:40]}: T and DOWN_S must be at least 0")
        losses.append(Loss(float(at), int(replica), math.inf if down is None else float(down)))
    back: dict[int, float] = {}
    for loss in (losses := sorted(losses, key=lambda loss: (loss.at, loss.replica))):
        if loss.at < back.get(loss.replica, 0.0):
            raise ConfigError(f"--fail {loss.at:g}:r{loss.replica}: must come when the replica is back")
        back[loss.replica] = loss.at + loss.down_s
    if losses and sum(math.isinf(at) for at in back.values()) == replicas:
        raise ConfigError(f"--fail {losses[-1].at:g}:r{losses[-1].replica}: no replica would be left; give a DOWN_S")
    return tuple(losses)


def check(losses: Sequence[Loss], end_s: float) -> None:
    """Raises ConfigError for a loss after the end of the simulation, which nobody would notice."""
    for loss in losses:
        if loss.at > end_s:
            raise ConfigError(f"--fail {loss.at:g}:r{loss.replica}: must come before the run ends at {end_s:g} s")
