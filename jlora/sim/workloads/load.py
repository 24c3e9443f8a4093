"""The records of a workload: what a session says, where that comes from, and how much of it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jlora.errors import ConfigError
from jlora.sim.workloads.arrivals import Arrivals
from jlora.sim.workloads.popularity import Popularity


class DoesNotFit(ConfigError):
    """Most of a workload's requests do not fit a load."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a dialog, before it has a time, token ids and an adapter.

    Attributes:
        asked, told: tokens that it adds, and of its answer, before shrinking.
        gap: from the exchange before, in mean gaps of the workload; a dialog's first has 0.
        role: which adapter of the session's group answers; None is the base model.
        context: 0, or the number of a context of its own within the dialog (a sub-agent).
        aside: asked on the context, and not part of it afterwards.
        activated: the adapter is an activated LoRA, invoked by what is asked: it reads the context as the base does.
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
    """A workload: where its sessions come from.

    Attributes:
        dialog: draws one session of a group of adapters (a language, a service, a pipeline).
        turns: mean exchanges of a dialog.
        gap_s: mean seconds between two exchanges.
        prompt: tokens in front of every session, the same for all sessions of a group.
        roles: adapters of a group.
        thinks: gaps begin at the answer, and not at the question (closed loop inside a session).
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
    """How much of it.

    Attributes:
        rate: requests per second; seconds: length of the trace.
        adapters: how many there are.
        shrink: all lengths are divided by it.
        max_len: a session ends before its context would exceed it, in (shrunk) tokens.
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
                raise ConfigError(f"load {name}: {value}: must be over 0")
        if self.vocab <= 3:
            raise ConfigError(f"load vocab: {self.vocab}: must be over 3")
