"""An engine that is ready to step, and what its surroundings need to know of it. No jax."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jlora import machine
from jlora.adapters.catalogue import Catalogue
from jlora.engine.engine import Engine
from jlora.engine.ports import Parts
from jlora.engine.sources import Reader
from jlora.replica import ReplicaInfo

if TYPE_CHECKING:  # it imports jax; a simulation has another
    from jlora.engine.runner import Runner


class Phases:
    """Measures the seconds of a start by phase; the first is the process before the engine: imports and the fronts."""

    def __init__(self) -> None:
        self.seconds = {"process": machine.age_s()}
        self._at = time.perf_counter()

    def end(self, name: str) -> None:
        """What has happened since the last end was this phase."""
        now = time.perf_counter()
        self.seconds[name], self._at = now - self._at, now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s: {parts}"


# Runs a function between two steps of the engine, and waits for it.
Between = Callable[[Callable[[], Any]], Any]
# What waits for the last program.
Finish = Callable[[Between], None]


@dataclass(frozen=True, slots=True)
class Built:
    """What `jlora.engine.build` makes.

    Attributes:
        finish: call it once, when nothing is left to compile: it measures what adapters cost a step, and lets steps
            run behind copies on their way.
    """

    engine: Engine
    parts: Parts
    runner: Runner
    info: ReplicaInfo
    reader: Reader
    catalogue: Catalogue
    finish: Finish = lambda between: None
