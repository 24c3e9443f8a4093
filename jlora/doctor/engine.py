"""The whole engine on random weights: single steps by its runner, and full decode steps through all of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlora import config as configuration
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.catalog import make_policy
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.pool import HostPool
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Meter
from jlora.config import Config
from jlora.doctor.model import TARGETS, StepCase, plan_of, projections, weights
from jlora.engine import device
from jlora.engine.batch import Buckets, Form, Launch
from jlora.engine.engine import Engine, Shape
from jlora.engine.plan import ROW, StepPlan
from jlora.engine.ports import Parts
from jlora.engine.records import NewAdapter
from jlora.engine.scheduler import Scheduler
from jlora.layout import PoolLayout
from jlora.model.spec import ModelSpec
from jlora.types import Request, SamplingParams

Compile = Callable[[], None]

ASSUMED_BYTES_PER_S = 10e9  # of the link, until copies have been measured
COMPILERS = 4  # programs that are compiled at a time
PROGRAM_S = 240.0  # without a program that ends for so long, those under way are waited for no more


class World:
    """The device side of an engine on random weights; every engine on it has a new cache and scheduler."""

    def __init__(self, spec: ModelSpec, config: Config, layout: PoolLayout):
        self.spec, self.config, self.layout = spec, config, layout
        self._registry = AdapterRegistry()
        self._planned: dict[int, tuple[str, ...]] = {}  # adapters of `plan`: uid -> projection of each block
        self._stacked = device.uses_scan(config.engine.layers, jax.devices()[0].platform)
        self._params = weights(spec, self._stacked)
        self.chosen = device.choose_ops(config, spec, layout, tuple(Buckets.of(config.engine).shapes))
        self._prepared = device.prepare(config, spec, layout, self._projections)
        self.runner, self._pool = self._prepared.complete(self._params)
        self._swapper = Swapper(self._pool, HostPool(layout, 1))

    def plan(self, case: StepCase) -> StepPlan:
        """The case as a plan for `repeated`."""
        uids = [-1 - len(self._planned) - i for i in range(len(case.ranks))]  # an engine's are positive
        self._planned |= {uid: projections(self.layout, rank) for uid, rank in zip(uids, case.ranks, strict=True)}
        return plan_of(self.layout, case, iter(uids))

    def repeated(self, plan: StepPlan) -> Callable[[int], Any]:
        """A function that dispatches so many steps of the plan, one after the other, and gives what to wait for."""

        def run(count: int) -> Any:
            return [self.runner.run(plan, self._swapper).sampled for _ in range(count)][-1]

        return run

    def forms(self, plans: Sequence[StepPlan]) -> dict[Form, Launch]:
        """The forms that some plans run, each with a launch."""
        return {one.form: one for plan in plans for one in self._prepared.builder.launches(plan)}

    def compile(self, launches: Mapping[Form, Launch], most_s: float, run: Callable[[Form, Compile], None]) -> None:
        """Compiles programs side by side, and waits so long at most: what takes longer goes on in its thread.

        `run` is called in a thread for each form, with what compiles it.
        """
        threads, until = ThreadPoolExecutor(COMPILERS), time.monotonic() + most_s
        compile_it = self._prepared.ahead.compile
        left = {threads.submit(run, form, partial(compile_it, launch)) for form, launch in launches.items()}
        while left and (rest := until - time.monotonic()) > 0:
            done, left = wait(left, min(PROGRAM_S, rest), FIRST_COMPLETED)
            for each in done:
                each.result()
            if not done:
                break
        threads.shutdown(wait=False, cancel_futures=True)

    def keep_to(self, forms: Collection[Form]) -> None:
        """From now on launches take these forms alone, as an engine's do while others are left to compile."""
        kinds = ((1, False), (ROW, False), (1, True))
        self._prepared.builder.compiled = Buckets(
            *(tuple(sorted(form.rows for form in forms if form[1:] == kind)) for kind in kinds)
        )

    def serves(self, case: StepCase) -> bool:
        """Whether the forms that it keeps to hold every launch of an engine that decodes this case."""
        builder = self._prepared.builder
        decode = (*builder.compiled.decode, *(() if case.ranks else builder.compiled.bare))
        largest = max(builder.compiled.prefill, default=0)
        return max(decode, default=0) >= case.shape[0] and largest >= builder.buckets.prefill[-1]

    @contextmanager
    def engine(self, host_blocks: int) -> Iterator[Engine]:
        """An engine whose cache has all blocks of the pool but one.

        No copy comes in groups of layers: a launch behind such a copy would run programs of its own.
        """
        meter = Meter(self.layout.block_bytes / ASSUMED_BYTES_PER_S)
        sizes = Sizes(self.layout.blocks - 1, host_blocks, self.layout.block_tokens)
        manager = CacheManager(sizes, make_policy(self.config.cache, meter), time.monotonic)
        scheduler = Scheduler(manager, self.config.engine, self.spec.eos_ids)
        swapper = Swapper(self._pool, HostPool(self.layout, host_blocks))
        self._registry = AdapterRegistry()
        try:
            yield Engine(
                Parts(scheduler, self._registry, self.runner, swapper, time.monotonic),
                Shape(self.spec.max_len, self.layout.block_bytes, self.config.engine.overlap),
            )
        finally:
            swapper.close()

    def close(self) -> None:
        """Frees the device."""
        self._swapper.close()
        self.runner.close()

    def _projections(self, uid: int) -> tuple[str, ...]:
        return self._planned[uid] if uid < 0 else self._registry.by_uid(uid).projections


