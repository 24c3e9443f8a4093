"""Runs one simulation of hardware, workload and policy. No jax.

    work = Work.of(trace, ranks, hardware)
    result = simulate(Scenario(hardware, link_gbps=2, hbm_share=0.25), work, "jlora")

A policy's name is one of `POLICIES`. `vllm-fair:0.3` sets the adapters' share of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jlora.cache import inspect
from jlora.cache.catalog import make_policy
from jlora.cache.manager import Sizes
from jlora.cache.policies import Policy
from jlora.cache.transfer import Meter
from jlora.config import POLICIES as CACHE_POLICIES
from jlora.config import CacheConfig, EngineConfig, one_of
from jlora.engine.cold_start import Costs
from jlora.engine.merging import Merging
from jlora.errors import ConfigError
from jlora.sim import outcome
from jlora.sim.clairvoyant import Clairvoyant, Oracle
from jlora.sim.device import answer
from jlora.sim.hardware import GROUPS, HOST, Hardware, Host
from jlora.sim.link import LATENCY_S, Blocking, Link, LinkSpec
from jlora.sim.observe import Observer, Series
from jlora.sim.replay import Hinted, Replay, seed_of, start_of
from jlora.sim.replica import Replica, ReplicaSpec
from jlora.sim.script import Script
from jlora.sim.trace import Facts, Trace, facts
from jlora.step_model import FittedSteps, StepModel

POLICIES = (*CACHE_POLICIES, Clairvoyant.name)
SHARED = "vllm-fair"  # the policy whose name may have a share
SETTLE = 1.25  # time of a history over the seconds of its tokens, for steps' fixed parts and attention
SAMPLES = 200  # samples of the device over the length of a trace
OFTEN_S = 0.05  # seconds between samples at the start of a closed loop, whose length is unknown


@dataclass(frozen=True, slots=True)
class Scenario:
    """One replica's hardware and settings. A size or speed of 0 is the hardware's.

    Attributes:
        hbm_gb: size of the pool; hbm_share: the same as a share of the working set; not both.
        host_gb: size of the host tier (the paper's host has 256 GB of memory).
        link_gbps: each way; adapter_load_s: additional seconds per adapter load.
        hint_s: seconds before a turn at which clients send a hint (`Prefetch`); 0: never.
        step: measured coefficients instead of the chip's.
        blocking: copies to the device stop the engine.
        host: computes adapters that are on their way, with `engine.cold_start` cpu or auto.
    """

    hardware: Hardware
    hbm_gb: float = 0.0
    hbm_share: float = 0.0
    host_gb: float = 240.0
    link_gbps: float = 0.0
    adapter_load_s: float = 0.0
    latency_s: float = LATENCY_S
    hint_s: float = 0.0
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig(max_seqs=128, max_step_tokens=1024, max_queue=1 << 20)
    step: StepModel | FittedSteps | None = None
    blocking: bool = False
    host: Host = HOST

    @property
    def step_model(self) -> StepModel | FittedSteps:
        return self.step or self.hardware.step_model()


@dataclass(frozen=True, slots=True)
class Work:
    """A trace, the blocks of its adapters by index, and its facts."""

    trace: Trace
    sizes: tuple[int, ...]
    facts: Facts

    @classmethod
    def of(cls, trace: Trace, ranks: Sequence[int], hardware: Hardware) -> Work:
        sizes = tuple(hardware.adapter_blocks(rank) for rank in ranks)
        return cls(trace, sizes, facts(trace, hardware.layout.block_tokens, sizes))


def settled(trace: Trace, step: StepModel | FittedSteps) -> Trace:
    """Moves the history so far back that it is computed by time 0.

    A session's history is one prompt, and in fast traffic all histories come shortly before time 0.
    The first requests would wait for them, unlike in a replica that has been serving for long.
    """
    past = sum(len(turn.adds) for turn in trace.turns if turn.at < 0)
    pause = SETTLE * past * step.prompt_token_s
    return replace(trace, turns=tuple(replace(t, at=t.at - pause) if t.at < 0 else t for t in trace.turns))


def simulate(
    scenario: Scenario,
    work: Work,
    policy: str,
    observers: Sequence[Observer] = (),
    merging: Merging | None = None,
) -> dict[str, Any]:
    """Plays the work once under one policy.

    Returns:
        "setting", "summary" (means and quantiles of requests), "cache" (its activity), "device" (its
        load), "series" (the device over time) and "requests" (a row each). The same scenario, work and
        policy give the same result, bit for bit. Raises ConfigError.
    """
    spec = replica_spec(scenario, work, policy)
    block_bytes = scenario.hardware.layout.block_bytes
    replica = Replica(spec, cache_policy(policy, spec, work), merging)
    series = _series(work.trace)
    observers = (series, *observers)
    if scenario.hint_s:
        replay = Hinted(replica, work.trace, observers, scenario.hint_s)
    else:
        replay = Replay(replica, work.trace, observers)
    replay.history()
    before, counts = inspect.state(replica.manager, block_bytes), replace(replica.device.counts)
    generated = replica.engine.stats().generated_tokens
    carried = {lane: replica.link.busy_s(lane) for lane in ("in", "out")}
    preempted = replica.scheduler.preemptions
    replay.run()
    inspect.check_integrity(replica.manager)
    after, told, end = inspect.state(replica.manager, block_bytes), replica.device.counts, replay.now
    asks = replay.counted
    steps = told.steps - counts.steps
    result = {
        "policy": policy,
        "setting": describe(scenario, spec),
        "summary": outcome.summary(asks, end)
        | {"unsent": replay.unsent, "preemptions": replica.scheduler.preemptions - preempted},
        "cache": outcome.cache((before, after)) | {"invalid_kv": series.mean("invalid_kv")},
        "device": {
            "seconds": end,
            "steps": steps,
            "tokens": replica.engine.stats().generated_tokens - generated,
            "prompt_tokens": told.prompt_tokens - counts.prompt_tokens,
            "batch": (told.batch - counts.batch) / max(steps, 1),
            "busy": (told.busy_s - counts.busy_s) / end,
            "link_in": (replica.link.busy_s("in") - carried["in"]) / end,
            "link_out": (replica.link.busy_s("out") - carried["out"]) / end,
        },
        "series": series.describe(),
        "requests": {"columns": list(outcome.COLUMNS), "rows": outcome.rows(asks)},
    }
    return outcome.rounded(result)


def replica_spec(scenario: Scenario, work: Work, policy: str) -> ReplicaSpec:
    """Sizes and speeds in blocks and seconds. Raises ConfigError."""
    hardware = scenario.hardware
    layout = hardware.layout
    sizes = Sizes(pool_blocks(scenario, work), int(scenario.host_gb * 1e9) // layout.block_bytes, layout.block_tokens)
    bps = scenario.link_gbps * 1e9 or hardware.link_bps
    link = LinkSpec(layout.block_bytes / bps, scenario.latency_s, scenario.adapter_load_s, GROUPS)
    cache = cache_of(policy, scenario.cache)
    costs = None
    if scenario.engine.cold_start in ("auto", "cpu"):
        step = scenario.step
        costs = Costs.fitted(step) if isinstance(step, FittedSteps) else hardware.costs(scenario.host, bps)
    kind = Blocking if scenario.blocking else Link
    model, engine = scenario.step_model, scenario.engine
    size = layout.block_bytes
    return ReplicaSpec(model, link, sizes, work.sizes, cache, engine, costs, kind, hardware.places, size)


def pool_blocks(scenario: Scenario, work: Work) -> int:
    """Blocks of the device's pool. Raises ConfigError if it cannot hold one adapter and one block of KV."""
    if scenario.hbm_gb and scenario.hbm_share:
        raise ConfigError(f"hbm_share = {scenario.hbm_share:g}: must be 0 when hbm_gb is set")
    if scenario.hbm_share:
        blocks = int(scenario.hbm_share * work.facts.working_set)
    else:
        size = scenario.hbm_gb * 1e9 or scenario.hardware.pool_bytes
        blocks = int(size) // scenario.hardware.layout.block_bytes
    least = max(work.sizes, default=0) + 1
    if blocks <= least:
        raise ConfigError(f"a pool of {blocks} blocks: must have more than {least}; raise hbm_gb or hbm_share")
    return blocks


def describe(scenario: Scenario, spec: ReplicaSpec) -> dict[str, Any]:
    """The setting of a result."""
    hardware = scenario.hardware
    return {
        "model": hardware.spec.name,
        "chip": hardware.chip.name,
        "chips": hardware.chips,
        "step_model": "fitted" if scenario.step else hardware.chip.source,
        "block_tokens": spec.sizes.block_tokens,
        "block_bytes": hardware.layout.block_bytes,
        "device_blocks": spec.sizes.device,
        "host_blocks": spec.sizes.host,
        "link_gbps": hardware.layout.block_bytes / spec.link.block_s / 1e9,
        "latency_s": spec.link.latency_s,
        "adapter_load_s": spec.link.adapter_s,
        "hint_s": scenario.hint_s,
        "max_seqs": spec.engine.max_seqs,
        "max_step_tokens": spec.engine.max_step_tokens,
        "share": spec.cache.share,
    }


def _series(trace: Trace) -> Series:
    start = start_of(trace)
    if trace.users:
        return Series(start, OFTEN_S, 2 * SAMPLES)
    return Series(start, max(trace.turns[-1].at, 1e-9) / SAMPLES)


def cache_of(policy: str, config: CacheConfig) -> CacheConfig:
    """The cache's configuration for a policy's name. Raises ConfigError."""
    name, _, share = policy.partition(":")
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r}: {one_of(name, POLICIES)}")
    if not share:
        return replace(config, policy=name)
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if name != SHARED or not 0 < value < 1:
        raise ConfigError(f"policy {policy!r}: a share must be in (0, 1), and only {SHARED} has one")
    return replace(config, policy=name, share=value)


def cache_policy(policy: str, spec: ReplicaSpec, work: Work) -> Policy:
    """The cache's policy by name."""
    meter = Meter(spec.link.block_s, block_tokens=spec.sizes.block_tokens)
    if policy == Clairvoyant.name:
        return Clairvoyant(meter, foresee(work.trace, spec.sizes.block_tokens))
    return make_policy(spec.cache, meter)


def foresee(trace: Trace, block_tokens: int) -> Oracle:
    """The times at which the trace uses each block and adapter, if answers take no time."""
    oracle = Oracle(start_of(trace), block_tokens)
    script = Script(trace.turns)
    while (due := script.next_due()) is not None:
        for at, turn in script.take(due):
            prompt = script.prompt(turn)
            uid = 0 if turn.adapter is None else turn.adapter + 1
            oracle.expect(at, uid, turn.tenant, prompt, turn.activation(len(prompt)))
            script.answered(turn, answer(seed_of(turn), len(prompt), turn.output), at)
    return oracle
