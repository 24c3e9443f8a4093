"""dLoRA's Figure 10: merged and unmerged inference by skew, in the simulator (Wu et al. 2024, section 7.3).

Eight adapters of rank 8 on Llama-2-7B on one A100-80GB (the paper's A800 computes alike). The hottest adapter gets a
share of the requests, the others share the rest. Lengths follow ShareGPT's means; arrivals are Poisson's.

    unmerged   engine.merge = off
    auto       engine.merge = auto
    merged     one adapter is merged at any time: the most asked-for, until nobody asks for it or others starve

Kernel costs: `paper` (adapters cost 38.9 % of the base's products, Figure 5) and `ours` (the step model's). The
figure of a request is its latency over its output tokens; the mean divides the sums, as in section 7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.runner import Options
from jlora.cache.tree import AdapterNode
from jlora.engine.merging import AdapterCost, Merging, Times
from jlora.loadgen.rounds import Budget, Sample, Side
from jlora.sim.hardware import CHIPS, MODELS, Hardware
from jlora.sim.scenario import Scenario, Work, simulate
from jlora.sim.trace import FIRST_ID, Trace, Turn
from jlora.step_model import StepLoad, StepModel

CARD = Hardware(CHIPS["a100"], 1, MODELS["llama-2-7b"])
ADAPTERS, RANK = 8, 8
HOT = (0.125, 0.5, 0.7, 0.9, 1.0)  # the hottest adapter's share of the requests
OVERHEAD = 0.389  # of the base's products: dLoRA, Figure 5
LOADS = {"paper": (20.0,), "ours": (22.0,)}  # requests/s: a little above unmerged capacity
SECONDS = 25.0
PROMPT, OUTPUT = 160, 210  # mean tokens


@dataclass(frozen=True, slots=True)
class Einsum(StepModel):
    """A step whose adapters cost a share of the base's products, whatever they are."""

    def seconds(self, load: StepLoad) -> float:
        """See `StepModel.seconds`."""
        bare = StepModel.seconds(self, load._replace(adapter_blocks=0, adapter_tokens=0))
        linear = max(self.weights_s, load.prompt * self.prompt_token_s + load.decode * self.decode_token_s)
        return bare + OVERHEAD * linear * (load.adapter_tokens > 0)


class MergedOnly(Merging):
    """Something is always merged."""

    def choose(self, now: float, merged: AdapterNode | None, switch_s: float) -> AdapterNode | None:
        """See `Merging.choose`."""
        self._move_credits(now, merged)
        if merged is not None and self.live[merged] and not self.starving(merged, switch_s):
            return merged
        asked = [(self._credits.get(node, 0.0), self.live[node], node.uid, node) for node in self.live]
        return max(asked)[3] if asked else None


def run(options: Options) -> None:
    """Every cost, load and skew."""
    seconds = 20.0 if options.quick else options.seconds or SECONDS
    records = options.records("merging-simulated", {"seconds": seconds, "adapters": ADAPTERS, "rank": RANK})
    hot = HOT[1::3] if options.quick else HOT
    for costs, rates in LOADS.items():
        for rate in rates[:1] if options.quick else rates:
            for share in hot:
                work = Work.of(trace(rate, share, seconds), [RANK] * ADAPTERS, CARD)
                sides = [Side(side, partial(measured, costs, side, work)) for side in ("unmerged", "auto", "merged")]
                records.measure(f"{costs} {rate:g} {share:g}", sides, Budget(1, options.minutes))


def trace(rate: float, hot: float, seconds: float) -> Trace:
    """The requests."""
    rng = np.random.default_rng(7)
    at = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    shares = [hot, *[(1 - hot) / (ADAPTERS - 1)] * (ADAPTERS - 1)]
    turns = []
    for i, when in enumerate(at):
        prompt, output = (int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0), 4, 1024)) for mean in (PROMPT, OUTPUT))
        adds = tuple(rng.integers(FIRST_ID, 30000, prompt).tolist())
        turns.append(Turn(float(when), i, 0, adds, output, int(rng.choice(ADAPTERS, p=shares))))
    return Trace("merging", tuple(turns), tuple(map(str, range(ADAPTERS))))


def measured(costs: str, side: str, work: Work) -> Sample:
    """One run."""
    model = CARD.step_model()
    if costs == "paper":
        model = Einsum(*(getattr(model, name) for name in model.__dataclass_fields__))
    scenario = Scenario(CARD, step=model)
    engine = replace(scenario.engine, max_seqs=64, merge="auto" if side == "auto" else "off")
    scenario = replace(scenario, engine=engine)
    merging = MergedOnly(engine.max_seqs, engine.merge_starve_s, Times(AdapterCost())) if side == "merged" else None
    return figures(simulate(scenario, work, "jlora", merging=merging))


def figures(result: dict[str, Any]) -> Sample:
    """Latency over output tokens."""
    columns, rows = result["requests"]["columns"], result["requests"]["rows"]
    asked = [dict(zip(columns, row, strict=True)) for row in rows]
    done = [(row["ttft_s"] + row["tpot_s"] * (row["output"] - 1), row["output"]) for row in asked if row["output"]]
    each: Sequence[float] = [latency / output for latency, output in done]
    return {
        "mean_s": sum(latency for latency, _ in done) / sum(output for _, output in done),
        "p90_s": float(np.percentile(each, 90)),
        "unfinished": len(asked) - len(done),
        "busy": result["device"]["busy"],
        "steps": result["device"]["steps"],
    }
