"""The whole engine on random weights: full decode steps through it, and cache policies under pressure.

`full_steps` runs the scheduler, the cache and the runner over decode steps of full batches; beside
the same step called alone (`steps`) it says what the engine adds. `Contest` plays a short W1
(chat) to several policies with a pool that holds a fraction of the working set; the model is
shallow, because what is compared is the cache.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jlora import config as configuration
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.catalog import make_policy
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.pool import HostPool
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Meter
from jlora.config import Config
from jlora.doctor.model import TARGETS, adapter_blocks, weights
from jlora.engine import device
from jlora.engine.engine import Engine, Shape
from jlora.engine.loading import NewAdapter
from jlora.engine.ports import Parts
from jlora.engine.scheduler import Scheduler
from jlora.layout import PoolLayout, smallest_block_tokens
from jlora.loadgen.local import EngineTarget
from jlora.loadgen.player import Call, Pace, Player
from jlora.model.llama import Params
from jlora.model.spec import ModelSpec
from jlora.sim import outcome
from jlora.sim.trace import facts
from jlora.sim.workloads import SOURCES, Load, play, ranks
from jlora.types import Request, SamplingParams

POLICIES = ("jlora", "fastlibra", "lru", "vllm")
ASSUMED_BYTES_PER_S = 10e9  # of the link, until copies have been measured


class World:
    """The device side of an engine on random weights; a new cache and scheduler for every run.

    Args:
        params: stacked or listed as `device.uses_scan` says; the world owns them from here on.
    """

    def __init__(self, spec: ModelSpec, config: Config, layout: PoolLayout, params: Params):
        self.spec, self.config, self.layout = spec, config, layout
        self._registry = AdapterRegistry()
        self.runner, self.pool = device.device_side(
            config, spec, layout, lambda uid: self._registry.by_uid(uid).projections, params
        )

    @classmethod
    def of(cls, spec: ModelSpec, config: Config, blocks: int) -> World:
        """With weights of its own and a pool of `blocks`."""
        block = smallest_block_tokens(spec, 32 if jax.default_backend() != "cpu" else 16)
        layout = replace(device.fitted(PoolLayout.of(spec, 1, block), config.engine.kernels), blocks=blocks)
        stacked = device.uses_scan(config.engine.layers, jax.devices()[0].platform)
        return cls(spec, config, layout, weights(spec, stacked))

    @contextmanager
    def engine(self, policy: str, blocks: int, host_blocks: int) -> Iterator[tuple[Engine, CacheManager]]:
        """An engine whose cache has `blocks` device blocks."""
        config = configuration.replace(self.config, {"cache.policy": policy})
        meter = Meter(self.layout.block_bytes / ASSUMED_BYTES_PER_S)
        sizes = Sizes(blocks, host_blocks, self.layout.block_tokens)
        streams = self.pool.groups > 1
        manager = CacheManager(sizes, make_policy(config.cache, meter), time.monotonic, streams=streams)
        scheduler = Scheduler(manager, config.engine, self.spec.eos_ids)
        swapper = Swapper(self.pool, HostPool(self.layout, host_blocks))
        self._registry = AdapterRegistry()
        try:
            yield (
                Engine(
                    Parts(scheduler, self._registry, self.runner, swapper, time.monotonic),
                    Shape(self.spec.max_len, self.layout.block_bytes, config.engine.overlap),
                ),
                manager,
            )
        finally:
            swapper.close()

    def adapter(self, name: str, rank: int) -> NewAdapter:
        """An adapter of q, k, v, o: one block of small random numbers, repeated; nothing is packed."""
        count = adapter_blocks(self.layout, rank)
        projections = tuple(n for n in TARGETS for _ in range(-(-rank // self.layout.units[n].per_block)))
        rng = np.random.default_rng(rank)
        row = (0.01 * rng.standard_normal((1, *self.layout.block_shape[1:]))).astype(jax.numpy.dtype(self.spec.dtype))
        data = np.broadcast_to(row, (count, *self.layout.block_shape))
        return NewAdapter(name, name, {"all": rank}, TARGETS, (), projections, data, data.nbytes, 0.0)

    def close(self) -> None:
        """Frees the device."""
        self.runner.close()


@dataclass(frozen=True, slots=True)
class Busy:
    """Full decode steps.

    Attributes:
        sequences: that decode together, each with a prompt of its own.
        context: mean tokens of context in the steps that are timed.
        tokens: that each sequence generates.
        ranks: of adapters, dealt out to the sequences in turn; none: the base model alone.
    """

    sequences: int
    context: int
    tokens: int
    ranks: tuple[int, ...] = ()

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.context - self.tokens // 2


def settings(sequences: int, step_tokens: int, kernels: str) -> Config:
    """A configuration with few compiled shapes."""
    values = {
        "engine.max_seqs": sequences,
        "engine.max_step_tokens": step_tokens,
        "engine.kernels": kernels,
        "adapters.max_rank": 64,
    }
    return configuration.load(None, values)


def full_steps(world: World, busy: Busy, say: Callable[[str], None]) -> dict[str, Any]:
    """Decode steps of full batches through scheduler, cache and runner.

    The prompts are computed into the cache first. Then they are asked twice, and found there, so that
    all sequences decode from the same step on: the first time warms up, the second is timed.

    Args:
        say: is told what is under way.
    Returns:
        Medians over the steps in the middle of the answers: `step_s`, and `host_s`, Python's part of
        it; `steps`, how many these are; `compiles_after_warmup`; `warm_up_s`, with what had to be compiled.
    """
    rng = np.random.default_rng(0)
    prompts = [tuple(row) for row in rng.integers(3, world.spec.vocab, (busy.sequences, busy.prompt)).tolist()]
    names = [f"a{i}" for i in range(len(busy.ranks))] or [None]
    blocks = world.layout.blocks - 1
    adapters = [world.adapter(str(name), rank) for name, rank in zip(names, busy.ranks, strict=False)]
    # The host tier holds the adapters and no KV: what copies cost is the policies' affair.
    with world.engine("jlora", blocks, 1 + sum(len(new.projections) for new in adapters)) as (engine, _):
        for new in adapters:
            engine.adapters.add(new)
        while engine.copying:
            engine.tend()
            engine.rest()

        def ask(turn: str, tokens: int) -> _Taken:
            say(f"{turn}: {busy.sequences} sequences, {len(adapters)} adapters")
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            for i, prompt in enumerate(prompts):
                engine.submit(Request(f"{turn}.{i}", prompt, sampling, names[i % len(names)]))
            return _full(engine, busy.sequences)

        began = time.perf_counter()
        ask("prompts", 1)
        ask("warm-up", busy.tokens)
        warmed, warm_up_s = engine.stats().compiles_after_warmup, time.perf_counter() - began
        taken = ask("decode", busy.tokens)
        compiles = engine.stats().compiles_after_warmup - warmed
    medians = {"step_s": statistics.median(taken.steps), "host_s": statistics.median(taken.host)}
    return {**medians, "steps": len(taken.steps), "compiles_after_warmup": compiles, "warm_up_s": warm_up_s}


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds of steps, and of Python in each."""

    steps: list[float]
    host: list[float]


