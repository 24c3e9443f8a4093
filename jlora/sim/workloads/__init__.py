"""The workloads W1 to W8 (docs/workloads.md), drawn from public traces or from their shape alone. No jax.

`play(SOURCES[name](data), load)` draws a trace; `data` is the directory of the public files
(`files.py`) or None. `closed` turns any trace into a closed loop, and `jlora.sim.trace.read_csv` reads
a user's own trace.

`Load.shrink` divides lengths, the tokens of a block and the ranks, so that a small model on a CPU can
stand for a large one on an accelerator: adapters, prompts and the pool keep their sizes in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from jlora.sim.workloads import scenarios
from jlora.sim.workloads.load import DoesNotFit, Load, Source
from jlora.sim.workloads.mixes import deal
from jlora.sim.workloads.play import closed, play
from jlora.sim.workloads.scenarios import SERVICE_PROMPT

__all__ = ["SERVICE_PROMPT", "SOURCES", "DoesNotFit", "Load", "Source", "closed", "play", "ranks"]

SOURCES: Mapping[str, Callable[[Path | None], Source]] = {
    "W1": scenarios.chat,
    "W1b": scenarios.long_chat,
    "W2": scenarios.translation,
    "W3": scenarios.agents,
    "W4": scenarios.tenants,
    "W4b": scenarios.recorded_tenants,
    "W5": scenarios.shifting,
    "W6": scenarios.pipelines,
    "W6a": partial(scenarios.pipelines, activated=True),
    "W7": scenarios.synthetic,
    "W8": scenarios.coding,
}


def ranks(load: Load) -> list[int]:
    """Ranks 32 and 64, shrunk, for half of the adapters each, independent of popularity (FASTLIBRA 6.1)."""
    return [rank // load.shrink for rank in deal((64, 32), load.adapters, load.seed)]
