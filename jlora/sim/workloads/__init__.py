"""The workloads W1 to W8, drawn from public traces or from their shape alone. No jax.

           stands for                            sessions                    adapter
    W1     chatbot (FASTLIBRA, S-LoRA)           about 10 turns, minutes     per session, Zipf 0.9
    W1b    long chats below one prefix           Mooncake's                  per session, Zipf 0.9
    W2     translation (FASTLIBRA)               one request                 per language, by client
    W3     personal agents (FASTLIBRA)           about 9 turns, seconds      per service, Zipf 0.9
    W4     many tenants (dLoRA)                  one request                 per client
    W4b    the same, a recorded clock            one request                 recorded
    W5     shifting popularity (LoRAServe)       one request                 Zipf 1.0, new ranks every 5 min
    W6     pipelines base, checkers, base        W3's dialogs                three checkers each, and the base
    W6a    the same                              the same                    the checkers are activated LoRAs
    W7     synthetic (S-LoRA, Punica)            one request                 power law
    W8     coding agents                         long, closed loop           per session, another for sub-agents

`play(SOURCES[name](data), load)` draws a trace; `data` is the directory of the public files
(`files.py`) or None. `closed` turns any trace into a closed loop, and `jlora.sim.trace.read_csv` reads
a user's own trace.

    scenarios.py     W1 to W8            popularity.py   adapters of sessions
    play.py          draws a trace       arrivals.py     session starts
    load.py          records             mixes.py        ranks of adapters
    files.py         public files        flags.py        shared flags

`Load.shrink` divides lengths, the tokens of a block and the ranks, so that a small model on a CPU can
stand for a large one on an accelerator: adapters, prompts and the pool keep their sizes in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from jlora.sim.workloads import scenarios
from jlora.sim.workloads.load import DoesNotFit, Exchange, Load, Source
from jlora.sim.workloads.mixes import deal
from jlora.sim.workloads.play import closed, play
from jlora.sim.workloads.scenarios import SERVICE_PROMPT

__all__ = [
    "SERVICE_PROMPT",
    "SOURCES",
    "DoesNotFit",
    "Exchange",
    "Load",
    "Source",
    "closed",
    "play",
    "ranks",
]

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