def _full(engine: Engine, sequences: int) -> _Taken:
    """Runs to the end; the steps in the middle of those in which all sequences run."""
    steps, host = [], []
    while engine.busy:
        before, began = engine.stats(), time.perf_counter()
        engine.step()
        seconds, after = time.perf_counter() - began, engine.stats()
        if before.running == after.running == sequences:
            steps.append(seconds)
            host.append(after.host_step_s * after.steps - before.host_step_s * before.steps)
    middle = slice(len(steps) // 4, -(len(steps) // 4) or None)
    return _Taken(steps[middle], host[middle])


class Contest:
    """A short W1, played to one policy after the other; the pool holds `share` of the working set.

    Args:
        speed: seconds of the trace per second.
    """

    def __init__(self, world: World, load: Load, share: float, speed: float):
        self.seconds = 1.5 * load.seconds / speed  # a run's, with its history
        self._world, self._speed = world, speed
        self._trace = play(SOURCES["W1"](None), load)
        self._adapters = [world.adapter(f"a{i}", rank) for i, rank in enumerate(ranks(load))]
        sizes = [len(new.projections) for new in self._adapters]
        self._working = facts(self._trace, world.layout.block_tokens, sizes).working_set
        largest = world.layout.blocks_for(world.spec.max_len) + max(sizes)
        self._blocks = min(max(int(share * self._working), 2 * largest), world.layout.blocks - 1)
        self._host_blocks = 2 * self._working + sum(sizes)

    def warm_up(self) -> Iterator[str]:
        """Compiles every program; its name after each."""
        return self._world.runner.warm_up()

    def play(self, policy: str) -> dict[str, Any]:
        """One run: what requests waited, what the cache found, and all compilations since `warm_up` (R10)."""
        with self._world.engine(policy, self._blocks, self._host_blocks) as (engine, _):
            for new in self._adapters:
                engine.adapters.add(new)
            calls, cache, seconds = asyncio.run(self._played(engine))
        ttft = [call.ttft for call in calls if call.ok]
        return {
            "policy": policy,
            "device_blocks": self._blocks,
            "working_set": self._working,
            "ttft_s": statistics.fmean(ttft),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "tpot_s": statistics.fmean(call.tpot for call in calls if call.ok and len(call.tokens) > 1),
            "tokens_per_s": sum(len(call.tokens) for call in calls) / seconds,
            "unfinished": sum(not call.ok for call in calls),
            **{key: cache[key] for key in ("kv_device_hits", "adapter_hits")},
            "compiles_after_warmup": self._world.runner.compiles_after_warmup,
        }

    async def _played(self, engine: Engine) -> tuple[list[Call], dict[str, float], float]:
        """The calls, what the cache did meanwhile, and how many seconds it took."""
        async with EngineTarget(engine) as target:
            player = Player(target, self._trace, self._trace.adapters, Pace(self._speed))
            await player.history()
            await target.settled()
            before, began = engine.cache_state(), time.perf_counter()
            calls = await player.play()
            seconds = time.perf_counter() - began
            await target.settled()
        engine.check_integrity()
        return calls, outcome.hits_and_bytes(before, engine.cache_state()), seconds
