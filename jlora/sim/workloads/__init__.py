"""Workloads as recipes: W1 to W8, from public traces or from their shape alone. No jax.

           stands for                            sessions                    adapter
    W1     chatbot (FASTLIBRA, S-LoRA)           about 10 turns, minutes     per session, Zipf 0.9
    W1b    long chats below one prefix           Mooncake's                  per session, Zipf 0.9
    W2     translation (FASTLIBRA)               one request                 per language: who asks
    W3     personal agents (FASTLIBRA)           about 9 turns, seconds      per service, Zipf 0.9
    W4     many tenants (dLoRA)                  one request                 per client
    W4b    the same, a recorded clock            one request                 recorded
    W5     shifting popularity (LoRAServe)       one request                 Zipf 1.0, dealt anew every 5 min
    W6     pipelines base, checkers, base        W3's dialogs                three checkers each, and the base
    W6a    the same                              the same                    the checkers are activated LoRAs
    W7     synthetic (S-LoRA, Punica)            one request                 power law
    W8     coding agents                         long, closed loop           per session, another for sub-agents

`play(SOURCES[name](data), load)` draws a trace; `data` is the directory of the public files
(`files.py`) or None. `closed` turns any trace into a closed loop, `jlora.sim.trace.read_csv` reads a user's own.

    scenarios.py     W1 to W8            popularity.py   who asks for which adapter
    play.py          drawing a trace     arrivals.py     when sessions begin
    load.py          the records         mixes.py        which adapter has which rank
    files.py         the public files    flags.py        a command line's

A small model on a CPU stands for a large one on an accelerator, so everything that is counted in
tokens is divided by `Load.shrink`: lengths, the tokens of a block, the ranks. Then an adapter, a
prompt and the pool have the same sizes in blocks as in the paper (block of 32 tokens, ranks 32 and 64).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from jlora.sim.workloads import scenarios
from jlora.sim.workloads.load import DoesNotFit, Exchange, Load, Source
from jlora.sim.workloads.mixes import EqualShares, HighOnHot, RankMix, deal
from jlora.sim.workloads.play import closed, play
from jlora.sim.workloads.scenarios import SERVICE_PROMPT

__all__ = [
    "SERVICE_PROMPT",
    "SOURCES",
    "DoesNotFit",
    "EqualShares",
    "Exchange",
    "HighOnHot",
    "Load",
    "RankMix",
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
    "W5": scenarios.drift,
    "W6": scenarios.pipelines,
    "W6a": scenarios.activated_pipelines,
    "W7": scenarios.synthetic,
    "W8": scenarios.coding,
}


def ranks(load: Load) -> list[int]:
    """Ranks 32 and 64, shrunk, half of the adapters each, whatever their popularity (FASTLIBRA 6.1)."""
    return [rank // load.shrink for rank in deal((64, 32), load.adapters, load.seed)]
