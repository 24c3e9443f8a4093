"""A replica whose steps take a model's seconds of the wall clock, and draw tokens that a client can check.

Process, sockets, link, engine's thread, scheduler, cache and adapters are the product's own. Only the device is
modelled, so that several replicas share two cores without sharing their speed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jlora import config as configuration
from jlora.cluster import worker
from jlora.config import Config
from jlora.engine.build import build
from jlora.engine.engine import Engine, Shape
from jlora.engine.local import LocalReplica
from jlora.engine.plan import Drawn, StepPlan
from jlora.engine.ports import Swapper
from jlora.ports import DiskFiles, System
from jlora.replica import Replica
from jlora.serve import flags, launcher
from jlora.serve.tokenizer import Tokenizer
from jlora.sim.device import seconds_of, token
from jlora.step_model import FittedSteps, StepModel

# A step of 20 ms, about a 7B model on an accelerator, with adapters that cost what they read.
MODEL = StepModel(
    fixed_s=0.002,
    weights_s=0.018,
    prompt_token_s=50e-6,
    decode_token_s=20e-6,
    context_token_s=20e-9,
    pair_s=1e-10,
    adapter_block_s=2e-6,
    adapter_token_s=1e-7,
)


def token_at(seed: int, position: int, vocab: int) -> int:
    """The token at this position of a request's context."""
    return token(seed, position) % vocab


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A dispatched step, see `jlora.engine.ports.Pending`; it ends at `end` of the monotonic clock."""

    plan: StepPlan
    dispatched: float
    end: float
    vocab: int
    stalled_s: float = 0.0

    def read(self) -> list[Drawn]:
        time.sleep(max(0.0, self.end - time.monotonic()))
        return [
            Drawn(token_at(work.sequence.seed, work.start + work.count, self.vocab)) if work.samples else Drawn()
            for work in self.plan.work
        ]


class PacedDevice:
    """Runs plans in the time of a step model, see `jlora.engine.ports.Runner`."""

    compiling = False
    compiled_at = 0.0
    compiles_after_warmup = 0
    programs_left = 0

    def __init__(self, vocab: int, model: StepModel | FittedSteps = MODEL):
        self._vocab = vocab
        self._model = model
        self._free_at = 0.0

    def run(self, plan: StepPlan, swapper: Swapper) -> PacedStep:
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + seconds_of(self._model, plan)
        return PacedStep(plan, now, self._free_at, self._vocab)

    def close(self) -> None:
        """Holds no resources."""


async def load(config: Config) -> tuple[Replica, Tokenizer | None]:
    """See `jlora.serve.launcher.Program`: `replica`, made beside the event loop."""
    return await asyncio.to_thread(replica, config), None


def replica(config: Config) -> Replica:
    """The product's replica with a paced device in place of its own, which takes the seconds of `engine.step_model`."""
    model = FittedSteps.read(Path(config.engine.step_model)) if config.engine.step_model else MODEL
    config = configuration.replace(
        config, {"engine.warmup": False, "engine.cold_start": "wait", "engine.step_model": ""}
    )
    system = System(files=DiskFiles(config.adapters.roots))
    built = build(config, progress=False, system=system)
    limits, info = built.info.limits, built.info
    parts = dataclasses.replace(built.parts, runner=PacedDevice(limits.vocab, model))
    engine = Engine(parts, Shape(limits.max_len, info.block_bytes, config.engine.overlap))
    return LocalReplica(dataclasses.replace(built, engine=engine, parts=parts), system)


def main(argv: Sequence[str]) -> int:
    """Runs the replica, see `jlora.cluster.child`."""
    config = flags.parse(argv)
    program = dataclasses.replace(worker.program(config), load=load)
    return launcher.run(config, program)
