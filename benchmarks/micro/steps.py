"""R7: Python's time for the scheduler's part of a step, with tokens drawn from nowhere.

The scheduler, its cache and its monitor are the real ones; a step is planned before the one
before it is committed, as the engine does it. All slots are taken by sequences that decode, and the queue
waits behind them. `host` measures the same with the engine and the device around it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.micro.grove import ADAPTER_BLOCKS, LINK_S, add_adapter
from jlora.cache.catalog import make_policy
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.transfer import Meter
from jlora.config import CacheConfig, EngineConfig
from jlora.engine.plan import Drawn, StepPlan
from jlora.engine.scheduler import Scheduler
from jlora.types import Request, SamplingParams

PROMPT, OUTPUT = 256, 2048
BLOCK_TOKENS = 32
STEP_S = 0.01  # of the scheduler's clock: the monitor has its round every tenth step


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Sequences that decode, requests behind them, adapters in service."""

    running: int
    queued: int
    registered: int


class Decoding:
    """A scheduler whose slots are all taken, and a queue."""

    def __init__(self, load: StepLoad):
        self.now = 0.0
        blocks = load.running * (-(-(PROMPT + OUTPUT) // BLOCK_TOKENS) + ADAPTER_BLOCKS)
        sizes = Sizes(blocks, blocks + load.registered * ADAPTER_BLOCKS, BLOCK_TOKENS)
        policy = make_policy(CacheConfig(), Meter(LINK_S))
        self.manager = CacheManager(sizes, policy, lambda: self.now)
        config = EngineConfig(max_seqs=load.running, max_step_tokens=4096, max_queue=load.running + load.queued)
        self.scheduler = Scheduler(self.manager, config, eos_ids=())
        self._adapters = [add_adapter(self.manager, uid) for uid in range(1, load.registered + 1)]
        self._last = StepPlan((), (), ())
        self._submit(0, load.running)
        while not self._steady:
            self.step()
        self._submit(load.running, load.queued)  # behind them: no slot is free

    def _submit(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            prompt = range(i * PROMPT, (i + 1) * PROMPT - i % BLOCK_TOKENS)  # not all fill a block in one step
            request = Request(f"{i}", tuple(prompt), SamplingParams(max_tokens=OUTPUT))
            self.scheduler.submit(request, self._adapters[i % len(self._adapters)], self.now)

    def step(self) -> int:
        """Plans a step and commits the one before it; nanoseconds."""
        self.now += STEP_S
        start = time.thread_time_ns()
        plan = self.scheduler.plan(self.now)
        spent = time.thread_time_ns() - start
        for copy in plan.copies:
            copy.seconds = LINK_S
        self.manager.landed(plan.copies)
        drawn = [Drawn(token=7 if work.samples else None) for work in self._last.work]
        start = time.thread_time_ns()
        self.scheduler.commit(self._last, drawn, self.now)
        self._last = plan
        return spent + time.thread_time_ns() - start

    def steps(self) -> Iterator[int]:
        """Nanoseconds of step after step."""
        while True:
            yield self.step()

    @property
    def _steady(self) -> bool:
        """All slots are taken, and all prompts are computed."""
        running = self.scheduler.running
        outputs = [len(s.tokens) + s.in_flight - s.prompt_len for s in running]
        return len(running) == self.scheduler.config.max_seqs and all(count > 1 for count in outputs)


def measure(load: StepLoad, count: int) -> list[int]:
    """Nanoseconds of `count` steps of decode."""
    decoding = Decoding(load)
    gc.collect()
    taken = [ns for ns, _ in zip(decoding.steps(), range(count), strict=False)]
    assert decoding.scheduler.waiting == load.queued and not decoding.scheduler.preemptions
    return taken
