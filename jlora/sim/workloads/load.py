"""Records of a workload: exchanges of a session, their source, and the load to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.workloads.arrivals import Arrivals
from jlora.sim.workloads.popularity import Popularity


class DoesNotFit(ConfigError):
    """Most requests of a workload do not fit the load's context."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a dialog, without time, token ids and adapter.

    Attributes:
        asked, told: tokens of the question and of the answer, before shrinking.
        gap: time since the exchange before, in mean gaps of the workload; 0 for a dialog's first.
        role: adapter of the session's group that answers; None is the base model.
        context: 0, or the number of a separate context within the dialog (a sub-agent).
        aside: reads the context and leaves it unchanged.
        activated: the adapter is an activated LoRA, and the question invokes it.
    """

    asked: float
    told: float
    gap: float = 0.0
    role: int | None = 0
    context: int = 0
    aside: bool = False
    activated: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a workload's sessions.

    Attributes:
        dialog: draws one session of a group of adapters (a language, a service, a pipeline).
        turns: mean exchanges of a dialog.
        gap_s: mean seconds between two exchanges.
        prompt: tokens at the start of every session, shared by all sessions of a group.
        roles: adapters of a group.
        thinks: gaps start at the answer instead of the question (closed loop within a session).
    """

    name: str
    dialog: Callable[[np.random.Generator, int], list[Exchange]]
    arrivals: Arrivals
    popularity: Popularity
    turns: float = 1.0
    gap_s: float = 1.0
    prompt: int = 0
    roles: int = 1
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How much of a workload to draw.

    Attributes:
        rate: requests per second; seconds: length of the trace.
        adapters: number of adapters.
        shrink: divisor of all lengths.
        max_len: longest context, in tokens after shrinking; a session ends before it.
        gap_s: mean time between two turns of a session; None is the workload's own.
        popularity, arrivals: laws instead of the workload's own.
    """

    rate: float
    seconds: float
    adapters: int
    shrink: int = 1
    vocab: int = 32000
    max_len: int = 4096
    seed: int = 0
    gap_s: float | None = None
    popularity: Popularity | None = None
    arrivals: Arrivals | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "seconds", "adapters", "shrink", "max_len", "gap_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"load {name}: {value}: must be above 0")
        if self.vocab <= 3:
            raise ConfigError(f"load vocab: {self.vocab}: must be above 3")
