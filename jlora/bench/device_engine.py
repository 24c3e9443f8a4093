"""The whole engine on random weights: what it adds to a bare step, and cache policies under pressure.

`overhead` runs the scheduler, the cache and the runner over full decode steps and compares with
the same step called alone. `policies` plays a short W1 (chat) to several policies with a pool that
holds a fraction of the working set; the model is shallow, because what is compared is the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jlora import config as configuration
from jlora.adapters.adapter import Adapter
from jlora.adapters.packing import Packed
from jlora.adapters.registry import AdapterRegistry
from jlora.bench.device_model import TARGETS, adapter_blocks, weights
from jlora.bench.replay import Replay
from jlora.cache.catalog import make_policy
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.pool import HostPool
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Meter
from jlora.config import Config
from jlora.engine import device
from jlora.engine.engine import Engine, NewAdapter
from jlora.engine.scheduler import Scheduler
from jlora.layout import PoolLayout, smallest_block_tokens
from jlora.model.spec import ModelSpec
from jlora.sim.trace import facts
from jlora.sim.workloads import SOURCES, Load, play, ranks
from jlora.types import Request, SamplingParams

POLICIES = ("jlora", "fastlibra", "lru", "vllm")
ASSUMED_BYTES_PER_S = 10e9  # of the link, until copies have been measured


class World:
    """The device side of an engine on random weights; a new cache and scheduler for every run."""

    def __init__(self, spec: ModelSpec, config: Config, blocks: int):
        self.spec, self.config = spec, config
        block = smallest_block_tokens(spec, 32 if jax.default_backend() != "cpu" else 16)
        self.layout = replace(device.fitted(PoolLayout.of(spec, 1, block), config.engine.kernels), blocks=blocks)
        stacked = device.uses_scan(config.engine.layers, jax.devices()[0].platform)
        self._registry = AdapterRegistry()
        params = weights(spec, stacked)
        self.runner, self.pool = device.device_side(
            config, spec, self.layout, lambda uid: self._registry.by_uid(uid).projections, params
        )

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
                Engine(scheduler, self._registry, self.runner, swapper, self.layout, config.engine.overlap),
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
        adapter = Adapter(digest=name, rank=rank, ranks={}, target_modules=TARGETS, weights={})
        return NewAdapter(name, adapter, Packed(data, projections), 0.0)

    def close(self) -> None:
        """Frees the device."""
        self.runner.close()


@dataclass(frozen=True, slots=True)
class Busy:
    """Full decode steps: so many sequences, a prompt of one row each, so many tokens."""

    sequences: int
    prompt: int
    tokens: int


def settings(sequences: int, step_tokens: int, kernels: str) -> Config:
    """A configuration with few compiled shapes."""
    values = {
        "engine.max_seqs": sequences,
        "engine.max_step_tokens": step_tokens,
        "engine.kernels": kernels,
        "adapters.max_rank": 64,
    }
    return configuration.load(None, values)


def overhead(world: World, busy: Busy) -> dict[str, Any]:
    """Seconds of a decode step through the engine: median over full steps."""
    vocab = world.spec.vocab
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=busy.tokens, ignore_eos=True)
    blocks = world.layout.blocks - 1
    with world.engine("jlora", blocks, 2 * blocks) as (engine, _):
        engine.add_adapter(world.adapter("a0", 16))
        taken = []
        for turn in range(2):  # the first compiles
            for i in range(busy.sequences):
                prompt = tuple(rng.integers(3, vocab, busy.prompt).tolist())
                engine.submit(Request(f"{turn}.{i}", prompt, sampling, "a0" if i % 2 else None))
            taken = _full_steps(engine)
    return {"sequences": busy.sequences, "step_s": statistics.median(taken), "steps": len(taken)}


def _full_steps(engine: Engine) -> list[float]:
    """Runs to the end; seconds of the steps in the middle, when all sequences decode."""
    taken = []
    while engine.busy:
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    return taken[len(taken) // 4 : -(len(taken) // 4) or None]


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
        sizes = [len(new.packed.projections) for new in self._adapters]
        self._working = facts(self._trace, world.layout.block_tokens, sizes).working_set
        largest = world.layout.blocks_for(world.spec.max_len) + max(sizes)
        self._blocks = min(max(int(share * self._working), 2 * largest), world.layout.blocks - 1)
        self._host_blocks = 2 * self._working + sum(sizes)

    def warm_up(self) -> Iterator[str]:
        """Compiles every program; its name after each."""
        return self._world.runner.warm_up()

    def play(self, policy: str) -> dict[str, Any]:
        """One run: what requests waited, and what the cache found."""
        with self._world.engine(policy, self._blocks, self._host_blocks) as (engine, manager):
            for new in self._adapters:
                engine.add_adapter(new)
            sample = Replay(engine, manager, self._trace, self._speed).run()
        keys = ("ttft_s", "ttft_p99_s", "tpot_s", "kv_device_hits", "adapter_hits", "tokens_per_s", "unfinished")
        sizes = {"device_blocks": self._blocks, "working_set": self._working}
        return {"policy": policy, **sizes, **{k: sample[k] for k in keys}}