def random_adapter(spec: ModelSpec, layout: PoolLayout, name: str, rank: int) -> NewAdapter:
    """An adapter of q, k, v, o: one block of small random numbers, repeated; nothing is packed."""
    units = projections(layout, rank)
    rng = np.random.default_rng(rank)
    row = (0.01 * rng.standard_normal((1, *layout.block_shape[1:]))).astype(jnp.dtype(spec.dtype))
    data = np.broadcast_to(row, (len(units), *layout.block_shape))
    return NewAdapter(name, name, {"all": rank}, TARGETS, (), units, data, data.nbytes, 0.0)


def settings(sequences: int, step_tokens: int, kernels: str) -> Config:
    """A configuration with few compiled shapes."""
    engine = {"engine.max_seqs": sequences, "engine.max_step_tokens": step_tokens, "engine.kernels": kernels}
    return configuration.load(None, {**engine, "adapters.max_rank": 64})


def full_steps(world: World, case: StepCase, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Decode steps of full batches through scheduler, cache and runner.

    The prompts are computed into the cache first. Then they are asked twice and found there, so that
    all sequences decode from the same step on: the first time warms up, the second is timed.

    Args:
        case: decode steps; their context is the mean of the steps that are timed.
        tokens: that each sequence generates.
        say: is told what is under way.
    Returns:
        Medians over the steps in the middle of the answers; `host_s` is Python's part of `step_s`.
    """
    rng, count = np.random.default_rng(0), len(case.parts)
    length = case.parts[0].context + 1 - tokens // 2
    prompts = [tuple(row) for row in rng.integers(3, world.spec.vocab, (count, length)).tolist()]
    adapters = [random_adapter(world.spec, world.layout, f"a{i}", rank) for i, rank in enumerate(case.ranks)]
    # The host tier holds the adapters and no KV: no copy runs beside the steps.
    with world.engine(1 + sum(len(new.projections) for new in adapters)) as engine:
        for new in adapters:
            engine.adapters.add(new)
        while engine.copying:
            engine.tend()
            engine.rest()

        def ask(turn: str, most: int) -> list[tuple[float, float]]:
            say(f"{turn}: {case.name}")
            sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
            for i, (prompt, part) in enumerate(zip(prompts, case.parts, strict=True)):
                name = adapters[part.adapter].name if adapters else None
                engine.submit(Request(f"{turn}.{i}", prompt, sampling, name))
            return _full(engine, count)

        began = time.perf_counter()
        ask("prompts", 1)
        ask("warm-up", tokens)
        warmed, warm_up_s = engine.stats().compiles_after_warmup, time.perf_counter() - began
        taken = ask("decode", tokens)
        compiles = engine.stats().compiles_after_warmup - warmed
    step_s, host_s = (statistics.median(side) for side in zip(*taken, strict=True))
    return {
        "step_s": step_s,
        "host_s": host_s,
        "steps": len(taken),
        "compiles_after_warmup": compiles,
        "warm_up_s": warm_up_s,
    }


def _full(engine: Engine, sequences: int) -> list[tuple[float, float]]:
    """Runs to the end; seconds and Python's seconds of the middle half of the steps in which all sequences run."""
    taken = []
    while engine.busy:
        before, began = engine.stats(), time.perf_counter()
        engine.step()
        seconds, after = time.perf_counter() - began, engine.stats()
        if before.running == after.running == sequences:
            taken.append((seconds, after.host_step_s * after.steps - before.host_step_s * before.steps))
    return taken[len(taken) // 4 : -(len(taken) // 4) or None]
