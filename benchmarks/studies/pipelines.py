"""R6 in the simulator: long contexts, large models and many pipelines, with activated LoRAs and with LoRAs.

Set-ups as those of activated LoRA's own evaluation (arXiv 2512.17910: models of several sizes,
prompts up to 64k tokens, batches and asynchronous arrivals), on hardware that is modelled:

    context    512 to 64k tokens, one pipeline alone, two models
    adapters   1 to 10 in the last round of checks
    batch      many pipelines at once: the KV of plain LoRAs passes the pool
    rate       pipelines begin at random times, up to far more than plain LoRAs can take

Both sides are the product's own scheduler and cache; they differ in nothing but the position from
which an adapter acts. All is counted in virtual seconds: the same command gives the same numbers.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
from tqdm import tqdm

from benchmarks.runner import Options
from benchmarks.studies.alora import ALONE, SHARED, Step, means
from benchmarks.studies.pipeline_play import Answered, Pipelines, Shape, base_and_checks
from jlora.cache import inspect
from jlora.cache.catalog import make_policy
from jlora.cache.manager import Sizes
from jlora.cache.transfer import Meter
from jlora.config import CacheConfig, EngineConfig
from jlora.sim.hardware import CHIPS, GROUPS, MODELS, Hardware
from jlora.sim.link import LinkSpec
from jlora.sim.replica import Replica, ReplicaSpec

RANK = 32  # of every adapter, on q, k, v and o
HOST_BYTES = 240e9
ENGINE = EngineConfig(max_seqs=128, max_step_tokens=2048, max_queue=1 << 20)
SMALL, LARGE = ("llama-3.1-8b", 1), ("llama-3.1-70b", 4)  # a model and how many chips serve it
CHIP = "h100"


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting.

    Attributes:
        sweep: which of the module's four it belongs to.
        context: tokens; adapters: in the last round of checks.
        pipelines: how many.
        rate: how many begin per second, at random times; 0: all at once.
    """

    sweep: str
    model: str
    chips: int
    context: int
    adapters: int = 5
    pipelines: int = 1
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Of the cell."""
        return f"{self.model}, {self.context} tokens, {self.adapters} adapters, {self.pipelines} x {self.rate:g}/s"

    def starts(self) -> list[float]:
        """Seconds; of a Poisson process, the first at 0."""
        if not self.rate:
            return [0.0] * self.pipelines
        gaps = np.random.default_rng(self.pipelines).exponential(1 / self.rate, self.pipelines - 1)
        return [0.0, *np.cumsum(gaps).tolist()]


CONTEXTS = tuple(512 << i for i in range(8))
CELLS = (
    *(Cell("context", *size, context) for size in (SMALL, LARGE) for context in CONTEXTS),
    *(Cell("adapters", *SMALL, 16384, adapters) for adapters in (1, 2, 5, 10)),
    *(Cell("batch", *size, 16384, pipelines=count) for size in (SMALL, LARGE) for count in (4, 12, 24)),
    *(Cell("batch", *size, 65536, pipelines=6) for size in (SMALL, LARGE)),
    *(Cell("rate", *SMALL, 16384, pipelines=40, rate=rate) for rate in (0.1, 0.2, 0.3, 0.5, 1.0)),
)
QUICK = (Cell("context", *SMALL, 512, 2), Cell("rate", *SMALL, 512, 2, pipelines=3, rate=1.0))


def run(options: Options) -> None:
    """Plays all cells, both sides."""
    cells, shape = (QUICK if options.quick else CELLS), asdict(Shape(0, (), True))
    settings = {
        "chip": CHIP,
        "chip_source": CHIPS[CHIP].source,
        "rank": RANK,
        "host_bytes": HOST_BYTES,
        "max_seqs": ENGINE.max_seqs,
        "max_step_tokens": ENGINE.max_step_tokens,
        **{key: shape[key] for key in ("base_tokens", "check_tokens", "invocation")},
        "pool_bytes": {cell.model: hardware(cell.model, cell.chips).pool_bytes for cell in cells},
    }
    records = options.records("pipelines-simulated", settings)
    known = {(line["cell"], line["side"]) for line in records.lines}
    for cell in tqdm(cells, desc="simulated pipelines", leave=False):
        for name in (SHARED, ALONE):
            if (cell.name, name) not in known:
                records.add(cell.name, name, 0, {**asdict(cell), **side(cell, activated=name == SHARED)})


def side(cell: Cell, activated: bool) -> dict[str, float]:
    """One side of a cell: means over pipelines, and over all requests of adapters and of the base."""
    replica = make_replica(cell)
    shape = Shape(cell.context, base_and_checks(cell.adapters), activated)
    played = Pipelines(replica, shape, cell.starts())
    played.play()
    inspect.check_integrity(replica.manager)
    counters = replica.manager.counters
    checks, base = (
        means([_step(found) for found in played.answers if (found.adapter is None) == of_base])
        for of_base in (False, True)
    )
    return {
        "pipeline_s": statistics.fmean(played.seconds),
        "kv_bytes": played.peak * hardware(cell.model, cell.chips).layout.block_bytes,
        "prompt_tokens": replica.device.counts.prompt_tokens,  # computed
        "host_hit_tokens": counters.kv_host_hit_tokens,
        "preemptions": replica.scheduler.preemptions,
        **{f"check_{key}": value for key, value in checks.items()},
        **{f"base_{key}": value for key, value in base.items()},
    }


def make_replica(cell: Cell) -> Replica:
    """The cell's replica, its adapters loaded."""
    machine = hardware(cell.model, cell.chips)
    layout = machine.layout
    block_s = layout.block_bytes / machine.link_bps
    sizes = Sizes(machine.pool_bytes // layout.block_bytes, int(HOST_BYTES) // layout.block_bytes, layout.block_tokens)
    adapters = (machine.adapter_blocks(RANK),) * cell.adapters
    link = LinkSpec(block_s, groups=GROUPS)
    spec = ReplicaSpec(machine.step_model(), link, sizes, adapters, CacheConfig(), ENGINE)
    return Replica(spec, make_policy(spec.cache, Meter(block_s, block_tokens=layout.block_tokens)))


@cache
def hardware(model: str, chips: int) -> Hardware:
    """A model on so many of the benchmark's chips."""
    return Hardware(CHIPS[CHIP], chips, MODELS[model])


def _step(found: Answered) -> Step:
    """The record that the real engine's part makes its means of."""
    usage, timing = found.usage, found.timing
    return Step(
        model=None if found.adapter is None else str(found.adapter),
        tokens=[],
        prompt=usage.prompt_tokens,
        cached=usage.cached_tokens,
        queue=timing.queue,
        prefill=timing.prefill,
        ttft=timing.ttft,
        end_to_end=found.end_to_end,
    )
